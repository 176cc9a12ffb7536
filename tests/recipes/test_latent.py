"""The recipe of two terms: the planted row's term is blamed, the stable losses are not harmed, healthy data is silent."""

import os
import subprocess
from pathlib import Path

import pytest

from recipes import latent
from tests.distributed.launch import torchrun

from .running import find_outcomes

ROWS = ("--num_rows", "24", "--max_steps", "4")  # an epoch is 3 steps
TENSORS = 41


def run(tmp_path, *words: str):
    return find_outcomes(latent, *ROWS, "--output_dir", str(tmp_path), "--logging_steps", "1", *words)


@pytest.mark.parametrize(("plant", "term"), [("empty_mask", "text"), ("zero_latent", "latent")])
def test_the_term_of_the_planted_row_is_blamed(tmp_path, plant, term):
    stock, guarded = run(tmp_path, "--plant", plant)
    assert len(stock.bad_weights) == stock.num_weights == TENSORS
    assert guarded.is_sound
    event = guarded.events[0]
    assert (event["signal"], event["action"], event["cause"]) == ("loss_nonfinite", "dropped", "div_by_zero")
    assert (event["culprit"]["term"], event["culprit"]["rows"]) == (term, [latent.BAD_ROW])
    assert event["culprit"]["source"].startswith("latent.py:")
    assert event["values"]["terms"][term] == "nan"
    assert guarded.figures["terms, last logged"].startswith("text ")


def test_progress_of_both_runs_is_printed(tmp_path, capsys):
    run(tmp_path, "--max_steps", "6")
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if " step " in line]
    steps = ["2/6", "4/6", "6/6"]
    progress = [(name, step) for name, _, step, *_ in shown if step in steps]
    assert progress == [(name, step) for name in ("stock", "guarded") for step in steps]


def test_only_the_term_is_lost_if_it_may_be(tmp_path):
    _, guarded = run(tmp_path, "--on_bad_term", "drop")
    assert guarded.is_sound
    assert guarded.events[0]["culprit"]["term"] == "text"
    assert "only the term was dropped" in guarded.events[0]["message"]


@pytest.mark.parametrize("plant", ["empty_mask", "zero_latent"])
def test_stable_losses_take_the_planted_row(tmp_path, plant):
    stock, guarded = run(tmp_path, "--plant", plant, "--stable_losses", "true")
    assert stock.is_sound
    assert guarded.is_sound
    assert guarded.events == []
    assert guarded.losses == stock.losses


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path):
    script = Path(latent.__file__)
    words = [*ROWS, "--output_dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(script.parent.parent)}
    done = subprocess.run(
        [*torchrun(2), str(script), *words], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Planted:") == 1  # one rank speaks
    assert f"NOT FINITE: {TENSORS} of {TENSORS} tensors" in done.stdout
    assert "term text" in done.stdout.split("guarded\n")[-1]
