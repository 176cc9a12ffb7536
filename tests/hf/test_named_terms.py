"""Named terms inside a Trainer's `compute_loss`: stock and guarded alike, blamed, dropped, logged."""

import pytest
from transformers import Trainer

from hf_nanguard.testing import NAN
from tests.reference import assert_same, losses_of, tensors_of
from tests.trainers import build, events_of

STEP, PLACE = 1, 2


class Places:
    """In which order ids came first. No plain container, which a redo would put back as it was before the group."""

    def __init__(self):
        self.known = {}

    def find(self, ids) -> int:
        return self.known.setdefault(ids.numpy().tobytes(), len(self.known))


class TwoTerms(Trainer):
    """Cross-entropy and a penalty on the logits; `sick` says what is wrong with the penalty of one micro-batch."""

    sick: str | None = None
    on_nonfinite = "keep"
    places = Places()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        strikes = self.is_struck(inputs["input_ids"])
        penalty = outputs.logits.float().square().mean()
        if strikes and self.sick == "value":
            penalty = penalty * NAN
        if strikes and self.sick == "slope":
            penalty = (outputs.logits.float() * 0).sum(-1).square().sqrt().mean()
        term = self.nanguard.guard.term if "nanguard" in vars(self) else lambda name, value, weight, _: weight * value
        loss = term("ce", outputs.loss, 1.0, "keep")
        if not (strikes and self.sick == "absent"):
            loss = loss + term("penalty", penalty, 0.1, self.on_nonfinite)
        return (loss, outputs) if return_outputs else loss

    def is_struck(self, ids) -> bool:
        """Whether these are the ids of the micro-batch at `STEP` and `PLACE`, whenever they are run."""
        return self.model.training and self.places.find(ids) == 3 * STEP + PLACE


def train(tmp_path, sick, on_nonfinite="keep", guard=True, **overrides):
    name = f"{sick}-{on_nonfinite}-{guard}"
    trainer = build("plain", tmp_path / name, TwoTerms, guard, max_steps=3, **overrides)
    trainer.sick, trainer.on_nonfinite, trainer.places = sick, on_nonfinite, Places()
    trainer.train()
    return trainer


def rows_of(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def test_a_healthy_run_is_that_of_the_stock_trainer(tmp_path):
    stock = train(tmp_path, None, guard=False)
    trainer = train(tmp_path, None, "drop")
    assert_same(tensors_of(trainer), tensors_of(stock))
    assert losses_of(trainer) == losses_of(stock)
    assert events_of(trainer) == []
    for row in rows_of(trainer):
        # ce is divided by the items of the whole group and so adds up; the penalty is a mean
        assert row["loss"] == pytest.approx(
            3 * row["nanguard/term/ce"] + 3 * 0.1 * row["nanguard/term/penalty"], rel=1e-3
        )


@pytest.mark.parametrize("sick", ["value", "slope"])
def test_a_bad_term_is_named(tmp_path, sick):
    [event] = events_of(train(tmp_path, sick))
    assert (event["step"], event["micro_step"], event["action"]) == (STEP, PLACE, "dropped")
    assert event["signal"] == ("loss_nonfinite" if sick == "value" else "grad_nonfinite")
    assert event["culprit"]["term"] == "penalty"
    assert event["culprit"]["source"].startswith("test_named_terms.py")
    assert event["culprit"]["rows"]
    assert event["values"]["terms"].keys() == {"ce", "penalty"}


@pytest.mark.parametrize("sick", ["value", "slope"])
def test_a_dropped_term_leaves_the_rest_of_its_loss(tmp_path, sick):
    trainer = train(tmp_path, sick, "drop")
    expected = train(tmp_path, "absent", guard=False)
    assert_same(tensors_of(trainer), tensors_of(expected))
    assert losses_of(trainer) == losses_of(expected)
    [event] = events_of(trainer)
    assert (event["step"], event["micro_step"], event["action"]) == (STEP, PLACE, "dropped")
    assert event["culprit"]["term"] == "penalty"
    last = rows_of(trainer)[-1]
    assert last["nanguard/dropped_terms/penalty"] == 1
    assert "nanguard/dropped_microbatches" not in last


def test_an_evaluation_keeps_its_terms_to_itself(tmp_path):
    trainer = build("plain", tmp_path, TwoTerms, True, max_steps=2)
    trainer.train()
    trainer.evaluate(trainer.train_dataset)
    assert trainer.nanguard.guard.group.terms == []
