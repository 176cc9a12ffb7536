"""Supervised training with nothing to learn from."""

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardArguments, guarded
from hf_nanguard.core.journal import Journal
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.hf.data.batch_limits import Limits
from hf_nanguard.hf.data.learning_signal import NoSignal, NoSignalDetector, StepSignal, find_no_signal

from ...models import tiny_llama, token_rows
from ...trainers import build, common_arguments, events_of

LM = Limits(num_labels=50, token_labels=True, shifted=True, num_ids=50)
CLASSES = Limits(num_labels=3, num_ids=50)


def lm_batch(num_samples=10, length=12, targets=()):
    ids = torch.arange(num_samples * length).reshape(num_samples, length) % 50
    labels = torch.full_like(ids, -100)
    for sample, position in targets:
        labels[sample, position] = 7
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    ("targets", "verdict"),
    [
        ([(0, 5)], NoSignal.MASKED),
        ([(0, 5), (1, 5)], None),
        ([(i, 11) for i in range(10)], None),
        ([], None),  # not a single one: the batch is dropped as labels_masked
    ],
    ids=["one sample in ten", "two in ten", "one label each", "none"],
)
def test_labels_that_are_nearly_all_masked(targets, verdict):
    assert find_no_signal(lm_batch(targets=targets), LM) is verdict


def test_a_few_labels_in_a_sea_of_tokens():
    batch = lm_batch(2, 3000, [(0, 9), (1, 9)])
    assert find_no_signal(batch, LM) is NoSignal.MASKED
    batch["attention_mask"][:, 100:] = 0  # padding does not count
    assert find_no_signal(batch, LM) is None
    answers = [(sample, position) for sample in (0, 1) for position in (2998, 2999)]
    assert find_no_signal(lm_batch(2, 6000, answers), LM) is None  # a short answer to a long text each


def test_a_label_that_is_never_a_target_does_not_count():
    batch = lm_batch(targets=[(i, 0) for i in range(10)] + [(3, 4)])
    assert find_no_signal(batch, LM) is NoSignal.MASKED


@pytest.mark.parametrize("labels", [[0, 1, 2], [1, 1, 1]])
def test_one_input_with_different_labels(labels):
    batch = {"pixel_values": torch.zeros(3, 2, 4, 4), "labels": torch.tensor(labels)}
    assert find_no_signal(batch, CLASSES) is (NoSignal.CONSTANT if len(set(labels)) > 1 else None)
    batch["pixel_values"][2, 1, 3, 3] = 1.0
    assert find_no_signal(batch, CLASSES) is None


def test_one_token_all_over():
    ids = torch.full((3, 5), 3)
    mask = torch.ones_like(ids)
    assert find_no_signal({"input_ids": ids, "labels": ids}, LM) is NoSignal.CONSTANT
    ids[1, 3:], mask[1, 3:] = 0, 0
    assert find_no_signal({"input_ids": ids, "labels": ids, "attention_mask": mask}, LM) is NoSignal.CONSTANT
    ids[0, 2] = 4
    assert find_no_signal({"input_ids": ids, "labels": ids, "attention_mask": mask}, LM) is None


@pytest.mark.parametrize("ids", [[5, 6, 7], [5, 5, 5]], ids=["a prompt", "a placeholder"])
@pytest.mark.parametrize("name", ["pixel_values", "bbox"])
def test_one_prompt_with_different_images(ids, name):
    other = torch.randn(3, 2, 4, 4)
    batch = {"input_ids": torch.tensor([ids] * 3), name: other, "labels": torch.arange(6).reshape(3, 2)}
    constant = ids == [5, 5, 5] and name == "bbox"  # a field that is not known as an input
    assert find_no_signal(batch, LM) is (NoSignal.CONSTANT if constant else None)
    batch[name] = other[:1].expand(3, -1, -1, -1)
    assert find_no_signal(batch, LM) is NoSignal.CONSTANT


def test_a_repeated_example_teaches_that_example():
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    assert find_no_signal({"input_ids": ids, "labels": ids}, LM) is None


@pytest.mark.parametrize("batch", [{}, {"x": torch.ones(2, 2)}, {"labels": torch.empty(0, 4)}, {"input_ids": "text"}])
def test_what_is_not_known_is_not_judged(batch):
    assert find_no_signal(batch, LM) is None


def detect(stall_steps, signals, first=0):
    """Feeds the signals of steps in a row to a detector and returns its events."""
    events = []
    detector = NoSignalDetector(stall_steps, Journal(Ranks(), events.append))
    for step, signal in enumerate(signals, first):
        detector.observe(step, signal, 0.5)
    return events


def supervised(*batches, norm=0.5):
    return StepSignal.of_batches(batches, norm)


MASKED, CONSTANT, ZERO = NoSignal.MASKED, NoSignal.CONSTANT, NoSignal.ZERO_GRADIENT


@pytest.mark.parametrize(
    ("batches", "norm", "missing", "phase"),
    [
        ([MASKED, MASKED], 0.5, MASKED, "input"),
        ([CONSTANT], 0.0, CONSTANT, "input"),
        ([MASKED], None, MASKED, "input"),
        ([MASKED, None], 0.5, None, "input"),
        ([MASKED, CONSTANT], 0.5, None, "input"),
        ([None], 0.0, ZERO, "backward"),
        ([], 0.0, ZERO, "backward"),
        ([None], 1e-30, None, "backward"),
        ([], None, None, "backward"),
    ],
)
def test_a_supervised_step_is_classified_by_its_batches_and_its_norm(batches, norm, missing, phase):
    assert StepSignal.of_batches(batches, norm) == StepSignal(missing, phase)


def test_a_streak_is_reported_once():
    masked, learns = supervised(MASKED, MASKED), supervised(MASKED, None)
    events = detect(3, [*[masked] * 8, learns, *[masked] * 3])
    assert [event["step"] for event in events] == [2, 11]
    assert "3 optimizer steps in a row (0 to 2): nearly all labels were masked. Check" in events[0]["message"]
    assert events[0]["values"] == {"grad_norm": 0.5}


def test_every_healthy_step_ends_a_streak():
    assert detect(2, [supervised(norm=0.0), supervised(norm=1e-30)] * 5) == []
    assert detect(1, [supervised(None)] * 10) == []


def test_zero_turns_it_off():
    assert detect(0, [supervised(MASKED)] * 50) == []


def test_a_mixed_streak_names_both():
    [event] = detect(3, [supervised(MASKED), supervised(norm=0.0), supervised(MASKED)], first=7)
    assert "(7 to 9): nearly all labels were masked or the gradient was exactly zero. Check" in event["message"]


# ---- in a run ----


def emitted(trainer):
    return [event for event in events_of(trainer) if event["signal"] == "no_learning_signal"]


def sparse_rows(num_rows):
    rows = token_rows(num_rows)
    for index, row in enumerate(rows):
        row["labels"] = [-100] * 7 + ([row["labels"][7]] if index % 10 == 0 else [-100])
    return rows


@pytest.mark.parametrize("masked", [True, False])
def test_a_run_whose_labels_are_nearly_all_masked(tmp_path, masked):
    rows = sparse_rows(240) if masked else token_rows(240)
    arguments = {"per_device_train_batch_size": 10, "gradient_accumulation_steps": 2, "max_steps": 6}
    trainer = guarded(Trainer)(
        tiny_llama(),
        TrainingArguments(**common_arguments(tmp_path, **arguments), train_sampling_strategy="sequential"),
        train_dataset=Dataset.from_list(rows),
        guard=GuardArguments(nanguard_stall_steps=4),
    )
    trainer.train()
    events = emitted(trainer)
    assert [event["step"] for event in events] == ([3] if masked else [])
    if masked:
        assert "nearly all labels were masked" in events[0]["message"]
        assert (events[0]["action"], events[0]["culprit"]["phase"]) == ("observed", "input")


class Detached(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        result = super().compute_loss(model, inputs, *args, **kwargs)
        return (result.detach() + 0.0 * result) if not isinstance(result, tuple) else result


@pytest.mark.parametrize("guard", [{}, {"nanguard_stall_steps": 0}])
def test_a_run_whose_gradient_is_zero(tmp_path, guard):
    trainer = build("plain", tmp_path, Detached, max_steps=25, extra={"guard": GuardArguments(**guard)})
    trainer.train()
    events = emitted(trainer)
    assert [event["step"] for event in events] == ([] if guard else [19])
    if events:
        assert "the gradient was exactly zero" in events[0]["message"]
        assert events[0]["culprit"]["phase"] == "backward"


def test_a_tokenizer_that_knows_no_word(tmp_path):
    rows = [{"input_ids": [3] * 6, "labels": [3] * 6} for _ in range(12)]
    trainer = build("plain", tmp_path, max_steps=5, extra={
        "train_dataset": Dataset.from_list(rows), "guard": GuardArguments(nanguard_stall_steps=5)})  # fmt: skip
    trainer.train()
    [event] = emitted(trainer)
    assert "all samples had the same input" in event["message"]
