"""Online trainers under guard: what they sample, how it is scored, and when the run has to end."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from hf_nanguard import GuardArguments, NonFiniteError, attach, guarded

from ...architectures import BY_NAME
from ...models import text_rows, tiny_llama, tiny_tokenizer
from ...reference import assert_same, tensors_of
from ...trainers import build, common_arguments, events_of, reward_length

NAN, INF = float("nan"), float("inf")
MARK = 10  # "w3"


def emitted(trainer, signal):
    return [event for event in events_of(trainer) if event["signal"] == signal]


def finite(trainer):
    return all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


def sicken(model):
    """Makes the embedding of every prompt with `MARK` bad while the model samples."""

    def hook(module, args, output):
        marked = (args[0] == MARK).any(1) & (args[0].shape[1] > 1)  # not where a completion draws it
        return torch.where(marked[:, None, None], NAN, output) if not torch.is_grad_enabled() else output

    model.get_input_embeddings().register_forward_hook(hook)


def mixed_prompts():
    """One prompt in six holds `MARK`."""
    rows = [{"prompt": row["text"].replace("w3 ", "w4 ").replace("w3", "w4")} for row in text_rows(48)]
    for row in rows[::6]:
        row["prompt"] = "w3 " + row["prompt"]
    return Dataset.from_list(rows)


@pytest.mark.parametrize(("kind", "beta"), [("grpo", 0.0), ("grpo", 0.1), ("rloo", 0.0), ("rloo", 0.1)])
def test_prompts_the_model_cannot_sample_for_are_left_out(kind, beta, tmp_path):
    import trl

    trainer_class = trl.GRPOTrainer if kind == "grpo" else trl.RLOOTrainer
    config = trl.GRPOConfig if kind == "grpo" else trl.RLOOConfig
    arguments = common_arguments(tmp_path, max_steps=12, gradient_accumulation_steps=2)
    args = config(num_generations=2, max_completion_length=4, beta=beta, **arguments)
    tiny_llama().save_pretrained(tmp_path / "base")  # a reference is loaded from where the policy came from

    def make(cls):
        return cls(
            str(tmp_path / "base"), reward_funcs=reward_length, args=args, train_dataset=mixed_prompts(),
            processing_class=tiny_tokenizer(),
        )  # fmt: skip

    stock = make(trainer_class)
    sicken(stock.model)
    with pytest.raises(RuntimeError, match="probability tensor"):
        stock.train()
    trainer = make(guarded(trainer_class))
    sicken(trainer.model)
    trainer.train()
    events = emitted(trainer, "logits_nonfinite")
    assert events
    assert {event["action"] for event in events} == {"dropped"}
    assert all(row % 6 == 0 for event in events for row in event["culprit"]["rows"])
    assert all(event["culprit"]["phase"] == "sampling" for event in events)
    assert finite(trainer)
    assert trainer.state.global_step == 12


def test_rloo_with_a_reference_is_the_stock_one_when_healthy(tmp_path):
    import trl

    tiny_llama().save_pretrained(tmp_path / "base")
    data = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(24)])
    runs = []
    for cls in (trl.RLOOTrainer, guarded(trl.RLOOTrainer)):
        arguments = common_arguments(tmp_path / cls.__name__, max_steps=4, gradient_accumulation_steps=2)
        args = trl.RLOOConfig(num_generations=2, max_completion_length=4, beta=0.1, num_iterations=2, **arguments)
        trainer = cls(
            str(tmp_path / "base"), reward_funcs=reward_length, args=args, train_dataset=data,
            processing_class=tiny_tokenizer(),
        )  # fmt: skip
        trainer.train()
        runs.append(tensors_of(trainer))
    assert_same(*runs)
    assert events_of(trainer) == []


def test_completions_that_were_not_drawn_from_the_policy_are_masked(tmp_path):
    trainer = build("grpo", tmp_path, max_steps=3, gradient_accumulation_steps=1)
    seen = []
    original = trainer._generate_and_score_completions

    def keep(inputs):
        seen.append(original(inputs))
        return seen[-1]

    trainer._generate_and_score_completions = keep

    def hook(module, args, output):
        if torch.is_grad_enabled() or trainer.state.global_step != 1:
            return output
        output = output.clone()
        output[0] = NAN
        return output

    trainer.model.get_input_embeddings().register_forward_hook(hook)
    trainer.train()
    assert [bool(output["completion_mask"][0].any()) for output in seen] == [True, False, True]
    assert seen[1]["completion_mask"][1].any()
    assert seen[1]["advantages"][0] == 0.0
    assert finite(trainer)


@pytest.mark.parametrize("stop", ["raise", "stop"])
def test_a_policy_that_is_nan_ends_the_run_with_its_name(stop, tmp_path):
    guard = GuardArguments(nanguard_on_halt=stop)
    trainer = build("grpo", tmp_path, max_steps=3, extra={"guard": guard})
    name = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        trainer.model.get_parameter(name)[0, 0] = NAN
    if stop == "raise":
        with pytest.raises(NonFiniteError, match=name):
            trainer.train()
    else:
        trainer.train()
        assert trainer.state.global_step <= 1
    [halted, *_] = [event for event in events_of(trainer) if event["action"] == "halted"]
    assert (halted["signal"], halted["culprit"]["parameter"]) == ("param_nonfinite", name)
    assert halted["cause"] == "param_nonfinite"


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_bad_reward_costs_its_completion(value, scale, tmp_path):
    def reward(completions, **kwargs):
        return [value if i == 1 else score for i, score in enumerate(reward_length(completions))]

    options = {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = build("grpo", tmp_path, extra={"reward_funcs": reward}, scale_rewards=scale, max_steps=3, **options)
    advantages = []
    original = trainer._generate_and_score_completions

    def keep(inputs):
        output = original(inputs)
        advantages.append(output["advantages"].clone())
        return output

    trainer._generate_and_score_completions = keep
    trainer.train()
    events = emitted(trainer, "reward_nonfinite")
    assert len(events) == 3
    for event in events:
        assert (event["action"], event["cause"]) == ("dropped", "reward_nonfinite")
        assert (event["culprit"]["reward_function"], event["culprit"]["samples"]) == ("reward", [1])
        assert event["culprit"]["prompt"]
        assert len(event["culprit"]["rows"]) == 1
    for found in advantages:
        assert found[1] == 0.0
        assert found.abs().max() < 1e3
        assert found.sum().abs() < 1e-3  # of the groupmates around their own baseline
    assert finite(trainer)


@pytest.mark.parametrize("fault", ["raises", "short"])
def test_a_reward_function_that_fails_does_not_end_the_run(fault, tmp_path):
    calls = []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 2:
            if fault == "raises":
                raise KeyError("answer")
            return [1.0]
        return reward_length(completions)

    trainer = build("grpo", tmp_path, extra={"reward_funcs": reward}, max_steps=4, gradient_accumulation_steps=1)
    trainer.train()
    [event] = emitted(trainer, "reward_nonfinite")
    assert event["step"] == 1
    assert event["culprit"]["reward_function"] == "reward"
    assert len(calls) == 4
    assert finite(trainer)


def test_a_scoring_method_without_a_name_is_called(tmp_path):
    trainer = build("grpo", tmp_path, max_steps=2)
    trainer._calculate_rewards = partial(trainer._calculate_rewards)
    trainer.train()
    assert events_of(trainer) == []


@pytest.mark.parametrize("place", ["inside", "outside", "instance"])
def test_rewards_that_an_override_of_the_user_makes_bad_are_seen(place, tmp_path):
    import trl

    class Own:
        def _calculate_rewards(self, *args, **kwargs):
            rewards = super()._calculate_rewards(*args, **kwargs)
            rewards[1] = INF
            return rewards

    inside = type("Inside", (Own, trl.GRPOTrainer), {})
    outside = type("Outside", (Own, guarded(trl.GRPOTrainer)), {})
    chosen = {"inside": inside, "outside": outside, "instance": None}[place]
    options = {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = build("grpo", tmp_path, chosen, guard=place != "outside", max_steps=2, **options)
    if place == "instance":
        original = trainer._calculate_rewards

        def own(*args, **kwargs):
            rewards = original(*args, **kwargs)
            rewards[1] = INF
            return rewards

        trainer._calculate_rewards = own
    seen, original_make = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: seen.append(original_make(inputs)) or seen[-1]
    trainer.train()
    events = events_of(trainer)
    assert [(event["signal"], event["culprit"]["samples"]) for event in events] == [("reward_nonfinite", [1])] * 2
    assert all(event["culprit"]["reward_function"].endswith(("Own._calculate_rewards", "own")) for event in events)
    for output in seen:
        assert output["advantages"][1] == 0.0
        assert 0 < output["advantages"].abs().max() < 1e3
    assert finite(trainer)


def test_a_bad_reward_can_end_the_run(tmp_path):
    guard = GuardArguments(nanguard_on_bad_reward="halt")
    extra = {"reward_funcs": lambda completions, **kwargs: [INF] * len(completions), "guard": guard}
    trainer = build("grpo", tmp_path, extra=extra)
    with pytest.raises(NonFiniteError, match="on_bad_reward"):
        trainer.train()
    assert {event["action"] for event in emitted(trainer, "reward_nonfinite")} == {"halted"}


def test_equal_rewards_for_long_are_reported_once(tmp_path):
    guard = GuardArguments(nanguard_stall_steps=3)
    extra = {"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions), "guard": guard}
    trainer = build("grpo", tmp_path, extra=extra, max_steps=8, gradient_accumulation_steps=1)
    trainer.train()
    [event] = emitted(trainer, "no_learning_signal")
    assert event["action"] == "observed"
    assert "<lambda>" in event["message"]
    assert trainer.state.global_step == 8


def test_a_zero_loss_with_a_live_gradient_is_silent(tmp_path):
    guard = GuardArguments(nanguard_stall_steps=2)
    trainer = build("grpo", tmp_path, extra={"guard": guard}, max_steps=6, gradient_accumulation_steps=1)
    trainer.train()
    assert not emitted(trainer, "no_learning_signal")


def test_the_lowest_temperature_is_applied_once_for_sampling_and_log_probs(tmp_path):
    low = build("grpo", tmp_path / "low", temperature=0.01, max_steps=2)
    assert low.args.temperature == low.temperature == low.generation_config.temperature == 0.1
    low.train()
    usual = build("grpo", tmp_path / "usual", temperature=0.1, max_steps=2)
    usual.train()
    assert_same(tensors_of(low), tensors_of(usual))


def test_attach_says_that_it_comes_too_late_for_the_temperature(tmp_path, caplog):
    trainer = build("grpo", tmp_path, guard=False, temperature=0.01)
    attach(trainer)
    assert trainer.temperature == 0.01
    assert [record for record in caplog.records if "nanguard_min_temperature" in record.message]


def test_observing_lets_the_host_do_what_it_does(tmp_path):
    extra = {
        "reward_funcs": lambda completions, **kwargs: [None if i else 1.0 for i in range(len(completions))],
        "guard": GuardArguments(nanguard_mode="observe"),
    }
    trainer = build("grpo", tmp_path / "guarded", extra=extra)
    trainer.train()
    stock = build("grpo", tmp_path / "stock", guard=False, extra={"reward_funcs": extra["reward_funcs"]})
    stock.train()
    assert_same(tensors_of(trainer), tensors_of(stock))


class Sampler(TrainerCallback):
    """Shows completions while the model trains, as completion-logging callbacks do."""

    def __init__(self):
        self.drawn = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        ids = torch.tensor([[3, 4, MARK], [3, 4, 5]])
        self.drawn.append(model.generate(ids, do_sample=True, max_new_tokens=3))


@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_callbacks_that_sample_are_guarded(kind, tmp_path):
    stock = build(kind, tmp_path / "stock", guard=False, extra={"callbacks": [Sampler()]}, max_steps=2)
    sicken(stock.model)
    with pytest.raises(RuntimeError, match="probability tensor"):
        stock.train()
    sampler = Sampler()
    trainer = build(kind, tmp_path / "guarded", extra={"callbacks": [sampler]}, max_steps=2)
    sicken(trainer.model)
    trainer.train()
    assert len(sampler.drawn) == 2
    [event] = emitted(trainer, "logits_nonfinite")
    assert event["values"]["num_ended"] == 2
    assert "_get_logits_processor" not in vars(trainer.model)


def test_generation_in_an_evaluation_is_guarded(tmp_path):
    architecture = BY_NAME["t5"]
    model, inputs = architecture.build(torch.float32, "eager"), architecture.inputs(torch.float32)
    rows = [{"input_ids": inputs["input_ids"][0].tolist(), "labels": inputs["labels"][0].tolist()} for _ in range(4)]
    args = Seq2SeqTrainingArguments(
        **common_arguments(tmp_path), predict_with_generate=True, generation_max_length=4, per_device_eval_batch_size=2
    )
    tokenizer = tiny_tokenizer()
    trainer = guarded(Seq2SeqTrainer)(
        model, args, train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    assert trainer.evaluate()["eval_runtime"] > 0
    assert not events_of(trainer, trained=False)
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output * NAN)
    trainer.predict(Dataset.from_list(rows))
    assert emitted(trainer, "logits_nonfinite")


def test_an_event_of_an_evaluation_says_so(tmp_path):
    def reward(completions, **kwargs):
        return [NAN, *reward_length(completions)[1:]]

    rows = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(2)])
    trainer = build(
        "grpo", tmp_path, extra={"reward_funcs": reward, "eval_dataset": rows}, per_device_eval_batch_size=2
    )
    trainer.evaluate()
    events = emitted(trainer, "reward_nonfinite")
    assert events
    assert all(event["message"].endswith("(in the evaluation at step 0).") for event in events)


def test_a_run_that_is_stopped_while_it_samples_does_not_take_that_step(tmp_path):
    def reward(completions, trainer_state, **kwargs):
        return [INF if trainer_state.global_step == 2 else score for score in reward_length(completions)]

    guard = GuardArguments(nanguard_on_bad_reward="halt", nanguard_on_halt="stop")
    trainer = build("grpo", tmp_path / "stopped", extra={"reward_funcs": reward, "guard": guard}, max_steps=5)
    trainer.train()
    stock = build("grpo", tmp_path / "stock", guard=False, max_steps=2)
    stock.train()
    ended, expected = tensors_of(trainer), tensors_of(stock)
    assert_same(ended, expected, rng=False)


def test_prompts_that_break_the_forward_too_cost_no_healthy_completion(tmp_path):
    """What the model cannot sample for, it cannot score either: 0 times NaN must not reach those beside it."""
    trainer = build("grpo", tmp_path, max_steps=8, gradient_accumulation_steps=1, per_device_train_batch_size=4)
    trainer.train_dataset = mixed_prompts()

    def hook(module, args, output):
        marked = (args[0] == MARK).any(1) & (args[0].shape[1] > 4)
        return torch.where(marked[:, None, None], NAN, output)

    tokens = trainer.processing_class("w3")["input_ids"]
    assert MARK in tokens
    trainer.model.get_input_embeddings().register_forward_hook(hook)
    trainer.train()
    assert emitted(trainer, "logits_nonfinite")
    dropped = [event for event in emitted(trainer, "loss_nonfinite") if event["action"] in ("dropped", "skipped")]
    sampled = {event["step"] for event in emitted(trainer, "logits_nonfinite")}
    whole = {event["step"] for event in emitted(trainer, "logits_nonfinite") if event["values"]["num_unusable"] == 4}
    assert not [event for event in dropped if event["step"] in sampled - whole]
    assert finite(trainer)


@pytest.mark.parametrize("fault", ["raises", "nan", "short"])
def test_reward_functions_that_always_fail_are_counted_and_end_the_run(fault, tmp_path):
    def reward_broken(completions, **kwargs):
        if fault == "raises":
            raise KeyError("answer")
        return [NAN] * len(completions) if fault == "nan" else [1.0]

    extra = {"guard": GuardArguments(nanguard_max_bad_steps=4), "reward_funcs": [reward_length, reward_broken]}
    trainer = build("grpo", tmp_path, gradient_accumulation_steps=1, max_steps=50, extra=extra)
    with pytest.raises(NonFiniteError, match=r"No completion could be scored in 4 steps in a row, from step 0 on"):
        trainer.train()
    assert trainer.state.global_step == 3
    row = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert row["nanguard/unscorable_completions"] == 2 * 3
    assert row.get("nanguard/failed_reward_calls", 0) == (0 if fault == "nan" else 3)
    assert events_of(trainer)[-1]["action"] == "halted"


def test_reward_functions_that_fail_now_and_then_are_counted_and_do_not_end_the_run(tmp_path):
    calls = []

    def reward_flaky(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) % 3:
            raise TimeoutError("busy")
        return reward_length(completions)

    extra = {"guard": GuardArguments(nanguard_max_bad_steps=3), "reward_funcs": reward_flaky}
    trainer = build("grpo", tmp_path, gradient_accumulation_steps=1, max_steps=7, extra=extra)
    trainer.train()
    row = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert row["nanguard/failed_reward_calls"] == 5
    assert row["nanguard/unscorable_completions"] == 10


@pytest.mark.parametrize("patterns", ["layers.*, lm_head", "lm_head"])
def test_a_head_that_trl_does_not_call_is_monitored(patterns, tmp_path):
    guard = GuardArguments(
        nanguard_activation_modules=patterns, nanguard_activation_steps=1, nanguard_full_metrics=True
    )
    trainer = build("grpo", tmp_path, extra={"guard": guard}, max_steps=3, gradient_accumulation_steps=1)
    trainer.train()
    assert emitted(trainer, "guard_failed") == []
    assert "nanguard/activation_max/lm_head" in trainer.state.log_history[0]
