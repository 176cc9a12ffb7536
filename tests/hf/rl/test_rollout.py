"""Completions of every kind an online trainer makes: about images, with tools, in continuous batches."""

from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from hf_nanguard import guarded
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.guard import Guard
from hf_nanguard.hf.data.learning_signal import NoSignalDetector
from hf_nanguard.hf.rl.rollout import Rollout

from ...architectures import BY_NAME, VOCAB
from ...models import tiny_llama, tiny_tokenizer
from ...reference import assert_same, tensors_of
from ...trainers import common_arguments, events_of
from ...vision import image_rows, tiny_processor

NAN, INF = float("nan"), float("inf")


def told(trainer, signal):
    return [event for event in events_of(trainer) if event["signal"] == signal]


def is_finite(trainer):
    return all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


def reward_letters(completions, **kwargs):
    """Differs between completions."""
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]


def keep_outputs(trainer):
    """Returns the list that what is generated from now on is added to."""
    seen, original = [], trainer._generate_and_score_completions

    def keep(inputs):
        seen.append(original(inputs))
        return seen[-1]

    trainer._generate_and_score_completions = keep
    return seen


# ---- images ----


def make_vision(folder, guard=True, **options):
    arguments = common_arguments(folder, **{"max_steps": 3, "gradient_accumulation_steps": 2, **options})
    # An image token in a completion would ask for an image.
    args = trl.GRPOConfig(
        num_generations=2, max_completion_length=4, generation_kwargs={"suppress_tokens": [VOCAB - 1]}, **arguments
    )
    cls = guarded(trl.GRPOTrainer) if guard else trl.GRPOTrainer
    model = BY_NAME["llava"].build()
    return cls(
        model, reward_funcs=reward_letters, args=args, train_dataset=image_rows(12), processing_class=tiny_processor()
    )


def test_a_healthy_vision_run_is_the_stock_run(tmp_path):
    stock = make_vision(tmp_path / "stock", guard=False)
    drawn = keep_outputs(stock)
    stock.train()
    trainer = make_vision(tmp_path / "guarded")
    redrawn = keep_outputs(trainer)
    trainer.train()
    assert len(drawn) == len(redrawn) == 3
    for one, other in zip(drawn, redrawn, strict=True):
        assert torch.equal(one["completion_ids"], other["completion_ids"])
        assert torch.equal(one["advantages"], other["advantages"])
        assert torch.equal(one["pixel_values"], other["pixel_values"])
    assert_same(tensors_of(trainer), tensors_of(stock))
    assert events_of(trainer) == []


def sicken_images(model, value, marked):
    """Makes the features of some images bad, whenever they are looked at."""

    def hook(module, args, kwargs, output):
        rows = kwargs["pixel_values"][:, 0, 0, 0] if "pixel_values" in kwargs else args[0][:, 0, 0, 0]
        bad = torch.tensor([int(row) in marked for row in rows])
        output.last_hidden_state = torch.where(bad[:, None, None], value, output.last_hidden_state)
        output.hidden_states = output.hidden_states and tuple(
            torch.where(bad[:, None, None], value, hidden) for hidden in output.hidden_states
        )
        return output

    model.model.vision_tower.register_forward_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("value", [NAN, INF])
def test_images_the_model_cannot_see_are_left_out(value, tmp_path):
    marked = {1, 9}
    stock = make_vision(tmp_path / "stock", guard=False, max_steps=6)
    sicken_images(stock.model, value, marked)
    with pytest.raises(RuntimeError, match="probability tensor"):
        stock.train()
    trainer = make_vision(tmp_path / "guarded", max_steps=6)
    sicken_images(trainer.model, value, marked)
    seen = keep_outputs(trainer)
    trainer.train()
    assert trainer.state.global_step == 6
    assert is_finite(trainer)
    events = events_of(trainer)
    # Nothing but the sampling is told: what stands in for those images does not make the loss bad.
    assert {(event["signal"], event["action"]) for event in events} == {("logits_nonfinite", "dropped")}
    assert {row for event in events for row in event["culprit"]["rows"]} == marked
    for event in events:
        output, sick = seen[event["step"]], event["culprit"]["samples"]
        assert not output["completion_mask"][sick].any()
        assert output["advantages"][sick].tolist() == [0.0] * len(sick)
        assert not {int(row) for row in output["pixel_values"][:, 0, 0, 0]} & marked
        healthy = [i for i in range(4) if i not in sick]
        assert output["completion_mask"][healthy].any(1).all()


def test_images_of_many_patches_are_exchanged_whole():
    """Two images of different sizes in one long row of patches, as Qwen's models keep them."""
    rollout = Rollout(SimpleNamespace(), Guard())
    rollout.begin(2, None)
    rollout.note(Watched([0]), [[1, 2], [3, 4]], [[5], [6]])
    output = {
        "pixel_values": torch.arange(6.0)[:, None], "image_grid_thw": torch.tensor([[1, 1, 2], [1, 2, 2]]),
        "num_images": [1, 1], "prompt_ids": torch.tensor([[1, 2], [3, 4]]),
    }  # fmt: skip
    given = dict(output)
    rollout._replace_unusable(output)
    assert output["pixel_values"].flatten().tolist() == [2.0, 3.0, 4.0, 5.0] * 2
    assert output["image_grid_thw"].tolist() == [[1, 2, 2]] * 2
    assert output["prompt_ids"].tolist() == [[3, 4]] * 2
    assert given["prompt_ids"].tolist() == [[1, 2], [3, 4]]


# ---- tools ----


class Caller(PreTrainedTokenizerFast):
    """A tokenizer that takes a completion for a call of a tool if its first token is an even one."""

    def parse_response(self, response, prefix=None, tools=None):
        message = {"role": "assistant", "content": self.decode(response)}
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        return {**message, "tool_calls": [call]} if response[0] % 2 == 0 and len(prefix) < MAX_PREFIX else message


MAX_PREFIX = 20
TOOL_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} "
    "{% for call in m.get('tool_calls') or [] %}{{ call['function'] }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
SOUND, DEADLY = "w50", "w51"


def make_tools(folder, guard=True, deadly=True, **options):
    """Every third call of the tool returns a word that the model cannot read."""
    known = tiny_tokenizer()
    tokenizer = Caller(
        tokenizer_object=known.backend_tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = {}  # TRL asks only whether there is one
    calls = []

    def look() -> str:
        """Looks something up."""
        calls.append(DEADLY if deadly and len(calls) % 3 == 2 else SOUND)
        return calls[-1]

    rows = [{"prompt": [{"role": "user", "content": f"w{i} w{i + 1}"}]} for i in range(12)]
    arguments = common_arguments(folder, **{"max_steps": 4, "gradient_accumulation_steps": 2, **options})
    args = trl.GRPOConfig(
        num_generations=4, max_completion_length=24, **{**arguments, "per_device_train_batch_size": 4}
    )
    cls = guarded(trl.GRPOTrainer) if guard else trl.GRPOTrainer
    trainer = cls(
        tiny_llama(), reward_funcs=reward_letters, args=args, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, tools=[look],
    )  # fmt: skip
    # The first turn is short enough to leave room for a second one.
    trainer.generation_config.max_new_tokens = 3
    word = tokenizer.convert_tokens_to_ids(DEADLY)

    def hook(module, args, output):
        asked = torch.is_grad_enabled() or args[0].shape[1] == 1
        return output if asked else torch.where((args[0][:, -3:] == word).any(1)[:, None, None], NAN, output)

    trainer.model.get_input_embeddings().register_forward_hook(hook)
    return trainer, calls


def test_a_healthy_conversation_with_tools_is_the_stock_one(tmp_path):
    runs = {}
    for guard in (False, True):
        trainer, calls = make_tools(tmp_path / str(guard), guard, deadly=False)
        outputs = keep_outputs(trainer)
        trainer.train()
        runs[guard] = (tensors_of(trainer), calls, [output["completion_ids"].tolist() for output in outputs])
    assert len(runs[True][1]) > 8  # tools were called
    assert runs[True][1:] == runs[False][1:]
    assert_same(runs[True][0], runs[False][0])


def test_a_turn_the_model_cannot_answer_costs_its_completion(tmp_path):
    stock, _ = make_tools(tmp_path / "stock", guard=False)
    with pytest.raises(RuntimeError, match="probability tensor"):
        stock.train()
    trainer, _ = make_tools(tmp_path / "guarded")
    hit = []

    def reward(completions, **kwargs):
        hit.append([i for i, turns in enumerate(completions) if DEADLY in [turn["content"] for turn in turns]])
        return reward_letters(completions)

    trainer.reward_funcs = [reward]
    seen = keep_outputs(trainer)
    trainer.train()
    assert trainer.state.global_step == len(hit) == 4
    assert is_finite(trainer)
    assert any(0 < len(rows) < 8 for rows in hit)  # not all completions come as far as a second turn
    events = told(trainer, "logits_nonfinite")
    assert [(event["step"], event["culprit"]["samples"]) for event in events] == [
        (step, rows) for step, rows in enumerate(hit) if rows
    ]
    for output, rows in zip(seen, hit, strict=True):
        masked = [i for i in range(8) if not output["completion_mask"][i].any()]
        assert masked == rows


def test_turns_that_belong_to_nobody_cost_all_completions():
    rollout = Rollout(SimpleNamespace(), Guard())
    rollout.begin(3, None)
    prompts, completions = [[1], [1], [2]], [[5], [6], [7]]
    rollout.note(Watched([]), prompts, completions)
    assert rollout.unusable == set()
    rollout.note(Watched([1]), [[1, 6, 9], [2, 7, 9]], [[8], [8]])
    assert rollout.unusable == {2}
    rollout.note(Watched([]), [[4, 4]], [[8]])
    assert rollout.unusable == {2}
    rollout.note(Watched([0]), [[4, 4]], [[8]])
    assert rollout.unusable == {0, 1, 2}


class Watched:
    """Knows which completions of a turn are unusable."""

    def __init__(self, unusable):
        self.unusable = unusable

    def find_nonfinite(self, lengths):
        return self.unusable


# ---- continuous batches ----

POISON = 58


def make_batched(folder, guard=True, poisoned=(), **options):
    """Questions that end with `POISON` are those the head of the model fails at."""
    small = {"num_blocks": 16, "page_size": 16, "max_batch_tokens": 64}
    arguments = common_arguments(folder, **{"max_steps": 2, "gradient_accumulation_steps": 2, **options})
    args = trl.GRPOConfig(
        num_generations=2, max_completion_length=4, use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=small, **arguments,
    )  # fmt: skip
    cls = guarded(trl.GRPOTrainer) if guard else trl.GRPOTrainer
    rows = [{"prompt": f"w{i} {DEADLY if i in poisoned else SOUND}"} for i in range(8)]
    model = tiny_llama(dropout=0.0)
    sick = []

    def spoil(module, args, output):
        """Requests are packed, so only what comes after the attention is a request's own."""
        return output if torch.is_grad_enabled() else output.masked_fill(args[0][..., :1] > 3.9, NAN)

    if poisoned:
        model.lm_head.register_forward_hook(spoil)
        with torch.no_grad():
            model.model.embed_tokens.weight[POISON] = 0
            model.model.embed_tokens.weight[POISON, 0] = 1e4

    def reward(prompts, completions, completion_ids, **kwargs):
        ends = zip(prompts, completion_ids, strict=True)
        sick.append([i for i, (text, ids) in enumerate(ends) if text.endswith(DEADLY) or POISON in ids[:-1]])
        return [float(sum(ids) % 7) for ids in completion_ids]

    trainer = cls(
        model, reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer()
    )
    assert tiny_tokenizer().convert_tokens_to_ids(DEADLY) == POISON
    return trainer, sick


def test_continuous_batches_are_those_of_the_stock_run(tmp_path):
    runs = {}
    for guard in (False, True):
        trainer, _ = make_batched(tmp_path / str(guard), guard)
        outputs = keep_outputs(trainer)
        trainer.train()
        runs[guard] = (tensors_of(trainer), [output["completion_ids"].tolist() for output in outputs])
    assert runs[True][1] == runs[False][1]
    assert_same(runs[True][0], runs[False][0])


def test_sick_requests_of_a_continuous_batch_are_left_out(tmp_path):
    poisoned = {1, 6}
    trainer, sick = make_batched(tmp_path, poisoned=poisoned, max_steps=4)
    seen = keep_outputs(trainer)
    trainer.train()
    assert trainer.state.global_step == 4
    assert is_finite(trainer)
    assert any(0 < len(rows) < 4 for rows in sick)
    events = told(trainer, "logits_nonfinite")
    assert [(event["step"], event["culprit"]["samples"]) for event in events] == [
        (step, rows) for step, rows in enumerate(sick) if rows
    ]
    assert poisoned <= {row for event in events for row in event["culprit"]["rows"]}
    for output, rows in zip(seen, sick, strict=True):
        assert [i for i in range(4) if not output["completion_mask"][i].any()] == rows


# ---- what a step could learn from ----


def detect(stall_steps, steps):
    """Feeds (all_equal, grad_norm) pairs, one a step; returns the events."""
    events = []
    trainer = SimpleNamespace(reward_funcs=[len, len], reward_func_names=["accuracy", "format"])
    guard = Guard(policy=Policy(stall_steps=stall_steps), on_event=events.append)
    rollout, detector = Rollout(trainer, guard), NoSignalDetector(stall_steps, guard.journal)
    for step, (all_equal, grad_norm) in enumerate(steps):
        rollout.note_rewards(all_equal)
        signal = rollout.step_signal(grad_norm)
        if signal is not None:
            detector.observe(step, signal, grad_norm)
    return events


def reported(stall_steps, steps):
    return [event["step"] for event in detect(stall_steps, steps)]


@pytest.mark.parametrize("stalled", [(True, 0.0), (True, 0.3), (False, 0.0), (None, 0.0), (True, None)])
def test_a_streak_without_signal_is_reported_once(stalled):
    assert reported(3, [stalled] * 10) == [2]


@pytest.mark.parametrize("healthy", [(False, 0.5), (None, 1e-30), (False, None), (False, NAN)])
def test_healthy_steps_are_silent(healthy):
    assert reported(1, [healthy] * 10) == []


@pytest.mark.parametrize("learns", [(False, 0.5), (False, None)])
def test_a_second_streak_is_reported_again(learns):
    stall = [(True, 0.0)]
    assert reported(2, stall * 5 + [learns] + stall + [learns] + stall * 4) == [1, 9]


def test_an_unknown_step_neither_ends_nor_prolongs_a_streak():
    unknown = [(None, None), (None, NAN), (None, INF)]
    assert reported(3, [(True, 0.0), *unknown, (True, 0.0), *unknown, (True, 0.0)]) == [8]


def test_steps_that_reuse_completions_go_by_the_rewards_of_their_generation():
    equal, unequal = [(True, 0.2), (None, 0.2)], [(False, 0.2), (None, 0.2)]
    assert reported(4, equal * 2) == [3]
    assert reported(2, unequal * 4) == []
    assert reported(2, [(True, 0.2), (False, 0.2), (None, 0.2), (None, 0.2)]) == []


def test_the_event_names_steps_functions_and_reason():
    [event] = detect(2, [(False, 0.1), (True, 0.1), (True, 0.1)])
    assert "2 optimizer steps in a row (1 to 2): the rewards were equal within every group." in event["message"]
    assert "Reward functions: accuracy, format." in event["message"]
    assert "exactly zero" not in event["message"]
    assert event["culprit"]["phase"] == "reward"
    [event] = detect(1, [(False, 0.0)])
    assert "the gradient was exactly zero" in event["message"]
    assert "equal" not in event["message"]
    [event] = detect(2, [(True, 0.4), (False, 0.0)])
    assert "equal within every group or the gradient was exactly zero" in event["message"]


def test_a_trainer_without_reward_functions_is_not_classified():
    guard = Guard()
    assert Rollout(SimpleNamespace(), guard).step_signal(0.0) is None
