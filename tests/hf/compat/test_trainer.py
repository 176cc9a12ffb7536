"""Every private name of the hosts that we touch is still there and still means what we take it for."""

import copy
import inspect
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig, Trainer, TrainerCallback
from transformers import trainer as trainer_module
from transformers.generation.continuous_batching.requests import create_warmup_future_states

from hf_nanguard.boundary import Boundary
from hf_nanguard.hf.compat import accelerate as compat_accelerate
from hf_nanguard.hf.compat import attention as compat_attention
from hf_nanguard.hf.compat import generation as compat_generation
from hf_nanguard.hf.compat import model_config as compat_model
from hf_nanguard.hf.compat import online_trainer as compat_reinforcement
from hf_nanguard.hf.compat import trainer as compat

from ...architectures import BY_NAME
from ...models import text_rows, tiny_llama, tiny_t5, tiny_tokenizer, token_dataset
from ...reference import tensors_of
from ...trainers import build, common_arguments, reward_length, stock_class


@pytest.fixture
def trainer(tmp_path):
    return build("plain", tmp_path, guard=False)


def _at_a_step(tmp_path, act, **overrides):
    """Runs a stock trainer of 3 steps that calls `act(trainer)` in the clip of its second."""

    class Hooked(Trainer):
        def _clip_grad_norm(self, model):
            norm = super()._clip_grad_norm(model)
            if self.state.global_step == 1:
                act(self)
            return norm

    trainer = build("plain", tmp_path, Hooked, guard=False, max_steps=3, **overrides)
    trainer.train()
    return trainer


MODULES = (compat, compat_accelerate, compat_attention, compat_generation, compat_model, compat_reinforcement)


def own(module):
    """Returns the functions and classes that a module defines, without protocols."""
    items = {name: item for name, item in vars(module).items() if inspect.isfunction(item) or inspect.isclass(item)}
    items = {name: item for name, item in items.items() if not getattr(item, "_is_protocol", False)}
    return {name: item for name, item in items.items() if item.__module__ == module.__name__}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_every_function_is_tried_here(module):
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    alias = next(name for name, value in globals().items() if value is module)
    assert [name for name in own(module) if f"{alias}.{name}(" not in text] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_every_shim_says_when_it_can_go(module):
    for name, item in own(module).items():
        if inspect.isfunction(item) and name != "resume_optimizer":
            assert "Can go" in item.__doc__, name


# ---- models and what is kept beside them ----


def test_what_a_model_is_asked_for():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    plain = [name for name, _ in model.named_modules()]
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert compat_model.find_config(model) is model.config
    assert compat_model.find_config(nn.Linear(1, 1)) is None
    assert compat_model.find_tokenizer(tokenizer) is tokenizer
    assert compat_model.find_tokenizer(SimpleNamespace(tokenizer=tokenizer)) is tokenizer
    assert list(compat_model.find_adapters(adapted)) == ["default"]
    assert compat_model.find_adapters(nn.Linear(1, 1)) == {}
    extended = tiny_llama()
    assert compat_model.find_adapters(extended) == {}
    extended.add_adapter(LoraConfig(target_modules=["q_proj"]), adapter_name="own")
    assert list(compat_model.find_adapters(extended)) == ["own"]
    assert compat_model.without_adapter(extended) is extended
    wrapped = [name for name, _ in model.named_modules()]
    assert {*plain} <= {compat_model.plain_adapter_name(name) for name in wrapped}
    assert any(compat_model.plain_adapter_name(name) != name for name in wrapped)
    assert compat_model.without_adapter(adapted) is model
    assert compat_model.without_adapter(model) is model
    assert not compat_model.is_encoder_decoder(adapted)
    assert compat_model.is_encoder_decoder(get_peft_model(tiny_t5(), LoraConfig(target_modules=["q"])))
    assert not compat_model.is_encoder_decoder(nn.Linear(1, 1))


def test_keepers_are_the_trainer_and_its_callbacks(trainer):
    own_callbacks = [TrainerCallback(), TrainerCallback()]
    for callback in own_callbacks:
        trainer.add_callback(callback)
    keepers = compat.find_keepers(trainer)
    assert keepers["trainer"] is trainer
    assert all(any(keeper is callback for keeper in keepers.values()) for callback in own_callbacks)


@pytest.mark.parametrize(("version", "filters"), [("5.22.2", False), ("5.23.0", True), ("6.0.0.dev0", True)])
def test_evaluations_are_filtered_since_a_version(version, filters, trainer, monkeypatch):
    """What this version really does is tried in `tests/hf/monitors/test_evaluation.py`."""
    monkeypatch.setattr(compat.transformers, "__version__", version)
    trainer.args.logging_nan_inf_filter = True
    assert compat.filters_evaluation(trainer) == filters
    trainer.args.logging_nan_inf_filter = False
    assert not compat.filters_evaluation(trainer)


# ---- backward ----


def test_only_deepspeed_steps_in_the_backward(trainer):
    assert not compat_accelerate.steps_in_backward(trainer)
    other = SimpleNamespace(accelerator=SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))
    assert compat_accelerate.steps_in_backward(other)


@pytest.mark.parametrize("backward", ["accelerator", "loss"])
def test_every_backward_of_a_loss_is_changed_and_afterwards_none(backward, trainer):
    net, seen = nn.Linear(2, 1), []

    def run(original, loss):
        seen.append(loss)
        original(2 * loss)

    def go():
        loss = net(torch.ones(1, 2)).sum()
        trainer.accelerator.backward(loss) if backward == "accelerator" else loss.backward()
        return loss

    with compat_accelerate.changed_backwards(trainer.accelerator, run):
        loss = go()
    assert len(seen) == 1
    assert seen[0] is loss
    assert torch.equal(net.weight.grad, torch.full((1, 2), 2.0))
    go()
    assert len(seen) == 1


def test_poisoned_backward_leaves_nan_in_exactly_one_gradient(trainer):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    before = trainer.accelerator.backward
    with compat_accelerate.poisoned_backward(trainer.accelerator, net[0].bias):
        trainer.accelerator.backward(net(torch.ones(2, 3)).sum())
    assert [name for name, p in net.named_parameters() if not p.grad.isfinite().all()] == ["0.bias"]
    assert trainer.accelerator.backward == before
    assert "backward" not in vars(trainer.accelerator)


def test_poisoned_backward_works_where_the_loss_has_no_gradient(trainer):
    """All labels masked: the cross-entropy's backward writes zeros, whatever the loss is multiplied by."""
    net = nn.Linear(3, 4)
    loss = nn.functional.cross_entropy(net(torch.ones(2, 3)), torch.full((2,), -100), reduction="sum")
    with compat_accelerate.poisoned_backward(trainer.accelerator, net.weight):
        trainer.accelerator.backward(loss)
    assert net.weight.grad.isnan().any()
    assert not net.bias.grad.isnan().any()


def test_poisoned_backward_ends_also_with_an_error(trainer):
    with pytest.raises(ZeroDivisionError), compat_accelerate.poisoned_backward(trainer.accelerator, torch.ones(1)):
        _ = 1 / 0
    assert "backward" not in vars(trainer.accelerator)


def test_poisoned_backward_gives_back_what_somebody_had_put_there(trainer):
    calls = []
    original = trainer.accelerator.backward

    def mine(loss, **kwargs):
        calls.append(loss)
        original(loss, **kwargs)

    trainer.accelerator.backward = mine
    weight = torch.ones(1, requires_grad=True)
    with compat_accelerate.poisoned_backward(trainer.accelerator, weight):
        trainer.accelerator.backward(weight.sum())
    assert len(calls) == 1
    assert trainer.accelerator.backward is mine


# ---- collectives ----


def test_local_collectives_hide_the_others_and_come_back(trainer):
    stores = (AcceleratorState._shared_state, PartialState._shared_state)
    before = [store["distributed_type"] for store in stores]
    for store in stores:
        store["distributed_type"] = DistributedType.MULTI_CPU
    try:
        with compat_accelerate.local_collectives(True):
            assert [store["distributed_type"] for store in stores] == [DistributedType.NO] * 2
            one = torch.ones(2)
            assert torch.equal(trainer.accelerator.gather(one), one)
            assert torch.equal(trainer.accelerator.reduce(one), one)
        assert [store["distributed_type"] for store in stores] == [DistributedType.MULTI_CPU] * 2
        with pytest.raises(ZeroDivisionError), compat_accelerate.local_collectives(True):
            _ = 1 / 0
        assert [store["distributed_type"] for store in stores] == [DistributedType.MULTI_CPU] * 2
        with compat_accelerate.local_collectives(False):
            assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
    finally:
        for store, value in zip(stores, before, strict=True):
            store["distributed_type"] = value


def test_exchange_counts_forwards_and_collectives_and_leaves_nothing(trainer):
    accelerator, model = trainer.accelerator, nn.Linear(2, 2)
    exchange = compat_accelerate.Exchange(accelerator, model)
    with exchange.counted():
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        accelerator.gather(torch.ones(1))
        accelerator.gather_for_metrics(torch.ones(1))  # calls gather by itself: one exchange, not two
        accelerator.reduce(torch.ones(1))
    assert (exchange.forwards, exchange.calls) == (2, 3)
    assert model._forward_pre_hooks == {}
    assert not {"gather", "gather_for_metrics", "reduce"} & vars(accelerator).keys()
    with exchange.resumed():
        model(torch.ones(1, 2))
    assert exchange.forwards == 1
    exchange.forget()
    assert (exchange.forwards, exchange.calls) == (0, 0)


# ---- optimizer and schedule ----


def test_a_bypassed_step_moves_neither_weights_nor_schedule(tmp_path):
    seen = {}

    def bypass(trainer):
        seen["before"] = tensors_of(trainer)
        seen["epoch"] = trainer.lr_scheduler.last_epoch
        compat_accelerate.bypass_optimizer(trainer.optimizer)
        seen["bypassed"] = compat_accelerate.is_bypassed(trainer.optimizer)

    class Watched(Trainer):
        def _clip_grad_norm(self, model):
            norm = super()._clip_grad_norm(model)
            if self.state.global_step == 1:
                bypass(self)
            return norm

        def _maybe_log_save_evaluate(self, *args, **kwargs):
            if self.state.global_step == 2:
                seen["after"] = tensors_of(self)
                seen["epoch after"] = self.lr_scheduler.last_epoch
                compat_accelerate.resume_optimizer(self.optimizer)
            return super()._maybe_log_save_evaluate(*args, **kwargs)

    trainer = build("plain", tmp_path, Watched, guard=False, max_steps=3)
    trainer.train()
    same = [name for name in seen["before"] if torch.equal(seen["before"][name], seen["after"][name])]
    assert same == list(seen["before"])
    assert seen["epoch after"] == seen["epoch"] == 1
    last = tensors_of(trainer)
    assert not torch.equal(last["model.lm_head.weight"], seen["after"]["model.lm_head.weight"])
    assert trainer.lr_scheduler.last_epoch == 2
    assert trainer.accelerator.gradient_state.sync_gradients


def test_a_plain_trainer_clips_in_one_piece(trainer):
    assert compat.clips_in_one_piece(trainer, trainer.model)
    gradients = [torch.randn(3), torch.randn(2, 2)]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = trainer.accelerator.clip_grad_norm_(parameters, 0.1)
    clipped = [parameter.grad.clone() for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    measured = torch.nn.utils.get_total_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, measured)
    assert torch.equal(measured, norm)
    assert all(torch.equal(parameter.grad, wanted) for parameter, wanted in zip(parameters, clipped, strict=True))


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_other_engines_do_not_clip_in_one_piece(kind, trainer):
    with compat_accelerate.local_collectives(True):
        AcceleratorState._shared_state["distributed_type"] = kind
        PartialState._shared_state["distributed_type"] = kind
        assert not compat.clips_in_one_piece(trainer, trainer.model)
    assert compat.clips_in_one_piece(trainer, trainer.model)


# ---- data ----


@pytest.mark.parametrize(("asked", "streamed", "expected"), [
    (None, False, False), (None, True, True), (True, False, True), (False, True, False),
])  # fmt: skip
def test_batches_are_dispatched_for_streams_of_several_processes(asked, streamed, expected, trainer):
    dataset = token_dataset(4).to_iterable_dataset().with_format("torch") if streamed else token_dataset(4)
    several = SimpleNamespace(num_processes=2, dispatch_batches=asked)  # what this machine has not
    assert compat_accelerate.dispatches_batches(SimpleNamespace(accelerator=several, train_dataset=dataset)) is expected
    assert isinstance(trainer.accelerator.num_processes, int)
    assert trainer.accelerator.dispatch_batches is None
    assert not compat_accelerate.dispatches_batches(trainer)


# ---- the books of the trainer ----


def test_metric_lists_are_those_the_trainer_logs(tmp_path):
    plain = build("plain", tmp_path / "plain", guard=False)
    assert compat.metric_lists(plain) == compat.metric_store(plain) == {}
    plain._metrics = {"train": {"a": [1.0], "b": 2.0}}  # a user's, of the same name
    assert compat.metric_lists(plain) == {"a": [1.0]}
    assert compat.metric_store(plain) is plain._metrics["train"]
    lengths = []

    class Hooked(stock_class("sft")):
        def _clip_grad_norm(self, model):
            metrics = compat.metric_lists(self)
            lengths.append(len(metrics["entropy"]))
            metrics["entropy"][:] = [40.0, 44.0]
            return super()._clip_grad_norm(model)

    trainer = build("sft", tmp_path / "sft", Hooked, guard=False, max_steps=1)
    trainer.train()
    assert lengths == [3]  # one a micro-batch
    assert trainer.state.log_history[0]["entropy"] == 42.0


def test_the_number_of_tokens_is_what_is_logged_next(tmp_path):
    assert compat.num_tokens(build("plain", tmp_path / "plain", guard=False)) is None
    counted = []

    class Hooked(stock_class("sft")):
        def _clip_grad_norm(self, model):
            counted.append(compat.num_tokens(self))
            compat.set_num_tokens(self, 1000)
            return super()._clip_grad_norm(model)

    trainer = build("sft", tmp_path / "sft", Hooked, guard=False, max_steps=1)
    trainer.train()
    assert counted[0] > 0
    assert trainer.state.log_history[0]["num_tokens"] == 1000


def test_the_running_loss_is_what_is_logged_next(tmp_path):
    def change(trainer):
        compat.running_loss(trainer).fill_(4.5)

    trainer = _at_a_step(tmp_path, change)
    rows = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    assert rows[2] == 4.5
    assert rows[1] != 4.5
    assert rows[3] != 4.5


def test_a_forgotten_step_is_not_part_of_a_mean(tmp_path):
    kept = _at_a_step(tmp_path / "kept", lambda trainer: compat.running_loss(trainer).fill_(6.0), logging_steps=2)
    assert [row["loss"] for row in kept.state.log_history if "loss" in row] == [3.0]  # the mean of two steps
    trainer = _at_a_step(
        tmp_path / "both",
        lambda trainer: (compat.running_loss(trainer).fill_(6.0), compat.forget_step(trainer)),
        logging_steps=2,
    )
    assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == [6.0]  # the mean of one
    assert not compat.counts_no_step(trainer)
    for _ in range(trainer.state.global_step):
        compat.forget_step(trainer)
    assert compat.counts_no_step(trainer)


@pytest.mark.parametrize("knows_first_step", [True, False])
def test_older_hosts_divide_by_the_steps_that_are_left(knows_first_step, tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "KNOWS_FIRST_STEP", knows_first_step)
    trainer = _at_a_step(tmp_path, lambda trainer: None)  # of 3 steps
    trainer._initial_global_step = 0  # newer hosts begin with it
    compat.begin_mean(trainer)
    trainer._total_loss_scalar, trainer._tr_loss = 6.0, torch.tensor(3.0)
    compat.forget_step(trainer)
    compat.end_mean(trainer)
    total = trainer._total_loss_scalar + trainer._tr_loss
    assert total / (2 if knows_first_step else trainer.state.global_step) == 9.0 / 2
    assert not compat.counts_no_step(trainer)


def test_causal_losses_shift_their_labels_and_others_do_not(trainer, tmp_path):
    from transformers import TrainingArguments

    assert compat.loss_shifts_labels(trainer)
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    other = Trainer(tiny_t5(), args, train_dataset=token_dataset(4))
    assert not compat.loss_shifts_labels(other)


def test_items_are_counted_as_the_host_counts_them(trainer):
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long)}
    batch["labels"][0, 3:] = -100
    count = compat.count_items(trainer, [batch, batch], torch.device("cpu"))
    iterator = iter([dict(batch), dict(batch)])
    _, theirs = trainer.get_batch_samples(iterator, 2, torch.device("cpu"))
    assert int(count) == int(theirs) == 2 * (2 + 4)  # the first position is never a target


def test_only_trainers_with_generations_count_per_generation(trainer, tmp_path):
    assert not compat.counts_per_generation(trainer)
    assert compat.counts_per_generation(build("grpo", tmp_path / "grpo", guard=False))


def test_tool_tokens_do_not_count_as_completion():
    mask, tools = torch.tensor([[1, 1, 0]]), torch.tensor([[1, 0, 1]])
    assert compat.completion_mask({"completion_mask": mask}).tolist() == [[1, 1, 0]]
    assert compat.completion_mask({"completion_mask": mask, "tool_mask": tools}).tolist() == [[1, 0, 0]]


def test_the_hosts_own_error_for_a_lost_loss_is_known(trainer):
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    with pytest.raises(ValueError, match="loss") as caught:
        trainer.compute_loss(trainer.model, batch)
    assert compat.lost_loss(caught.value)
    assert not compat.lost_loss(ValueError("something else"))
    assert not compat.lost_loss(RuntimeError("did not return a loss"))


def test_the_torch_optimizer_is_found_inside_accelerate_s(tmp_path):
    trainer = build("plain", tmp_path, guard=False)
    trainer.create_optimizer()
    bare = trainer.optimizer
    assert isinstance(bare, torch.optim.Optimizer)
    assert compat_accelerate.bare_optimizer(bare) is bare
    assert compat_accelerate.bare_optimizer(trainer.accelerator.prepare(bare)) is bare


def test_advantages_are_those_of_the_host_s_own_log(tmp_path):
    assert compat.logged_advantages(build("plain", tmp_path, guard=False)) is None
    trainer = build("grpo", tmp_path, guard=False, max_steps=1)
    trainer.train()
    known = compat.logged_advantages(trainer)
    assert known
    assert all(isinstance(advantage, float) for advantage in known)


# ---- generation ----


def test_the_seams_of_generation_are_those_that_generate_goes_through():
    model = tiny_llama(dropout=0.0)
    seams = compat_generation.find_seams(model)
    assert set(seams) == {
        compat_generation.PROCESSORS, compat_generation.DRAFTS, compat_generation.MANAGER, compat_generation.BATCH,
    }  # fmt: skip
    assert compat_generation.find_seams(nn.Linear(2, 2)) == {}
    calls = []

    def noting(what, original):
        def call(*args, **kwargs):
            calls.append((what, args, kwargs))
            return original(*args, **kwargs)

        return call

    for what, name in seams.items():
        vars(model)[name] = noting(what, getattr(model, name))
    ids = torch.tensor([[3, 4, 5]])
    model.generate(ids, max_new_tokens=2, do_sample=False)
    [(what, args, kwargs)] = calls
    assert what == compat_generation.PROCESSORS
    config, length = compat_generation.read_processor_call(args, kwargs)
    assert (config.max_new_tokens, length) == (2, 3)
    assert not compat_generation.is_draft(config)
    calls.clear()
    model.generate(ids, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)
    assert [what for what, _, _ in calls] == [compat_generation.PROCESSORS, compat_generation.DRAFTS]
    calls.clear()
    small = ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=64)
    config = GenerationConfig(max_new_tokens=2, eos_token_id=2, pad_token_id=0)
    model.generate_batch(ids.tolist(), generation_config=config, continuous_batching_config=small)
    assert [what for what, _, _ in calls][:2] == [compat_generation.BATCH, compat_generation.MANAGER]


def test_an_overridden_method_is_restored_and_not_copied():
    model = tiny_llama()
    before = dict(vars(model))
    override = compat_generation.Override(model, "get_input_embeddings", lambda original: [original()], Boundary())
    assert model.get_input_embeddings() == [model.model.embed_tokens]
    twin = copy.deepcopy(model)
    assert twin.get_input_embeddings() is twin.model.embed_tokens
    override.undo()
    assert vars(model) == before


def test_positional_arguments_are_read_as_the_host_names_them():
    names = list(inspect.signature(tiny_llama()._get_logits_processor).parameters)
    assert names[:2] == ["generation_config", "input_ids_seq_length"]
    assert compat_generation.read_processor_call(("config", 7), {}) == ("config", 7)
    assert compat_generation.read_processor_call(("config",), {}) == ("config", None)


def test_a_config_of_drafts_is_known():
    model, assistant = tiny_llama(dropout=0.0), tiny_llama(1, dropout=0.0)
    seen = []
    original = assistant._get_logits_processor

    def note(*args, **kwargs):
        seen.append(compat_generation.is_draft(compat_generation.read_processor_call(args, kwargs)[0]))
        return original(*args, **kwargs)

    vars(assistant)["_get_logits_processor"] = note
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False, assistant_model=assistant)
    assert seen
    assert all(seen)


class Slots:
    """A processor of continuous batching that wants a tensor."""

    supported_kwargs: dict = {}
    ignored_kwargs = ()

    def __init__(self):
        self.requests = []
        self.num_calls = 0

    def fill_defaults(self, int32_tensor):
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token):
        found = [compat_generation.find_request(request) for request in requests_with_new_token]
        self.requests += found
        return torch.tensor([len(found)] * len(found), dtype=torch.int32)

    def __call__(self, scores, tensor_arg):
        self.num_calls += 1
        return scores.index_fill(1, torch.tensor([9]), 1e9)


def test_a_processor_put_into_a_manager_is_called_with_its_requests():
    model = tiny_llama(dropout=0.0)
    small = ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=64)
    config = GenerationConfig(max_new_tokens=2, eos_token_id=2, pad_token_id=0, do_sample=True, temperature=0.5)
    slots, before = Slots(), []
    original = model.init_continuous_batching

    def init(*args, **kwargs):
        manager = original(*args, **kwargs)
        assert not compat_generation.has_begun(manager)
        before.extend(compat_generation.list_processors(manager))
        compat_generation.put_processors(manager, [*before, slots], Slots)
        managers.append(manager)
        return manager

    managers = []
    vars(model)["init_continuous_batching"] = init
    results = model.generate_batch([[3, 4], [5, 6]], generation_config=config, continuous_batching_config=small)
    assert [output.generated_tokens for output in results.values()] == [[9, 9], [9, 9]]
    assert slots.num_calls >= 2
    assert {request for request in slots.requests if request is not None} == set(results)
    assert compat_generation.list_processors(managers[0]) == [*before, slots]


def test_requests_that_warm_up_are_nobodys():
    from types import SimpleNamespace

    warm, real = (SimpleNamespace(state=SimpleNamespace(request_id=name)) for name in ("__warmup_0", "req_0"))
    assert compat_generation.find_request(warm) is None
    assert compat_generation.find_request(real) == "req_0"
    assert f'"{compat_generation.WARM_UP}' in inspect.getsource(create_warmup_future_states)


# ---- models ----


def test_implementations_are_found_and_set():
    model = BY_NAME["llava"].build(attention="eager")
    found = compat_model.find_implementation(model.config, compat_model.ATTENTION)
    assert found == {"": "eager", "vision_config": "eager", "text_config": "eager"}
    assert compat_model.find_implementation(None, compat_model.ATTENTION) is None
    config = type(model.config).from_dict(model.config.to_dict())
    compat_model.set_implementation(config, compat_model.ATTENTION, {"": "sdpa", "text_config": "eager"})
    again = compat_model.build_empty(type(model), config, torch.bfloat16)
    assert compat_model.find_implementation(again.config, compat_model.ATTENTION)["text_config"] == "eager"
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    experts = BY_NAME["mixtral"].build()
    told = compat_model.find_implementation(experts.config, compat_model.EXPERTS)
    assert told[""] in ("eager", "batched_mm", "grouped_mm")


def test_checkpointing_is_known_by_either_name():
    model = tiny_llama()
    assert not compat_model.checkpoints_activations(model)
    model.gradient_checkpointing_enable()
    assert compat_model.checkpoints_activations(model)
    assert compat_model.checkpoints_activations(SimpleNamespace(is_activation_checkpointing=True))
    assert not compat_model.checkpoints_activations(object())


# ---- online trainers ----


def test_the_policy_loss_is_known_by_its_frame(tmp_path):
    seen = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            frame = sys._getframe(1)
            if compat_reinforcement.is_policy_loss(frame):
                seen.append((func, [name for name in ("old_per_token_logps", "log_ratio") if name in frame.f_locals]))
            return func(*args, **(kwargs or {}))

    class Watched(stock_class("grpo")):
        def _compute_loss(self, model, inputs):
            with Noting():
                return super()._compute_loss(model, inputs)

    build("grpo", tmp_path, Watched, guard=False, max_steps=1, gradient_accumulation_steps=1).train()
    functions = [func for func, _ in seen]
    assert torch.exp in functions
    assert all("old_per_token_logps" in names for func, names in seen if func is torch.exp)
    assert not compat_reinforcement.is_policy_loss(sys._getframe())


def test_batches_call_log_probs_as_we_do(tmp_path):
    import trl

    outputs = {}
    for name, cls, config in (("grpo", trl.GRPOTrainer, trl.GRPOConfig), ("rloo", trl.RLOOTrainer, trl.RLOOConfig)):
        tiny_llama().save_pretrained(tmp_path / "base")
        arguments = common_arguments(tmp_path / name, max_steps=1, gradient_accumulation_steps=2)
        more = {"num_iterations": 2} if name == "grpo" else {}
        args = config(num_generations=2, max_completion_length=4, beta=0.1, **more, **arguments)
        data = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(8)])
        trainer = cls(
            str(tmp_path / "base"), reward_funcs=reward_length, args=args, train_dataset=data,
            processing_class=tiny_tokenizer(),
        )  # fmt: skip
        original = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs, original=original, name=name: outputs.setdefault(
            name, original(inputs)
        )
        trainer.train()
    assert {compat_reinforcement.OLD, compat_reinforcement.REFERENCE} <= outputs["grpo"].keys()
    assert compat_reinforcement.OLD_SUM in outputs["rloo"]


def test_scoring_of_the_users_own_is_known(tmp_path):
    class Own(stock_class("grpo")):
        def _calculate_rewards(self, *args, **kwargs):
            return super()._calculate_rewards(*args, **kwargs)

    def mine(*args, **kwargs):
        return None

    name = "test_scoring_of_the_users_own_is_known.<locals>"
    assert compat_reinforcement.find_own_scoring(build("grpo", tmp_path)) is None
    assert compat_reinforcement.find_own_scoring(build("grpo", tmp_path, guard=False)) is None
    for guard in (False, True):
        trainer = build("grpo", tmp_path, Own, guard=guard)
        assert compat_reinforcement.find_own_scoring(trainer) == f"{name}.Own._calculate_rewards"
    trainer._calculate_rewards = mine
    assert compat_reinforcement.find_own_scoring(trainer) == f"{name}.mine"


def test_scoring_is_replaced_and_put_back(tmp_path):
    trainer = build("grpo", tmp_path, guard=False, max_steps=1)
    calls = []

    def score(calculate, inputs, prompts, completions, completion_ids):
        calls.append(len(prompts))
        return calculate(inputs, prompts, completions, completion_ids)

    with compat_reinforcement.replaced_scoring(trainer, score, Boundary()):
        trainer.train()
    assert calls == [6]
    assert "_calculate_rewards" not in vars(trainer)
    trainer._calculate_rewards = score
    with pytest.raises(ZeroDivisionError), compat_reinforcement.replaced_scoring(trainer, score, Boundary()):
        _ = 1 / 0
    assert trainer._calculate_rewards is score


def test_reward_functions_are_named_as_in_the_metrics_and_replaced(tmp_path):
    trainer = build("grpo", tmp_path, guard=False, max_steps=1, logging_steps=1)
    [name] = compat_reinforcement.name_reward_functions(trainer)
    assert compat_reinforcement.name_reward_functions(build("plain", tmp_path, guard=False)) == []
    before, calls = trainer.reward_funcs, []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        return reward_length(completions, **kwargs)

    with compat_reinforcement.replaced_reward_functions(trainer, [reward]):
        trainer.train()
    assert calls == [6]
    assert trainer.reward_funcs is before
    assert f"rewards/{name}/mean" in trainer.state.log_history[0]


def test_images_are_split_by_completion_and_joined_again():
    batch = {
        "pixel_values": torch.arange(6.0)[:, None], "image_grid_thw": torch.tensor([[1, 1, 2], [1, 2, 2]]),
        "num_images": [1, 1],
    }  # fmt: skip
    parts = compat_reinforcement.split_images(batch)
    assert [len(rows) for rows in parts["pixel_values"]] == [2, 4]
    joined = compat_reinforcement.join_images(parts)
    assert torch.equal(joined["pixel_values"], batch["pixel_values"])
    assert torch.equal(joined["image_grid_thw"], batch["image_grid_thw"])
    text = {"prompt_ids": torch.ones(2, 3)}
    assert compat_reinforcement.join_images(compat_reinforcement.split_images(text)) == text


# ---- attention ----


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_observed_and_left_as_it_is(attention):
    model, batch = BY_NAME["t5"].build(attention=attention).eval(), BY_NAME["t5"].inputs()
    lookup, seen = AttentionInterface.get_interface, []
    expected = model(**batch).logits
    with compat_attention.observed_attention(lambda *args: seen.append(args), Boundary()):
        assert torch.equal(model(**batch).logits, expected)
    assert AttentionInterface.get_interface is lookup
    assert [args[0] for args in seen] == [attention] * 6  # two of the encoder, two and two of the decoder
    _, module, query, key, _, options = seen[-1]
    assert module is model.decoder.block[1].layer[1].EncDecAttention
    assert (query.shape[2], key.shape[2]) == (batch["labels"].shape[1], batch["input_ids"].shape[1])
    assert {"scaling", "position_bias"} <= options.keys()


def test_the_attention_lookup_comes_back_after_an_error():
    lookup = AttentionInterface.get_interface
    observed = compat_attention.observed_attention(lambda *args: None, Boundary())
    with pytest.raises(IndexError), observed:
        tiny_llama()(torch.full((1, 4), 1000))
    assert AttentionInterface.get_interface is lookup


def test_an_error_of_who_observes_attention_stays_there(caplog):
    model, inputs = tiny_llama(dropout=0.0), torch.ones(1, 4, dtype=torch.long)
    expected = model(inputs).logits
    with compat_attention.observed_attention(lambda *args: 1 / 0, Boundary()):
        assert torch.equal(model(inputs).logits, expected)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("length", [1, 5])
def test_causality_is_implied_where_sdpa_takes_it_so(is_causal, length):
    module, query, key = tiny_llama().model.layers[0].self_attn, torch.randn(1, 2, length, 8), torch.randn(1, 2, 5, 8)
    options = {} if is_causal is None else {"is_causal": is_causal}
    attend = AttentionInterface()["sdpa"]
    open_mask = torch.ones(1, 1, length, 5, dtype=torch.bool)
    free = torch.allclose(
        attend(module, query, key, key, None, **options)[0], attend(module, query, key, key, open_mask)[0]
    )
    assert compat_attention.implies_causality("sdpa", module, query, None, options) is not free
    assert not compat_attention.implies_causality("sdpa", module, query, open_mask, options)
    assert not compat_attention.implies_causality("eager", module, query, None, options)


def test_routers_are_those_whose_logits_the_host_returns():
    model, batch = BY_NAME["mixtral"].build().eval(), BY_NAME["mixtral"].inputs()
    found = compat_attention.find_routers(model)
    assert [(name, index) for name, _, index in found] == [(f"model.layers.{i}.mlp.gate", 0) for i in range(2)]
    outputs = []
    for _, router, index in found:
        router.register_forward_hook(lambda m, args, output, index=index: outputs.append(output[index]))
    expected = model(**batch, output_router_logits=True).router_logits
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert compat_attention.find_routers(tiny_llama()) == []


def test_backward_passes_are_surrounded_and_the_accelerator_is_left_as_it_was(trainer):
    accelerator, losses = trainer.accelerator, []
    weight = nn.Parameter(torch.ones(2))

    def around(loss):
        losses.append(loss.item())
        return nullcontext()

    with compat_accelerate.surrounded_backwards(accelerator, around):
        for factor in (3, 4):
            accelerator.backward((weight * factor).sum())
    assert losses == [6.0, 8.0]
    assert weight.grad.tolist() == [7.0, 7.0]
    assert "backward" not in vars(accelerator)
    with compat_accelerate.poisoned_backward(accelerator, weight):
        poisoned = accelerator.backward
        with compat_accelerate.surrounded_backwards(accelerator, around):
            pass
        assert accelerator.backward is poisoned


def test_a_replaced_method_comes_back_also_after_an_error(trainer):
    def fail(log):
        return lambda row: 1 / row

    with compat.surrounded_own_method(trainer, "log", fail):
        assert "log" not in vars(trainer)  # there is none to surround
    with pytest.raises(ZeroDivisionError), compat_accelerate.replaced_method(trainer, "log", fail):
        trainer.log(0)
    assert "log" not in vars(trainer)
    own = trainer.log = lambda row: row
    with pytest.raises(ZeroDivisionError), compat.surrounded_own_method(trainer, "log", fail):
        trainer.log(0)
    assert trainer.log is own
    del trainer.log


def test_the_log_filter_comes_back(trainer):
    given = trainer.args.logging_nan_inf_filter
    with compat.log_filter(trainer, not given):
        assert trainer.args.logging_nan_inf_filter is not given
    assert trainer.args.logging_nan_inf_filter is given


def test_a_callback_finds_its_trainer(tmp_path):
    found = []

    class Finder(TrainerCallback):
        def on_init_end(self, args, state, control, **kwargs):
            found.append(compat.find_trainer())

        on_step_end = on_init_end

    trainer = build("sft", tmp_path, guard=False, extra={"callbacks": [Finder()]}, max_steps=1)
    trainer.train()
    assert found == [trainer, trainer]
    assert compat.find_trainer() is None


def test_the_loss_is_divided_by_the_accumulation_steps(tmp_path):
    losses = {}
    for steps in (1, 2.5):
        trainer = build("plain", tmp_path / str(steps), guard=False)
        trainer.model_accepts_loss_kwargs = False
        batch = next(iter(trainer.get_train_dataloader()))
        compat.set_accumulation_steps(trainer, steps)
        losses[steps] = trainer.training_step(trainer.model.eval(), batch)
    torch.testing.assert_close(losses[1], losses[2.5] * 2.5)


def test_the_rates_that_a_schedule_scales(trainer):
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    assert compat.base_rates(trainer) == {trainer.args.learning_rate}
    trainer.lr_scheduler = None
    assert compat.base_rates(trainer) == set()


STEPS = range(10, 60, 10)


@pytest.mark.parametrize("protected", [None, 20, 50])
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_protected_checkpoints_are_kept_beyond_the_limit(limit, protected, tmp_path):
    for step in STEPS:
        (tmp_path / f"checkpoint-{step}").mkdir()
    original = vars(trainer_module)["rotate_checkpoints"]
    with compat.deferred_rotation() as calls:
        trainer_module.rotate_checkpoints(output_dir=str(tmp_path), save_total_limit=limit)
        assert len(list(tmp_path.iterdir())) == len(STEPS)
    assert trainer_module.rotate_checkpoints is original
    for call in calls:
        compat.rotate(call, set() if protected is None else {tmp_path / f"checkpoint-{protected}"})
    kept = {int(folder.name.split("-")[1]) for folder in tmp_path.iterdir()}
    assert kept == (set(STEPS) if limit is None else {*STEPS[-limit:]} | ({protected} - {None}))


def test_without_a_limit_checkpoints_are_not_even_listed(tmp_path, monkeypatch):
    """Listing them by their time may log a warning, which a stock run does not have."""
    monkeypatch.setattr(compat, "sort_checkpoints", lambda *args, **kwargs: pytest.fail("they are listed"))
    compat.rotate({"output_dir": str(tmp_path), "save_total_limit": None, "use_mtime": True}, {tmp_path})


def test_a_trainer_gets_other_callbacks_and_no_others(trainer):
    calls = []

    class Noting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            calls.append(state.global_step)

    compat.replace_callbacks(trainer, [Noting()])
    trainer.train()
    assert calls[:2] == [1, 2]
    assert [type(each) for each in trainer.callback_handler.callbacks] == [Noting]


def test_a_batch_is_prepared_as_the_loss_gets_it(trainer):
    prepared = compat.prepare_inputs(trainer, {"input_ids": torch.ones(1, 2)})
    assert prepared["input_ids"].device == trainer.args.device


def test_a_batch_size_is_that_of_the_next_dataloader(trainer):
    compat.set_batch_size(trainer, 5)
    assert len(next(iter(trainer.get_train_dataloader()))["input_ids"]) == 5


def test_a_checkpoint_is_saved_where_it_is_said(tmp_path):
    folders = []
    trainer = _at_a_step(
        tmp_path,
        lambda trainer: folders.append(compat.checkpoint_folder(trainer, None)),
        save_strategy="steps",
        save_steps=1,
    )
    assert folders == [tmp_path / "checkpoint-1"]  # asked in the second step
    assert folders[0].is_dir()
    assert compat.checkpoint_folder(trainer, None) == tmp_path / "checkpoint-3"


def test_a_run_that_is_complete_trains_no_step_more(tmp_path):
    settings = {"guard": False, "max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    build("plain", tmp_path, **settings).train()
    resumed, steps = build("plain", tmp_path, **settings), []
    resumed.training_step = lambda *args, **kwargs: steps.append(type(resumed).training_step(resumed, *args, **kwargs))
    with compat.ending_when_complete(resumed):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (resumed.state.global_step, steps) == (3, [])
    assert "_run_epoch" not in vars(resumed)


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_the_next_micro_batch_of_an_online_trainer_generates_or_not(num_iterations, tmp_path):
    trainer = build("grpo", tmp_path, guard=False, num_iterations=num_iterations)
    assert compat_reinforcement.is_online(trainer)
    assert not compat_reinforcement.is_online(build("plain", tmp_path / "plain", guard=False))
    asked, generated = [], []
    generate, step = trainer._generate_and_score_completions, trainer.training_step
    trainer._generate_and_score_completions = lambda inputs: generated.append(len(asked)) or generate(inputs)
    trainer.training_step = lambda *args: (
        asked.append(compat_reinforcement.is_between_generations(trainer)) or step(*args)
    )
    trainer.train()
    assert generated
    assert [place for place, new in enumerate(asked, 1) if new] == generated


def test_completions_that_are_left_are_generated_anew_after_a_restore(tmp_path):
    trainer = build("grpo", tmp_path, guard=False)
    trainer._buffered_inputs = [{}]
    compat_reinforcement.GenerationBuffer(trainer).restore(None, 0)
    assert trainer._buffered_inputs is None
    plain = build("plain", tmp_path / "plain", guard=False)
    compat_reinforcement.GenerationBuffer(plain).restore(None, 0)
    assert "_buffered_inputs" not in vars(plain)


def test_completions_and_their_log_probabilities(tmp_path):
    trainer = build("grpo", tmp_path, guard=False)
    assert compat_reinforcement.has_policy_logps(trainer)
    assert not compat_reinforcement.has_policy_logps(build("plain", tmp_path / "plain", guard=False))
    rows = [trainer.train_dataset[row] for row in range(2)]
    assert compat_reinforcement.has_policy_logps(trainer)
    assert not compat_reinforcement.has_policy_logps(build("plain", tmp_path / "plain", guard=False))
    batch = compat_reinforcement.generate_batch(trainer, rows, 3)
    assert len(batch["completion_ids"]) == trainer.num_generations  # one group fits a micro-batch
    assert batch["completion_ids"].shape[1] <= 3
    logps = compat_reinforcement.policy_logps(trainer, trainer.model, batch)
    assert logps.shape == batch["completion_ids"].shape
    assert (logps <= 0).all()
