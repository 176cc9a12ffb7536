"""The README tells the truth: its Python runs, its links lead somewhere, its figures come from a command."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from hf_nanguard.core.autopsy.evidence.verdict import Blame, Verdict
from hf_nanguard.core.autopsy.trace.origin import Origin
from hf_nanguard.core.event import Remedy
from hf_nanguard.core.journal import Journal
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.core.rerun.micro_batch import AccumulationGroup, MicroBatch
from hf_nanguard.core.rng import RngState
from hf_nanguard.core.step.bad_gradients import Census
from hf_nanguard.core.step.decision import Decision, StepAction
from hf_nanguard.core.step.step_reading import BadMicroBatch, StepReading
from hf_nanguard.core.vocabulary import Action, Cause
from hf_nanguard.testing import NAN

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


def test_the_messages_shown_are_those_of_the_code(caplog):
    """In the README and in docs/run.md: an event as it is logged, and the summary at the end."""
    origin = Origin("loss", "nan", Cause.DIV_BY_ZERO, source="train.py:24")
    remedies = tuple(Remedy(name, True, True) for name in ("guarded_division", "drop_rows"))
    verdict = Verdict(origin, Blame("samples", [1], rows=[1017]), True, remedies)
    micro = MicroBatch(3, None, RngState.capture(), row_numbers=[1016, 1017])
    bad = replace(BadMicroBatch.of_run(micro, NAN, Census(bad={"w": "nan"}), 412), verdict=verdict)
    step = StepReading(412, AccumulationGroup(1.0, [micro]), [NAN], NAN, torch.tensor(NAN), Decision(StepAction.REDO))
    journal = Journal(Ranks())
    journal.write(bad.event(Action.DROPPED, step))
    shown = f"{caplog.messages[-1]}\n{journal.summary.format_end('runs/mine')}\n"
    assert "(dataset row 1017)" in caplog.messages[-1]
    for page in (README, read_page("docs/run.md")):
        assert shown in page
    assert journal.summary.format()[0].replace("412", "42") in read_page("docs/report.md")
