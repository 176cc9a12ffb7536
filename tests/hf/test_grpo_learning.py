"""GRPO goes on learning through faults that end, or ruin, the stock trainer.

The task is small enough to be learned in seconds: say "w5" as often as possible.
"""

from contextlib import suppress

import pytest
import torch
import trl
from datasets import Dataset

from hf_nanguard import guarded

from ..models import text_rows, tiny_llama, tiny_tokenizer
from ..trainers import common_arguments, events_of

WORD = "w5"
STEPS = 60
NAN, INF = float("nan"), float("inf")
STALE = 6  # every so many steps a batch is off


def share_of_word(completions, **kwargs):
    return [text.split().count(WORD) / max(len(text.split()), 1) for text in completions]


def with_inf(completions, trainer_state, **kwargs):
    scores = share_of_word(completions)
    if trainer_state.global_step % STALE == 2:
        scores[1] = INF
    return scores


class OffRatio(trl.GRPOTrainer):
    """Log-probabilities of the sampling policy that are off by 200 for one completion, now and then."""

    field, sign = "old_per_token_logps", -1.0

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.state.global_step % STALE == 2:
            known = output.get(self.field)
            shape = output["completion_mask"].shape
            output[self.field] = torch.full(shape, -4.0) if known is None else known.clone()
            output[self.field][0] += self.sign * 200.0
        return output


class OffReference(OffRatio):
    """The same for the reference's."""

    field, sign = "ref_per_token_logps", 1.0


class Overflowing(trl.GRPOTrainer):
    """A policy whose logits overflow for some prompts: those that begin with "w1"."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        marked = self.processing_class.convert_tokens_to_ids("w1")

        def hook(module, args, output):
            if torch.is_grad_enabled() or args[0].shape[1] == 1:
                return output
            return torch.where((args[0] == marked).any(1)[:, None, None], INF, output)

        self.model.get_input_embeddings().register_forward_hook(hook)


CASES = {
    "healthy": (trl.GRPOTrainer, share_of_word, {}),
    "inf_reward_scaled": (trl.GRPOTrainer, with_inf, {"scale_rewards": "group"}),
    "inf_reward_unscaled": (trl.GRPOTrainer, with_inf, {"scale_rewards": "none"}),
    "ratio": (OffRatio, share_of_word, {}),
    "kl": (OffReference, share_of_word, {"beta": 0.01}),
    "logits": (Overflowing, share_of_word, {}),
}


def make(case, folder, guard):
    trainer_class, reward, options = CASES[case]
    prompts = [{"prompt": row["text"].replace("w1 ", "w2 ").removesuffix("w1")} for row in text_rows(48)]
    for row in prompts[::4] if case == "logits" else ():
        row["prompt"] = "w1 " + row["prompt"]
    model = tiny_llama(dropout=0.0)
    if case == "kl":  # the reference is loaded from where the policy came from
        model.save_pretrained(folder / "base")
        model = str(folder / "base")
    arguments = common_arguments(
        folder, max_steps=STEPS, gradient_accumulation_steps=1, per_device_train_batch_size=16, learning_rate=1e-2,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
    )  # fmt: skip
    args = trl.GRPOConfig(num_generations=8, max_completion_length=4, **{**arguments, **options})
    cls = guarded(trainer_class) if guard else trainer_class
    data = Dataset.from_list(prompts)
    return cls(model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tiny_tokenizer())


def rewards_of(trainer):
    return [row["reward"] for row in trainer.state.log_history if row.get("reward") is not None]


def slowly(*cases):
    """The cases, all but these for `make slow`."""
    return [case if case in cases else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", slowly("inf_reward_unscaled", "kl", "logits"))
def test_guarded_grpo_learns(case, tmp_path):
    trainer = make(case, tmp_path, guard=True)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    rewards = [reward for reward in rewards_of(trainer) if reward == reward]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert first < 0.15
    assert last > 0.5
    signals = {event["signal"] for event in events_of(trainer)}
    expected = {
        "inf_reward_scaled": "reward_nonfinite",
        "inf_reward_unscaled": "reward_nonfinite",
        "logits": "logits_nonfinite",
    }
    assert signals == ({expected[case]} if case in expected else set())
    bounded = [
        row for row in trainer.state.log_history if "nanguard/bounded_ratio" in row or "nanguard/bounded_kl" in row
    ]
    assert bool(bounded) == (case in ("ratio", "kl"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["inf_reward_unscaled", "ratio", "kl", "logits"])
def test_stock_grpo_does_not(case, tmp_path):
    trainer = make(case, tmp_path, guard=False)
    with suppress(RuntimeError):  # sampling from a policy that is gone
        trainer.train()
    if trainer.state.global_step < STEPS:
        return
    rewards = [reward for reward in rewards_of(trainer) if reward == reward]
    ruined = not all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert ruined or sum(rewards[-5:]) / 5 < 0.5
