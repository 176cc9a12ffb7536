"""The README tells the truth: its Python runs, its links lead somewhere, its figures come from a command."""

import json
import subprocess
import sys

import pytest

from .markdown import ROOT, anchor_headings, find_anchors, find_links, find_snippets, read_page, run_snippet

README = read_page("README.md")
SNIPPETS = find_snippets(README, "python")


def test_it_is_short():
    assert len(README) <= 10_000


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[f"snippet{i}" for i in range(len(SNIPPETS))])
def test_snippets_run(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippet(snippet, "README.md", tmp_path)


def test_links_lead_somewhere():
    for link in find_links(README):
        assert (ROOT / link).exists(), link
    assert set(find_anchors(README)) <= anchor_headings(README)


@pytest.mark.parametrize("path", ["recipes/sft.py", "recipes/grpo_vlm.py", "configs/accelerate/ddp.yaml"])
def test_what_the_commands_name_is_there(path):
    assert path in read_page("docs/recipes.md")
    assert (ROOT / path).exists()


@pytest.mark.slow
def test_the_table_of_peers_is_what_the_benchmark_finds(tmp_path):
    file = tmp_path / "peers.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--json", str(file)]
    subprocess.run(command, capture_output=True, check=True, timeout=900)
    found, stored = (json.loads(each.read_text()) for each in (file, ROOT / "benchmarks" / "results" / "peers.json"))
    assert len(found["rows"]) == 8
    assert found["rows"] == stored["rows"]
