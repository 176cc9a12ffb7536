"""The denoising recipe: inputs, weights, predictions and loss are checked; the clean end of the noise levels is blamed."""

import pytest
import torch

from recipes import diffusion

from .running import find_outcomes

TENSORS = 14


def run(tmp_path, *words: str):
    few = ("--num_rows", "40", "--max_steps", "6", "--num_levels", "40", "--logging_steps", "1")
    return find_outcomes(diffusion, *few, "--output_dir", str(tmp_path), *words)


def test_the_weight_at_the_clean_end_is_blamed(tmp_path):
    stock, guarded = run(tmp_path)
    assert len(stock.bad_weights) == stock.num_weights == TENSORS
    assert guarded.is_sound
    watched = [event for event in guarded.events if event["signal"] == "prediction_nonfinite"]
    assert {event["culprit"]["term"] for event in watched} == {"loss weight"}
    acted = [event for event in guarded.events if event["action"] != "observed"]
    assert {event["signal"] for event in acted} == {"loss_nonfinite"}
    assert acted[0]["cause"] == "div_by_zero"
    assert acted[0]["culprit"]["term"] == "signal"
    assert acted[0]["culprit"]["source"].startswith("diffusion.py:")


def test_the_row_that_drew_the_level_is_named(tmp_path, monkeypatch):
    drawn = []

    class Recording(diffusion.NoisyCollator):
        def __call__(self, rows):
            batch = super().__call__(rows)
            drawn.extend(place for place, level in zip(batch["place"], batch["level"], strict=True) if level == 0)
            return batch

    monkeypatch.setattr(diffusion, "NoisyCollator", Recording)
    [guarded] = run(tmp_path, "--compare", "false")
    rows = diffusion.build_rows(40, seed=1)
    named = [row for event in guarded.events if event["cause"] for row in event["culprit"]["rows"]]
    assert named
    assert all(any(torch.equal(rows[row]["place"], place) for place in drawn) for row in named)


def test_clamped_weights_take_it(tmp_path):
    stock, guarded = run(tmp_path, "--max_weight", "100")
    assert stock.is_sound
    assert guarded.events == []
    assert guarded.losses == stock.losses


@pytest.mark.parametrize("verdict", ["drop", "drop_samples"])
def test_a_bad_input_is_named(tmp_path, verdict):
    stock, guarded = run(tmp_path, "--plant", "input", "--nanguard_on_bad_input", verdict)
    assert len(stock.bad_weights) == TENSORS
    assert guarded.is_sound
    [event, *_] = [event for event in guarded.events if event["signal"] == "input_nonfinite"]
    assert event["culprit"]["rows"] == [diffusion.BAD_ROW]
    assert event["action"] == "dropped"
    assert "signal holds NaN" in event["message"]
