"""The first log-ratio that is bounded is an event with its token and its row; later ones are only counted."""

import pytest
import torch
import trl

from hf_nanguard import GuardArguments, guarded

from ...trainers import build, events_of

FIELDS = {"ratio": ("old_per_token_logps", -1.0), "kl": ("ref_per_token_logps", 1.0)}  # and the sign of its log-ratio


def make(term, size, tmp_path, plants, level="token", **guard):
    """Returns a guarded trainer with log-ratios of `size` at `plants`, triples of step, completion and token, and the
    dataset rows of those."""
    rows = []

    class Planted(guarded(trl.GRPOTrainer)):
        num_losses = 0

        def _compute_loss(self, model, inputs):
            name, sign = FIELDS[term]
            self.num_losses += 1
            for step, sample, token in plants:
                if self.state.global_step == step and not self.nanguard.replaying and self.num_losses % 2 == 0:
                    inputs = {
                        **inputs,
                        name: inputs[name].clone(),
                        "completion_mask": inputs["completion_mask"].clone(),
                    }
                    inputs["completion_mask"][sample, token] = 1
                    inputs[name][sample, token] += sign * size
                    rows.append(int(inputs["nanguard_rows"][sample]))
            return super()._compute_loss(model, inputs)

    settings = {"num_iterations": 2, "importance_sampling_level": level, "gradient_accumulation_steps": 2}
    kl = {"beta": 0.1, "lora": True} if term == "kl" else {}
    extra = {"guard": GuardArguments(**guard)}
    trainer = build("grpo", tmp_path, Planted, guard=False, extra=extra, max_steps=4, logging_steps=2, **settings, **kl)
    return trainer, rows


def overflows_of(trainer):
    """Returns the events besides spikes of loss and norm, which such a ratio makes of course."""
    return [event for event in events_of(trainer) if event["signal"] not in ("loss_spike", "grad_spike")]


@pytest.mark.parametrize(("term", "cause"), [("ratio", "ratio_overflow"), ("kl", "kl_overflow")])
@pytest.mark.parametrize("size", [200.0, -30.0])
def test_the_first_bounded_log_ratio_is_an_event(term, cause, size, tmp_path, caplog):
    trainer, rows = make(term, size, tmp_path, [(1, 1, 2), (2, 0, 0), (3, 1, 1)])
    trainer.train()
    [event] = overflows_of(trainer)
    assert (event["signal"], event["action"], event["cause"]) == ("ratio_overflow", "repaired", cause)
    assert (event["step"], event["micro_step"]) == (1, 1)
    culprit = event["culprit"]
    assert (culprit["phase"], culprit["term"]) == ("loss", term)
    assert (culprit["samples"], culprit["tokens"], culprit["rows"]) == ([1], [[1, 2]], rows[:1])
    assert event["values"]["log_ratio"] == pytest.approx(size, abs=2.0)  # plus what the policy has moved
    [line] = [record.message for record in caplog.records if "[ratio_overflow]" in record.message]
    assert f"token 2 of completion 1 (dataset row {rows[0]}) in micro-batch 1 of step 1" in line
    metric = f"nanguard/bounded_{term}"
    assert [row[metric] for row in trainer.state.log_history if metric in row] == [1.0, 2.0]
    assert len(rows) == 3


def test_a_bounded_sequence_has_no_token(tmp_path):
    trainer, rows = make("ratio", 400.0, tmp_path, [(1, 0, 1)], "sequence")
    trainer.train()
    [event] = overflows_of(trainer)
    assert (event["culprit"]["samples"], event["culprit"]["tokens"], event["culprit"]["rows"]) == ([0], None, rows)


@pytest.mark.parametrize("guard", [{}, {"nanguard_ratio_bound": None}, {"nanguard_mode": "observe"}])
def test_without_an_intervention_there_is_no_event(guard, tmp_path):
    trainer, rows = make("ratio", 19.0, tmp_path, [(1, 1, 2)], **guard)
    trainer.train()
    assert len(rows) == 1
    assert overflows_of(trainer) == []
    assert not any("bounded" in name for row in trainer.state.log_history for name in row)


def test_a_loss_that_is_run_by_hand_leaves_nothing_behind(tmp_path):
    trainer = build("grpo", tmp_path, num_iterations=2)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.ones(2, 4, dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": ids,
              "advantages": torch.ones(2), "num_items_in_batch": torch.tensor(8),
              "old_per_token_logps": torch.full((2, 4), -200.0)}  # fmt: skip
    assert trainer._compute_loss(trainer.model, inputs).isfinite()
    assert trainer.nanguard.online.take_metrics() == {}
