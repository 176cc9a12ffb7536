"""Remedies: the right ones are tried, their outcomes are true, and nothing of the model is different afterwards."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_nanguard.core.autopsy.evidence.suspect_batch import SuspectBatch
from hf_nanguard.core.autopsy.evidence.verdict import Blame
from hf_nanguard.core.autopsy.remedies.bounded_operators import BOUNDS, bounded
from hf_nanguard.core.autopsy.remedies.try_remedies import try_remedies
from hf_nanguard.core.autopsy.trace.origin import Origin
from hf_nanguard.core.event import Remedy
from hf_nanguard.core.rerun.micro_batch import MicroBatch
from hf_nanguard.core.rerun.runner import LoopRunner
from hf_nanguard.core.rng import RngState
from hf_nanguard.core.vocabulary import Cause
from hf_nanguard.plain_text import show
from tests.core.loop import group_of_one


def specimen_of(model: nn.Module, loss_fn: Callable, payload: dict) -> SuspectBatch:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    runner = LoopRunner(model, optimizer)
    runner.loss_fn = loss_fn
    runner.buffers.keep()
    return SuspectBatch(runner, MicroBatch(0, payload, RngState.capture()), 1.0)


def tried(suspect: SuspectBatch, blame: Blame | None = None) -> tuple[Origin, dict[str, Remedy]]:
    """Finds the origin, as the examiner does, tries remedies and checks that the model is the very same."""
    origin = suspect.find_origin()
    assert origin is not None
    with unchanged(suspect):
        remedies = try_remedies(suspect, origin, blame or Blame(), lambda: True)
    assert len({remedy.name for remedy in remedies}) == len(remedies)
    return origin, {remedy.name: remedy for remedy in remedies}


class unchanged:  # noqa: N801
    """Everything a trial may touch: objects, storages, dtypes and values of tensors, modules' tables, hooks, autocast."""

    def __init__(self, suspect: SuspectBatch):
        self.suspect = suspect

    def look(self) -> list:
        model = self.suspect.runner.model
        tables = [
            (id(module), name, id(tensor))
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
        ]
        tensors = [*model.parameters(), *model.buffers()]
        return [
            tables,
            [(id(t), t.data_ptr(), t.dtype, t.requires_grad, id(t._backward_hooks)) for t in tensors],
            [sorted(module.__dict__) for module in model.modules()],
            [id(getattr(module, "forward", None).__func__) for module in model.modules()],
            id(torch.autocast.__enter__),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            [id(m.has_torch_function_unary) for m in (nn.functional, torch.functional, torch._tensor)],
            id(self.suspect.micro),
            id(self.suspect.runner.buffers.kept),
        ]

    def __enter__(self) -> None:
        model = self.suspect.runner.model
        self.suspect.runner.buffers.restore()
        self.values = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
        self.before = self.look()

    def __exit__(self, *error: object) -> None:
        model = self.suspect.runner.model
        assert self.look() == self.before
        now = [*model.parameters(), *model.buffers()]
        assert all(
            torch.equal(a.view(torch.uint8), b.detach().view(torch.uint8)) if a.ndim else torch.equal(a, b)
            for a, b in zip(self.values, now, strict=True)
        )
        assert all(parameter.grad is None for parameter in model.parameters())


class Block(nn.Module):
    """A gated product in the middle, tied ends, a frozen layer and a batch norm: whatever a cast has to survive."""

    def __init__(self, gain: float, dtype: torch.dtype, recompute: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.gate = Gate(gain)
        self.leave = nn.Linear(4, 4, bias=False)
        self.leave.weight = self.enter.weight
        self.recompute = recompute
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.enter(x)))
        x = checkpoint(self.gate, x, use_reentrant=False) if self.recompute else self.gate(x)
        return self.leave(x)


class Gate(nn.Module):
    def __init__(self, gain: float, back: float = 1e-5):
        super().__init__()
        self.up = nn.Parameter(torch.ones(4))
        self.gain, self.back = gain, back

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.up * self.gain) * self.gain * self.back


def mean_square(model: nn.Module) -> Callable[[dict], Tensor]:
    return lambda batch: model(batch["x"]).float().square().mean()


@pytest.mark.parametrize("recompute", [False, True])
def test_float16_overflow_is_cured_by_width_not_by_luck(recompute: bool):
    """600 * 600 is beyond float16 and well within bfloat16 and float32; times 1e-5 it fits float16 again."""
    model = Block(600.0, torch.float16, recompute)
    model.enter.weight.register_hook(lambda gradient: gradient)
    suspect = specimen_of(model, mean_square(model), {"x": torch.randn(8, 4).half()})
    origin, remedies = tried(suspect)
    assert (origin.cause, origin.module) == (Cause.FP16_OVERFLOW, "gate")
    assert {name: remedy.works for name, remedy in remedies.items()} == {
        "bfloat16": True,
        "float32": True,
        "upcast_module": True,
    }


def test_a_cast_model_keeps_its_ties_its_frozen_parts_and_its_hooks():
    model = Block(600.0, torch.float16)
    hooked: set = set()
    seen: dict = {}
    model.enter.weight.register_hook(lambda gradient: hooked.add(gradient.dtype))

    def loss_fn(batch: dict) -> Tensor:
        parameters = [model.enter.weight, model.leave.weight, model.frozen.weight, model.norm.running_mean]
        seen[batch["x"].dtype] = (
            parameters[0] is parameters[1],
            [p.dtype for p in parameters] == [batch["x"].dtype] * 4,
            [p.requires_grad for p in parameters],
        )
        return model(batch["x"]).float().square().mean()

    tried(specimen_of(model, loss_fn, {"x": torch.randn(8, 4).half()}))
    expected = (True, True, [True, True, False, False])
    assert seen == {torch.float16: expected, torch.bfloat16: expected, torch.float32: expected}
    assert hooked == {torch.float16, torch.bfloat16, torch.float32}


def test_upcast_that_does_not_fit_says_so():
    model = Block(600.0, torch.float16)
    model.gate.back = 1.0
    suspect = specimen_of(model, mean_square(model), {"x": torch.randn(8, 4).half()})
    _, remedies = tried(suspect)
    assert remedies["upcast_module"].works is False
    assert "overflows" in remedies["upcast_module"].note
    assert remedies["float32"].works


def test_float32_does_not_cure_what_is_not_about_precision():
    model = Block(1.0, torch.float16)
    suspect = specimen_of(model, lambda batch: (model(batch["x"]) * 0).log().sum(), {"x": torch.randn(8, 4).half()})
    origin, remedies = tried(suspect)
    assert origin.cause is Cause.LOG_OF_ZERO
    assert remedies["float32"].works is False
    assert "the loss was" in remedies["float32"].note
    assert remedies["log_of_clamped"].works


@pytest.mark.parametrize("held", [False, True])
def test_autocast_of_the_loop_is_taken_off(held: bool):
    """Entered anew in every pass, or one instance held for good, as accelerate does."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    own = torch.autocast("cpu", torch.float16)

    def loss_fn(batch: dict) -> Tensor:
        with own if held else torch.autocast("cpu", torch.float16):
            y = model(batch["x"])
            seen.append(y.dtype)
            return (y * 600 * 600 * 1e-5).float().square().mean()

    seen: list = []
    suspect = specimen_of(model, loss_fn, {"x": torch.randn(8, 4)})
    origin, remedies = tried(suspect)
    assert origin.cause is Cause.FP16_OVERFLOW
    assert (remedies["float32"].works, remedies["bfloat16"].works) == (True, True)
    assert "autocast off" in remedies["float32"].note
    assert {torch.float32, torch.bfloat16} <= set(seen)
    assert not suspect.run().healthy  # and back on afterwards
    assert (own._enabled, own.fast_dtype) == (True, torch.float16)


def test_autocast_around_the_autopsy_is_taken_off_too():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    suspect = specimen_of(
        model, lambda batch: (model(batch["x"]) * 600 * 600 * 1e-5).float().sum(), {"x": torch.randn(8, 4)}
    )
    with torch.autocast("cpu", torch.float16):
        _, remedies = tried(suspect)
    assert (remedies["float32"].works, remedies["bfloat16"].works) == (True, True)


def test_precision_is_no_remedy_where_all_is_float32():
    """float32 is run to see whether there is an autocast, and then not mentioned."""
    model = nn.Linear(4, 1)
    suspect = specimen_of(model, lambda batch: (model(batch["x"]) * 0).log().sum(), {"x": torch.randn(8, 4)})
    _, remedies = tried(suspect)
    assert list(remedies) == ["log_of_clamped"]


def test_float32_behind_a_wide_operator_is_found_by_its_autocast():
    """1 - sigmoid(12) is 0 in float16 only; the log that breaks is of float32."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def loss_fn(batch: dict) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return (1 - model(batch["x"]).sigmoid()).float().log().mean()

    origin, remedies = tried(specimen_of(model, loss_fn, {"x": torch.full((2, 1), 12.0)}))
    assert origin.dtype == "float32"
    assert remedies["float32"].works
    assert "bfloat16" not in remedies


def test_recurrent_layers_are_cast_too():
    """They hold their parameters a second time, in a list."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 4, batch_first=True).to(torch.bfloat16)
    seen: list = []

    def loss_fn(batch: dict) -> Tensor:
        y = model(batch["x"])[0]
        seen.append(y.dtype)
        return y.sum() * (math.inf if y.dtype == torch.bfloat16 else 1.0)

    suspect = specimen_of(model, loss_fn, {"x": torch.randn(2, 3, 4).bfloat16()})
    flat = [id(weight) for weight in model._flat_weights]
    _, remedies = tried(suspect)
    assert remedies["float32"].works
    assert seen[-1] == torch.float32
    assert [id(weight) for weight in model._flat_weights] == flat


# ---- data ----


def test_dropping_the_rows_leaves_the_others():
    model = nn.Linear(4, 1)
    x = torch.ones(4, 4)
    x[2] = math.nan
    suspect = specimen_of(model, lambda batch: model(batch["x"]).mean(), {"x": x})
    origin, remedies = tried(suspect, Blame("samples", [2]))
    assert origin.cause is Cause.INPUT_NONFINITE
    assert {name: remedy.works for name, remedy in remedies.items()} == {"fill_input": True, "drop_rows": True}
    _, remedies = tried(suspect, Blame("samples", [1]))
    assert remedies["drop_rows"].works is False
    assert "drop_rows" not in tried(suspect, Blame("samples", [0, 1, 2, 3]))[1]
    assert "drop_rows" not in tried(suspect, Blame("every_sample", [0, 1, 2, 3]))[1]


def test_rows_are_dropped_only_after_what_addresses_the_cause_and_the_precision():
    """One row overflows first, but the precision is what must change."""
    model = nn.Linear(4, 1, bias=False).half()
    nn.init.constant_(model.weight, 100.0)
    x = torch.ones(4, 4, dtype=torch.float16)
    x[2] = 400.0
    suspect = specimen_of(model, lambda batch: model(batch["x"]).float().mean(), {"x": x})
    origin, remedies = tried(suspect, Blame("samples", [2]))
    assert origin.cause is Cause.FP16_OVERFLOW
    working = [name for name, remedy in remedies.items() if remedy.works]
    assert working[-1] == "drop_rows"
    assert "bfloat16" in working


def test_a_bad_weight_is_named_as_what_must_be_set():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1))
    model[0].weight.data[3] = math.nan
    suspect = specimen_of(model, lambda batch: model(batch["x"]).mean(), {"x": torch.tensor([1, 3])})
    origin, remedies = tried(suspect)
    assert origin.cause is Cause.UNINITIALISED_WEIGHT
    assert {name: remedy.works for name, remedy in remedies.items()} == {"initialise_weight": True}
    assert "0.weight" in remedies["initialise_weight"].note


# ---- bounded operators ----


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, key_padding_mask=torch.ones(x.shape[:2], dtype=torch.bool))[0]


def _identity() -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.eye_(layer.weight)
    return layer


LAST = torch.tensor([False, False, False, True])
LOSSES: dict[str, tuple[Cause, str, Callable[[Tensor], Tensor]]] = {
    "exp": (Cause.EXP_OVERFLOW, "bounded_exp", lambda y: (y * 200).exp().mean()),
    "exp in place": (Cause.EXP_OVERFLOW, "bounded_exp", lambda y: _in_place(y)),
    "special": (Cause.EXP_OVERFLOW, "bounded_exp", lambda y: torch.special.exp2(y * 300).mean()),
    "named": (Cause.EXP_OVERFLOW, "bounded_exp", lambda y: torch.expm1(input=y * 200).mean()),
    "ratio": (Cause.RATIO_OVERFLOW, "bounded_log_ratio", lambda y: _policy(y)),
    "kl": (Cause.KL_OVERFLOW, "bounded_log_ratio", lambda y: _kl(y)),
    "sqrt": (Cause.SQRT_AT_ZERO, "eps_in_sqrt", lambda y: (y - y.detach()).sqrt().sum()),
    "power": (Cause.SQRT_AT_ZERO, "eps_in_sqrt", lambda y: ((y - y.detach()) ** 0.5).sum()),
    "norm": (Cause.NORM_AT_ZERO, "eps_in_sqrt", lambda y: (y * 0).square().sum().sqrt()),
    "log": (Cause.LOG_OF_ZERO, "log_of_clamped", lambda y: (y * 0).log().sum()),
    "log1p": (Cause.LOG_OF_ZERO, "log_of_clamped", lambda y: torch.log1p(y * 0 - 1).sum()),
    "masked mean": (Cause.DIV_BY_ZERO, "guarded_division", lambda y: (y * 0).sum() / (y.detach() > 9).sum()),
    "divided": (Cause.DIV_BY_ZERO, "guarded_division", lambda y: (1.0 / (y * 0)).sum()),
    "in place": (Cause.DIV_BY_ZERO, "guarded_division", lambda y: (y * 1).div_(y.detach() * 0).sum()),
    "std of one": (Cause.DIV_BY_ZERO, "guarded_division", lambda y: _alone(lambda: (y[:1] / (y[:1].std(0) + 1e-4)).sum())),
    "std of a number": (Cause.DIV_BY_ZERO, "guarded_division", lambda y: _alone(lambda: y[0, 0].std())),
    "var of one": (Cause.DIV_BY_ZERO, "guarded_division", lambda y: _alone(lambda: torch.var_mean(y[:, :1], (1,))[0].sum())),
    "slope of var": (Cause.DIV_BY_ZERO, "guarded_division", lambda y: _alone(lambda: y[:1].var(0).nan_to_num().sum())),
    "where": (Cause.WHERE_UNSELECTED_BRANCH, "where_on_input", lambda y: _unselected(y)),
    "ctc": (
        Cause.CTC_TARGET_TOO_LONG, "ctc_zero_infinity",
        lambda y: nn.functional.ctc_loss((y.T[:, :, None] * torch.ones(3)).log_softmax(-1), torch.ones(2, 4, dtype=torch.long), (4, 4), (4, 1)),
    ),
    "softmax": (
        Cause.MASKED_ROW_SOFTMAX, "unmask_empty_rows",
        lambda y: nn.functional.softmax(y.masked_fill(torch.tensor([[True], [False]]), -math.inf), dim=-1)[:, 0].sum(),
    ),
    "label smoothing": (
        Cause.MASKED_ROW_SOFTMAX, "unmask_empty_rows",
        lambda y: nn.functional.cross_entropy(y.masked_fill(LAST, -math.inf), torch.tensor([0, 1]), label_smoothing=0.1),
    ),
    "soft labels": (
        Cause.MASKED_ROW_SOFTMAX, "unmask_empty_rows",
        lambda y: -(torch.eye(4)[:2] * torch.where(LAST, torch.tensor(-math.inf), y).log_softmax(-1)).sum(),
    ),
    "masked label": (
        Cause.MASKED_ROW_SOFTMAX, "unmask_empty_rows",
        lambda y: nn.functional.cross_entropy(y.masked_fill(LAST, -math.inf), torch.tensor([0, 3])),
    ),
}  # fmt: skip


def _alone(loss: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what is planted
        return loss()


def _in_place(y: Tensor) -> Tensor:
    z = y * 200
    z.exp_()
    return z.mean()


def _policy(y: Tensor) -> Tensor:
    old_logps = y.detach() - 200
    ratio = torch.exp(y - old_logps)
    return ratio.mean()


def _kl(y: Tensor) -> Tensor:
    ref_logps = y.detach() + 200
    per_token_kl = torch.exp(ref_logps - y) - (ref_logps - y) - 1
    return per_token_kl.mean()


def _unselected(y: Tensor) -> Tensor:
    return torch.where(y > 5, torch.log(y - y.detach()), torch.zeros_like(y)).sum()


@pytest.mark.parametrize("name", LOSSES)
def test_bounding_the_operator_cures_its_cause(name: str):
    cause, remedy, loss = LOSSES[name]
    model = _identity()
    suspect = specimen_of(model, lambda batch: loss(model(batch["x"])), {"x": torch.ones(2, 4)})
    origin = suspect.find_origin()
    assert origin is not None
    with unchanged(suspect):
        found = try_remedies(suspect, origin, Blame(), lambda: True)
    assert [(r.name, r.works) for r in found] == [(remedy, True)]
    assert origin.cause is cause


def test_bounds_are_seen_inside_functions_written_in_python():
    """The softmax of `nn.MultiheadAttention` runs in a function that a mode would get whole."""
    torch.manual_seed(0)
    model = Attention()
    suspect = specimen_of(model, lambda batch: model(batch["x"]).square().mean(), {"x": torch.randn(2, 3, 4)})
    origin, remedies = tried(suspect)
    assert origin.cause is Cause.MASKED_ROW_SOFTMAX
    assert remedies["unmask_empty_rows"].works


def test_bounds_hold_while_checkpointed_parts_are_computed_again():
    model = _identity()
    seen: list = []

    def part(y: Tensor) -> Tensor:
        z = (y * 200).exp()
        seen.append(bool(z.isfinite().all()))
        return z.sqrt()  # the second time, torch stops as soon as it has what the backward needs

    suspect = specimen_of(
        model, lambda batch: checkpoint(part, model(batch["x"]), use_reentrant=False).mean(), {"x": torch.ones(2, 4)}
    )
    origin = suspect.find_origin()
    seen.clear()
    [remedy] = try_remedies(suspect, origin, Blame(), lambda: True)
    assert remedy.works
    assert seen[:2] == [True, True]  # what follows is the look for an autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bounds_leave_healthy_arguments_bit_identical(dtype: torch.dtype):
    torch.manual_seed(0)
    x = (torch.rand(64) * 2 + 0.1).to(dtype)
    masked = x.view(16, 4).masked_fill(LAST, -math.inf)

    def compute() -> list[Tensor]:
        signed = x - 1
        return [
            signed.exp(), x.sqrt(), x.log(), signed**2, signed**2.0, x**0.5, 1 / x, signed / x, x.log1p(), (x / 3).logit(), x / 2,
            x.rsqrt(), signed.softmax(0), torch.logsumexp(signed, 0), signed.clone().exp_(), signed.sinh(),
            x.std(), x.view(2, 32).var(0, keepdim=True), x.std(unbiased=False), masked.softmax(-1), masked.logsumexp(-1),
        ]  # fmt: skip

    plain = compute()
    for _, _, rules in BOUNDS.values():
        with bounded(rules):
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, compute(), strict=True))


def test_an_operator_in_place_writes_where_it_is_told():
    leaf = torch.tensor([1.0, 200.0], requires_grad=True)
    with bounded(BOUNDS[Cause.EXP_OVERFLOW][2]):
        x = leaf * 1
        assert x.exp_() is x
        x.sum().backward()
    assert x.tolist() == pytest.approx([math.e, math.exp(0.9 * math.log(torch.finfo(torch.float32).max))])
    assert leaf.grad.tolist() == pytest.approx([math.e, 0.0])


# ---- what may go wrong ----


def test_no_time_left_is_said():
    model = Block(600.0, torch.float16)
    suspect = specimen_of(model, mean_square(model), {"x": torch.randn(8, 4).half()})
    origin = suspect.find_origin()
    answers = iter([True, False, True, True])
    before = suspect.num_runs
    found = try_remedies(suspect, origin, Blame("samples", [0]), lambda: next(answers))
    assert [remedy.tried for remedy in found] == [True, False, False, False]
    assert {remedy.note for remedy in found[1:]} == {"no time left"}
    assert suspect.num_runs == before + 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory"),
        (ValueError("this loss wants float16"), "ValueError: this loss wants float16"),
    ],
)
def test_an_exception_is_the_outcome_of_its_trial(error: Exception, said: str):
    model = Block(600.0, torch.float16)

    def loss_fn(batch: dict) -> Tensor:
        if batch["x"].dtype == torch.float32:
            raise error
        return model(batch["x"]).float().square().mean()

    _, remedies = tried(specimen_of(model, loss_fn, {"x": torch.randn(8, 4).half()}))
    assert remedies["float32"].tried
    assert remedies["float32"].works is False
    assert said in show(remedies["float32"].note)
    assert remedies["bfloat16"].works


def test_the_allocator_of_the_cpu_is_out_of_memory():
    model = Block(600.0, torch.float16)

    def loss_fn(batch: dict) -> Tensor:
        if batch["x"].dtype == torch.float32:
            torch.empty(10**15)
        return model(batch["x"]).float().square().mean()

    _, remedies = tried(specimen_of(model, loss_fn, {"x": torch.randn(8, 4).half()}))
    assert remedies["float32"].note.endswith("out of memory")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_interrupt_passes_through_a_restored_model(dtype: torch.dtype):
    model = Block(600.0, torch.float16)

    def loss_fn(batch: dict) -> Tensor:
        if batch["x"].dtype == dtype:
            raise KeyboardInterrupt
        return model(batch["x"]).float().square().mean()

    suspect = specimen_of(model, loss_fn, {"x": torch.randn(8, 4).half()})
    origin = suspect.find_origin()
    with unchanged(suspect), pytest.raises(KeyboardInterrupt):
        try_remedies(suspect, origin, Blame(), lambda: True)


def test_an_interrupt_in_a_bounded_run_or_an_upcast_module_passes_too():
    model = Block(600.0, torch.float16)
    stop: list = []

    def loss_fn(batch: dict) -> Tensor:
        loss = model(batch["x"]).float().square().mean()
        if stop:
            raise KeyboardInterrupt
        return loss

    suspect = specimen_of(model, loss_fn, {"x": torch.randn(8, 4).half()})
    origin = suspect.find_origin()
    for cause, trials in ((Cause.EXP_OVERFLOW, 0), (Cause.FP16_OVERFLOW, 2)):
        stop.clear()
        count = iter(range(9))

        def allowed(count=count, trials=trials) -> bool:
            if next(count) == trials:
                stop.append(True)
            return True

        with unchanged(suspect), pytest.raises(KeyboardInterrupt):
            try_remedies(suspect, replace(origin, cause=cause), Blame(), allowed)


def test_ddp_still_reduces_afterwards():
    """A new `.data` of another dtype would cut the hooks by which DDP reduces gradients."""
    with group_of_one():
        model = DistributedDataParallel(Block(600.0, torch.float16))
        reduced: list = []

        def hook(state, bucket):
            reduced.append(bucket.index())
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, hook)
        x = torch.randn(8, 4).half()
        suspect = specimen_of(model, mean_square(model), {"x": x})
        _, remedies = tried(suspect)
        assert remedies["float32"].works
        assert not reduced
        model.require_forward_param_sync = True
        model(x).float().mean().backward()
        assert reduced


def test_adapters_of_peft_survive():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]), autocast_adapter_dtype=False)

    def loss_fn(batch: dict) -> Tensor:
        return (model(batch["x"]) * 600 * 600 * 1e-5).float().square().mean()

    _, remedies = tried(specimen_of(model, loss_fn, {"x": torch.randn(8, 4).half()}))
    assert {name: r.works for name, r in remedies.items()} == {"bfloat16": True, "float32": True}
