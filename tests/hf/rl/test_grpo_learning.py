"""GRPO goes on learning sums through faults that end, or ruin, the stock trainer.

The fast half sees the reward rise; `make slow` goes on until sums are answered rightly.
"""

import pytest
import torch
import trl
from transformers import TrainerCallback

from hf_nanguard import NonFiniteError, guarded
from hf_nanguard.examples.tasks.sums import build_beginner, build_prompts, build_tokenizer, measure_accuracy, reward_sum

from ...trainers import common_arguments, events_besides_spikes, events_of

STEPS, LONG = 60, 300
GROUP = 16
NAN, INF = float("nan"), float("inf")
OFTEN = 6  # every so many steps a batch is off


def with_inf(completions, **kwargs):
    """One of every group has an infinite reward."""
    scores = reward_sum(completions, **kwargs)
    return [INF if i % GROUP == 1 else score for i, score in enumerate(scores)]


class OffRatio(trl.GRPOTrainer):
    """Log-probabilities of the sampling policy that are off by 200 for one completion, now and then."""

    field, sign = "old_per_token_logps", -1.0

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.state.global_step % OFTEN == 2:
            known = output.get(self.field)
            shape = output["completion_mask"].shape
            output[self.field] = torch.full(shape, -4.0) if known is None else known.clone()
            output[self.field][0] += self.sign * 200.0
        return output


class OffReference(OffRatio):
    """The same for the reference's."""

    field, sign = "ref_per_token_logps", 1.0


class Overflowing(trl.GRPOTrainer):
    """A policy whose logits overflow for some prompts: those with a 7."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        marked = self.processing_class.convert_tokens_to_ids("7")

        def hook(module, args, output):
            if torch.is_grad_enabled() or args[0].shape[1] == 1:
                return output
            return torch.where((args[0][:, -4:] == marked).any(1)[:, None, None], INF, output)

        self.model.get_input_embeddings().register_forward_hook(hook)


CASES = {
    "healthy": (trl.GRPOTrainer, reward_sum, {}),
    "inf_reward_scaled": (trl.GRPOTrainer, with_inf, {"scale_rewards": "group"}),
    "inf_reward_unscaled": (trl.GRPOTrainer, with_inf, {"scale_rewards": "none"}),
    "ratio": (OffRatio, reward_sum, {}),
    "kl": (OffReference, reward_sum, {"beta": 0.01}),
    "logits": (Overflowing, reward_sum, {}),
}
SIGNALS = {
    "inf_reward_scaled": {"reward_nonfinite"},
    "inf_reward_unscaled": {"reward_nonfinite"},
    "logits": {"logits_nonfinite"},
    "ratio": {"ratio_overflow"},
    "kl": {"ratio_overflow"},
}
BOUNDED = {"ratio": "nanguard/bounded_ratio", "kl": "nanguard/bounded_kl"}


def make(case, folder, guard, steps, form="plain"):
    trainer_class, reward, options = CASES[case]
    model = build_beginner(form=form)
    if case == "kl":  # the reference is loaded from where the policy came from
        model.save_pretrained(folder / "base")
        model = str(folder / "base")
    arguments = common_arguments(
        folder, max_steps=steps, gradient_accumulation_steps=1, per_device_train_batch_size=8 * GROUP,
        learning_rate=3e-3, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
    )  # fmt: skip
    args = trl.GRPOConfig(num_generations=GROUP, max_completion_length=3, **{**arguments, **options})
    cls = guarded(trainer_class) if guard else trainer_class
    data = build_prompts(512, form=form)
    return cls(model, reward_funcs=reward, args=args, train_dataset=data, processing_class=build_tokenizer())


def rewards_of(trainer):
    rewards = [row["reward"] for row in trainer.state.log_history if row.get("reward") is not None]
    return [reward for reward in rewards if reward == reward]


def rise(trainer):
    """Returns the mean reward of the first and of the last few steps."""
    rewards = rewards_of(trainer)
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


def is_finite(trainer):
    return all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


def check_learned(trainer, case, steps):
    """Asserts that the run came to its end, learned, and reported what was planted and nothing else.

    In 24 runs of 60 steps, with three seeds and two sets of kernels, the reward rose to 3.5 to 5.8 times its first value.
    """
    first, last = rise(trainer)
    assert trainer.state.global_step == steps
    assert is_finite(trainer)
    assert last > 2 * first > 0
    events = events_besides_spikes(trainer)
    if (
        case in BOUNDED
    ):  # a bounded ratio is still a large one: whether it spikes the loss depends on the advantage drawn
        events = [event for event in events if event["signal"] != "loss_spike" or event["step"] % OFTEN != 2]
    assert {event["signal"] for event in events} == SIGNALS.get(case, set())
    logged = {name for row in trainer.state.log_history for name in row}
    assert logged & set(BOUNDED.values()) == ({BOUNDED[case]} if case in BOUNDED else set())


FAST = ("inf_reward_unscaled", "logits")


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in CASES])
def test_the_reward_rises_under_guard(case, tmp_path):
    trainer = make(case, tmp_path, guard=True, steps=STEPS)
    trainer.train()
    check_learned(trainer, case, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if "unscaled" not in case])  # those teach too slowly
def test_sums_are_learned_under_guard(case, tmp_path):
    trainer = make(case, tmp_path, guard=True, steps=LONG)
    trainer.train()
    check_learned(trainer, case, LONG)
    known = build_prompts(100, seed=1)
    known = known.filter(lambda row: "7" not in row["prompt"])  # nobody can answer those in "logits"
    assert measure_accuracy(build_beginner(), trainer.processing_class, known) < 0.25
    assert measure_accuracy(trainer.model, trainer.processing_class, known) > 0.4


@pytest.mark.slow
def test_the_reward_of_conversations_rises_under_guard(tmp_path):
    trainer = make("healthy", tmp_path, guard=True, steps=STEPS, form="conversational")
    trainer.train()
    check_learned(trainer, "healthy", STEPS)


@pytest.mark.parametrize("case", ["inf_reward_unscaled", "ratio", "kl", "logits"])
def test_the_stock_trainer_dies_of_it(case, tmp_path):
    trainer = make(case, tmp_path, guard=False, steps=STEPS)
    with pytest.raises(RuntimeError, match="probability tensor"):
        trainer.train()
    assert trainer.state.global_step <= OFTEN
    assert is_finite(trainer) == (case == "logits")  # there it has not got as far as a step


@pytest.mark.slow
def test_the_stock_trainer_learns_nothing_from_scaled_infinities_and_says_nothing(tmp_path):
    trainer = make("inf_reward_scaled", tmp_path, guard=False, steps=STEPS)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert all(torch.equal(p, known) for p, known in zip(trainer.model.parameters(), before, strict=True))


class Poison(TrainerCallback):
    """Puts a NaN into the policy once it has learned for a while."""

    name = "model.layers.1.mlp.down_proj.weight"

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            model.get_parameter(self.name).data[0, 0] = NAN


def test_a_policy_that_becomes_nan_ends_the_run_by_name(tmp_path):
    trainer = make("healthy", tmp_path, guard=True, steps=STEPS)
    trainer.add_callback(Poison())
    with pytest.raises(NonFiniteError, match=Poison.name):
        trainer.train()
    [halted] = [event for event in events_of(trainer) if event["action"] == "halted"]
    assert (halted["signal"], halted["step"]) == ("param_nonfinite", 3)
    assert halted["culprit"]["parameter"] == Poison.name
