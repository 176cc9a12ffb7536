"""The check at the start of a guarded run: it says what is wrong before step 0, and changes nothing."""

import logging
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments, default_data_collator

from hf_nanguard import ArgumentError, GuardArguments, GuardedTrainingArguments, attach
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.doctor import dataset_check, start_check
from hf_nanguard.doctor.dataset_check import DATA_CHECKS
from hf_nanguard.doctor.facts import device_facts
from hf_nanguard.doctor.rules.finding import Finding, Severity
from hf_nanguard.doctor.rules.run_facts import Facts
from hf_nanguard.plain_text import quote
from hf_nanguard.testing import OperationCounter

from ..models import token_rows
from ..trainers import KINDS, build

HALF_MASKED = [{**row, "labels": [-100] * 8} if number % 4 == 0 else row for number, row in enumerate(token_rows(48))]


def masked(tmp_path, mode="warn", **extra):
    """A guarded trainer a quarter of whose rows have no label, and whose betas are swapped."""
    extra = {"train_dataset": Dataset.from_list(HALF_MASKED), "guard": GuardArguments(nanguard_doctor=mode), **extra}
    return build("plain", tmp_path, extra=extra, adam_beta1=0.999, adam_beta2=0.9)


def told(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().endswith("]")]


def test_everything_above_a_note_is_one_line(tmp_path, caplog):
    masked(tmp_path).train()
    lines = told(caplog)
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["[adam-betas]", "[labels-masked]"]
    assert "adam_beta1 is 0.999 and adam_beta2 is 0.9." in lines[0]
    assert "12 of 48 rows (25.0%) (dataset rows 0, 4, 8, " in lines[1]
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.getMessage() in lines)


def test_off_says_nothing(tmp_path, caplog):
    masked(tmp_path, "off").train()
    assert told(caplog) == []


def test_strict_refuses_to_start(tmp_path):
    trainer = masked(tmp_path, "strict")
    with pytest.raises(
        ArgumentError,
        match=r"\(1\) adam_beta1 is 0.999 .* \(2\) No label is left in 12 of 48 rows .*nanguard_doctor='warn'",
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_strict_refuses_on_every_rank_if_one_has_found_something(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "any", lambda self, fact: True)
    with pytest.raises(ArgumentError, match="found on another rank"):
        build("plain", tmp_path, extra={"guard": GuardArguments(nanguard_doctor="strict")}).train()


@pytest.mark.parametrize("kind", KINDS)
def test_sound_runs_are_silent_and_start(kind, tmp_path, caplog):
    build(kind, tmp_path, max_steps=1, extra={"guard": GuardArguments(nanguard_doctor="strict")}).train()
    assert told(caplog) == []


def test_a_check_that_fails_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    def fail(trainer):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(start_check, "find_trainer_facts", fail)
    trainer = masked(tmp_path, "strict")
    trainer.train()
    assert trainer.state.global_step == 4
    assert "could not be checked at the start of the run (RuntimeError: no such thing)" in caplog.text


class Counting:
    """A collator that cannot be called once more without a trace."""

    def __init__(self, calls):
        self.calls = calls

    def __deepcopy__(self, memo):
        return self

    def __call__(self, examples):
        self.calls.append(len(examples))
        return default_data_collator(examples)


def test_data_of_ones_own_is_not_read_before_the_run(tmp_path, caplog):
    calls: dict[str, list[int]] = {"off": [], "warn": []}
    for mode in calls:
        masked(tmp_path, mode, data_collator=Counting(calls[mode])).train()
    assert calls["warn"] == calls["off"] != []
    assert [line.rsplit(" ", 1)[1] for line in told(caplog)] == ["[adam-betas]"]


def test_it_makes_no_step_dearer(tmp_path):
    """Everything happens before the first step: the steps themselves have the operations of a run without it."""

    def count(mode):
        trainer = build("plain", tmp_path, extra={"guard": GuardArguments(nanguard_doctor=mode)})
        begin, counts = trainer.nanguard.step.begin_group, []

        def counted(batches):
            counts.append((counter.num_reads, counter.num_ops))
            return begin(batches)

        trainer.nanguard.step.begin_group = counted
        with OperationCounter() as counter:
            trainer.train()
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)]

    assert count("warn") == count("off")


# ---- precision ----


@pytest.mark.parametrize(
    ("support", "expected"),
    [("native", (True, False)), ("emulated", (False, True)), ("absent", (False, True)), (None, (False, False))],
)
def test_auto_picks_the_safe_precision_and_says_why(support, expected, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(device_facts, "find_accelerator_facts", lambda: Facts.of(bf16_support=support))
    caplog.set_level(logging.INFO, "hf_nanguard")
    chosen = device_facts.choose_precision(use_cpu=False)
    assert (chosen["bf16"], chosen["fp16"]) == expected
    assert "nanguard_precision='auto' chose" in caplog.text


def test_auto_on_a_cpu_is_float32(tmp_path):
    args = GuardedTrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, nanguard_precision="auto")
    assert (args.bf16, args.fp16, args.mixed_precision) == (False, False, "no")
    kept = GuardedTrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True)
    assert (kept.bf16, kept.mixed_precision) == (True, "bf16")


def test_auto_where_it_cannot_take_effect_says_so(tmp_path, caplog):
    trainer = attach(build("plain", tmp_path, guard=False, max_steps=1), {"nanguard_precision": "auto"})
    trainer.train()
    assert isinstance(trainer.args, TrainingArguments)
    assert caplog.text.count("nanguard_precision='auto' has no effect here") == 1


@pytest.mark.parametrize("text", [True, False])
def test_text_of_the_data_is_logged_only_if_it_may_be(text, tmp_path, caplog, monkeypatch):
    def find(sample):
        return Finding(Severity.WARNING, f"Batches have no labels, only {quote('Jane Roe')}.", "Because.", "Add them.")

    guard = GuardArguments(nanguard_bundle_text=text)
    check = replace(DATA_CHECKS[0], check=find, applies=lambda sample: True)
    monkeypatch.setattr(dataset_check, "DATA_CHECKS", (check,))
    build("plain", tmp_path, extra={"guard": guard}).train()
    assert f"only {'Jane Roe' if text else '[redacted]'}. Because. Add them." in caplog.text
    caplog.clear()

    def fail(facts):
        raise ValueError("Jane Roe")

    monkeypatch.setattr(start_check, "judge", fail)
    build("plain", tmp_path, extra={"guard": guard}).train()
    assert (
        f"could not be checked at the start of the run (ValueError: {'Jane Roe' if text else '[redacted]'})"
        in caplog.text
    )
