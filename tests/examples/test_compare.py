"""Runs side by side: what is measured from outside, what is caught, and how it is printed."""

from io import StringIO
from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

from hf_nanguard.examples.compare import Outcome, compare_runs, describe, find_first, print_comparison, watch_run
from hf_nanguard.examples.recipe.guarded_run import guarded_run
from hf_nanguard.hf.guarded_trainer import guarded
from hf_nanguard.report.terminal_console import build_console
from hf_nanguard.testing import NAN
from tests.reference import losses_of
from tests.trainers import build

NUM_WEIGHTS = 21


class Failing(Trainer):
    """Its loss is NaN at one step, or it raises there."""

    error: Exception | None = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        is_bad = self.state.global_step == 1
        if is_bad and self.error is not None:
            raise self.error
        loss = outputs.loss * NAN if is_bad else outputs.loss
        return (loss, outputs) if return_outputs else loss


def build_failing(folder: Path, guard: bool, error: Exception | None = None) -> Trainer:
    trainer = build("plain", folder, Failing, guard, gradient_accumulation_steps=1, max_steps=3)
    trainer.error = error
    return trainer


def run(name: str, trainer: Trainer, *how) -> Outcome:
    with watch_run(name, trainer, *how) as outcome:
        trainer.train()
    return outcome


def test_a_stock_run_is_seen_to_be_lost(tmp_path):
    outcome = run("stock", build_failing(tmp_path, False), lambda trainer: {"steps": trainer.state.global_step})
    assert (outcome.error, outcome.steps, outcome.events) == (None, 3, [])
    assert len(outcome.bad_weights) == outcome.num_weights == NUM_WEIGHTS
    assert set(outcome.bad_weights.values()) == {"nan"}
    assert outcome.losses[1:] == [0.0, 0.0]  # the host's filter
    assert outcome.figures == {"steps": 3}
    assert not outcome.is_sound


def test_a_guarded_run_is_sound_and_has_its_own_events_only(tmp_path):
    for _ in range(2):
        outcome = run("guarded", build_failing(tmp_path, True))
        assert outcome.is_sound
        assert [(event["step"], event["signal"]) for event in outcome.events] == [(1, "loss_nonfinite")]


def test_an_error_of_bad_numbers_is_part_of_the_outcome(tmp_path):
    measured = []
    error = RuntimeError("probability tensor is bad\nand more")
    outcome = run("stock", build_failing(tmp_path, False, error), measured.append)
    assert outcome.error == "RuntimeError: probability tensor is bad"
    assert (outcome.steps, outcome.bad_weights, measured) == (1, {}, [])
    assert not outcome.is_sound


def test_a_mistake_goes_through(tmp_path):
    with pytest.raises(KeyError):
        run("stock", build_failing(tmp_path, False, KeyError("no such column")))


def test_both_run_on_the_same_arguments_in_folders_of_their_own(tmp_path, capsys):
    built = []

    def build_trainer(args: TrainingArguments, trainer_class: type) -> Trainer:
        trainer = build_failing(Path(args.output_dir), trainer_class is not Failing)
        built.append(trainer)
        return trainer

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    outcomes = compare_runs(build_trainer, (Failing, guarded(Failing)), args, "Planted: a NaN [at] step 1.")
    assert [outcome.name for outcome in outcomes] == ["stock", "guarded"]
    assert [outcome.folder for outcome in outcomes] == [tmp_path / "stock", tmp_path / "guarded"]
    assert args.output_dir == str(tmp_path)
    assert losses_of(built[0])[0] == losses_of(built[1])[0]
    printed = capsys.readouterr().out
    assert printed.startswith("Planted: a NaN [at] step 1.\n")
    assert "{'loss'" not in printed
    assert f"events of the guarded run: {tmp_path}/guarded/nanguard/events.jsonl" in printed


def test_without_a_comparison_there_is_the_guarded_run_only(tmp_path, capsys):
    trainer = build_failing(tmp_path, True)
    with guarded_run(trainer, planted="Planted: a NaN.") as outcome:
        trainer.train()
    assert (outcome.name, outcome.folder, outcome.is_sound) == ("guarded", tmp_path, True)
    printed = capsys.readouterr().out
    assert printed.startswith("Planted: a NaN.")
    assert "{'loss'" in printed
    assert printed.endswith(f"model: {tmp_path}\n")


def event(action: str, **culprit) -> dict:
    remedies = [{"name": "eps", "tried": True, "works": True}, {"name": "bf16", "tried": True, "works": False}]
    return {
        "step": 4, "signal": "loss_nonfinite", "action": action, "cause": "div_by_zero", "culprit": culprit,
        "remedies": remedies,
    }  # fmt: skip


LOST = Outcome("stock", Path("x/stock"), None, 9, [4.0, 3.0, 2.0, 1.0, 0.0, 0.0], {"w": "nan"}, 5, {"score": 0.123456})
KEPT = Outcome(
    "guarded",
    Path("x/guarded"),
    "RuntimeError: [red]no[/red]",
    events=[event("observed"), event("dropped", term="kd", rows=[7])],
)


def test_answers():
    lost, kept = describe(LOST), describe(KEPT)
    assert lost == {
        "run": "9 steps",
        "weights": "NOT FINITE: 1 of 5 tensors",
        "logged losses": "4 3 ... 1 0 0",
        "score": "0.1235",
        "events": "none",
    }
    assert kept["run"] == "0 steps, ENDED by RuntimeError: [red]no[/red]"
    assert kept["events"] == "1 loss_nonfinite observed, 1 loss_nonfinite dropped"
    blamed = "step 4: loss_nonfinite, dropped; div_by_zero; term kd; rows [7]; would have helped: eps"
    assert kept["first culprit"] == blamed
    assert find_first([event("observed")])["action"] == "observed"


@pytest.mark.parametrize("terminal", [True, False])
def test_terminals_get_a_table_and_pipes_plain_lines(terminal):
    file = StringIO()
    print_comparison([LOST, KEPT], build_console(file=file, force_terminal=terminal, width=200, color_system=None))
    text = file.getvalue()
    assert ("│" in text) == terminal
    assert "[red]no[/red]" in text
    assert "events of the guarded run: x/guarded/nanguard/events.jsonl" in text
    assert "autopsies" not in text
    assert "events of the stock run" not in text
    if not terminal:
        assert "\nstock\n  run            9 steps\n" in text


def test_a_narrow_table_breaks_long_words_instead_of_cutting_them():
    """A place in the code is one word, and the reason to look at the table."""
    file, name = StringIO(), "planted_failures_of_the_demo.py:2345"
    kept = Outcome("guarded", Path("x/guarded"), events=[{**event("dropped"), "culprit": {"source": name}}])
    print_comparison([LOST, kept], build_console(file=file, force_terminal=True, width=60, color_system=None))
    cells = [line.split("│")[-2].strip() for line in file.getvalue().splitlines() if line.startswith("│")]
    assert name in "".join(cells).replace(" ", "")
