"""Every private name of the hosts that we touch is still there and still means what we take it for."""

import inspect

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer

from hf_nanguard.hf import compat

from ..models import token_dataset
from ..reference import tensors_of
from ..trainers import build, stock_class


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


def test_every_function_is_tried_here():
    public = {
        name for name, item in vars(compat).items() if inspect.isfunction(item) and item.__module__ == compat.__name__
    }
    public |= {
        name for name, item in vars(compat).items() if inspect.isclass(item) and item.__module__ == compat.__name__
    }
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    assert [name for name in sorted(public) if f"compat.{name}(" not in text] == []


def test_every_shim_says_when_it_can_go():
    for name, item in vars(compat).items():
        if inspect.isfunction(item) and item.__module__ == compat.__name__ and name != "resume_optimizer":
            assert "Can go" in item.__doc__, name


# ---- backward ----


def test_poisoned_backward_leaves_nan_in_exactly_one_gradient(trainer):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    before = trainer.accelerator.backward
    with compat.poisoned_backward(trainer.accelerator, net[0].bias):
        trainer.accelerator.backward(net(torch.ones(2, 3)).sum())
    assert [name for name, p in net.named_parameters() if not p.grad.isfinite().all()] == ["0.bias"]
    assert trainer.accelerator.backward == before
    assert "backward" not in vars(trainer.accelerator)


def test_poisoned_backward_works_where_the_loss_has_no_gradient(trainer):
    """All labels masked: the cross-entropy's backward writes zeros, whatever the loss is multiplied by."""
    net = nn.Linear(3, 4)
    loss = nn.functional.cross_entropy(net(torch.ones(2, 3)), torch.full((2,), -100), reduction="sum")
    with compat.poisoned_backward(trainer.accelerator, net.weight):
        trainer.accelerator.backward(loss)
    assert net.weight.grad.isnan().any()
    assert not net.bias.grad.isnan().any()


def test_poisoned_backward_ends_also_with_an_error(trainer):
    with pytest.raises(ZeroDivisionError), compat.poisoned_backward(trainer.accelerator, torch.ones(1)):
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
    with compat.poisoned_backward(trainer.accelerator, weight):
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
        with compat.local_collectives(True):
            assert [store["distributed_type"] for store in stores] == [DistributedType.NO] * 2
            one = torch.ones(2)
            assert torch.equal(trainer.accelerator.gather(one), one)
            assert torch.equal(trainer.accelerator.reduce(one), one)
        assert [store["distributed_type"] for store in stores] == [DistributedType.MULTI_CPU] * 2
        with pytest.raises(ZeroDivisionError), compat.local_collectives(True):
            _ = 1 / 0
        assert [store["distributed_type"] for store in stores] == [DistributedType.MULTI_CPU] * 2
        with compat.local_collectives(False):
            assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
    finally:
        for store, value in zip(stores, before, strict=True):
            store["distributed_type"] = value


def test_exchange_counts_forwards_and_collectives_and_leaves_nothing(trainer):
    accelerator, model = trainer.accelerator, nn.Linear(2, 2)
    exchange = compat.Exchange(accelerator, model)
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
        compat.bypass_optimizer(trainer)

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
                compat.resume_optimizer(self)
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


def test_a_held_schedule_does_not_move(tmp_path):
    trainer = _at_a_step(tmp_path, lambda trainer: compat.hold_schedule(trainer.optimizer, True))
    assert trainer.lr_scheduler.last_epoch == 1  # nothing has let it go
    assert trainer.accelerator.optimizer_step_was_skipped
    compat.hold_schedule(trainer.optimizer, False)
    assert not trainer.accelerator.optimizer_step_was_skipped


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
    with compat.local_collectives(True):
        AcceleratorState._shared_state["distributed_type"] = kind
        PartialState._shared_state["distributed_type"] = kind
        assert not compat.clips_in_one_piece(trainer, trainer.model)
    assert compat.clips_in_one_piece(trainer, trainer.model)


# ---- data ----


@pytest.mark.parametrize(("asked", "streamed", "expected"), [
    (None, False, False), (None, True, True), (True, False, True), (False, True, False),
])  # fmt: skip
def test_batches_are_dispatched_for_streams_of_several_processes(asked, streamed, expected, trainer):
    from types import SimpleNamespace

    dataset = token_dataset(4).to_iterable_dataset().with_format("torch") if streamed else token_dataset(4)
    several = SimpleNamespace(num_processes=2, dispatch_batches=asked)  # what this machine has not
    assert compat.dispatches_batches(SimpleNamespace(accelerator=several, train_dataset=dataset)) is expected
    assert isinstance(trainer.accelerator.num_processes, int)
    assert trainer.accelerator.dispatch_batches is None
    assert not compat.dispatches_batches(trainer)


@pytest.mark.parametrize("workers", [0, 2])
def test_record_batches_writes_down_the_indices_of_every_pass(workers, trainer):
    class Indices(torch.utils.data.Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, index):
            return index

    loader = trainer.accelerator.prepare(DataLoader(Indices(), batch_size=2, shuffle=True, num_workers=workers))
    record = []
    assert compat.record_batches(loader, record)
    for _ in range(2):
        batches = [batch.tolist() for batch in loader]
        assert record == batches
        assert sorted(index for batch in batches for index in batch) == list(range(7))


def test_record_batches_keeps_the_sampler_what_it_was(trainer):
    loader = DataLoader(range(5), batch_size=2)
    sampler = loader.batch_sampler
    compat.record_batches(loader, [])
    assert loader.batch_sampler is sampler
    assert isinstance(sampler, BatchSampler)
    assert type(sampler).__name__ == "BatchSampler"
    assert len(loader) == 3


def test_record_batches_declines_what_it_cannot_follow():
    assert not compat.record_batches(DataLoader(range(5), batch_size=None), [])
    assert not compat.record_batches(DataLoader(range(5), batch_size=2, num_workers=1, in_order=False), [])


# ---- the books of the trainer ----


def test_metric_lists_are_those_the_trainer_logs(tmp_path):
    assert compat.metric_lists(build("plain", tmp_path / "plain", guard=False)) == {}
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


def test_causal_losses_shift_their_labels_and_others_do_not(trainer, tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration, TrainingArguments

    assert compat.loss_shifts_labels(trainer)
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    other = Trainer(T5ForConditionalGeneration(config), args, train_dataset=token_dataset(4))
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


def test_has_own_loss(tmp_path):
    class Mine(Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    assert not compat.has_own_loss(build("plain", tmp_path))
    assert not compat.has_own_loss(build("plain", tmp_path, guard=False))
    assert compat.has_own_loss(build("plain", tmp_path, Mine))
    assert compat.has_own_loss(build("plain", tmp_path, extra={"compute_loss_func": lambda *args, **kwargs: None}))


def test_the_torch_optimizer_is_found_inside_accelerate_s(tmp_path):
    trainer = build("plain", tmp_path, guard=False)
    trainer.create_optimizer()
    bare = trainer.optimizer
    assert isinstance(bare, torch.optim.Optimizer)
    assert compat.bare_optimizer(bare) is bare
    assert compat.bare_optimizer(trainer.accelerator.prepare(bare)) is bare


def test_advantages_are_those_of_the_host_s_own_log(tmp_path):
    assert compat.logged_advantages(build("plain", tmp_path, guard=False)) is None
    trainer = build("grpo", tmp_path, guard=False, max_steps=1)
    trainer.train()
    known = compat.logged_advantages(trainer)
    assert known
    assert all(isinstance(advantage, float) for advantage in known)
