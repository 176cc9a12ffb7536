"""The README tells the truth: its Python runs, its links lead somewhere, its figures come from a command."""

import subprocess
import sys

import pytest
from transformers import TrainingArguments
from trl import SFTConfig

from ..models import tiny_llama, tiny_tokenizer, token_dataset
from .markdown import ROOT, anchor_headings, find_anchors, find_links, find_snippets, read_page

README = read_page("README.md")
SNIPPETS = find_snippets(README, "python")


def test_there_are_snippets():
    assert len(SNIPPETS) >= 8


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[f"snippet{i}" for i in range(len(SNIPPETS))])
def test_snippets_run(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = SFTConfig if "SFT" in snippet else TrainingArguments
    args = config(
        output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        bf16=False, save_strategy="no", dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    names = {"model": tiny_llama(), "args": args, "dataset": token_dataset(8), "tokenizer": tiny_tokenizer()}
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme", **names})


def test_links_lead_somewhere():
    for link in find_links(README):
        assert (ROOT / link).exists(), link
    assert set(find_anchors(README)) <= anchor_headings(README)


@pytest.mark.parametrize("path", ["recipes/sft.py", "recipes/grpo_vlm.py", "configs/accelerate/ddp.yaml"])
def test_what_the_commands_name_is_there(path):
    assert path in README
    assert (ROOT / path).exists()


@pytest.mark.slow
def test_the_table_of_peers_is_what_the_benchmark_prints():
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--markdown"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout
    assert printed.count("\n| ") == 8
    assert printed in README
