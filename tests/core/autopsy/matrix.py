"""The matrix of planted faults: each knows its operator, line, phase and cause before anything runs.

A fault of the table `FAULTS` is a function over hidden states that a forward hook puts into a module of any architecture;
the line to be named carries the mark `# culprit`. It strikes one sample and one token. What comes back is compared
field by field, so that a wrong answer says what was wrong about it.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_nanguard.core.autopsy.trace.origin import Origin, find_origin
from hf_nanguard.core.vocabulary import Cause
from tests.architectures import Architecture

SAMPLE, TOKEN = 1, 2
NAN, INF = math.nan, math.inf
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def find_in(model: nn.Module, loss: Callable[[], Tensor], inputs: dict[str, Tensor]) -> tuple[Origin | None, float]:
    """Runs forward and backward of `loss` under a trace; returns the origin and the loss."""
    model.zero_grad()
    result: list[Tensor] = []

    def run() -> Tensor:
        value = loss()
        value.backward()
        result.append(value.detach())
        return result[0]

    gradients = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    origin = find_origin(run, model, lambda: [(n, p.grad) for n, p in gradients if p.grad is not None], inputs)
    return origin, result[0].item()


def culprit_line(function: Callable) -> str:
    """Returns file and line of the marked line of a function."""
    lines, first = inspect.getsourcelines(function)
    [offset] = [i for i, line in enumerate(lines) if "# culprit" in line]
    return f"{inspect.getsourcefile(function).rsplit('/', 1)[-1]}:{first + offset}"  # type: ignore[union-attr]


def find_line(file: str, text: str) -> set[str]:
    """Returns `name:line` of every line of a file that holds `text`."""
    with open(file) as source:
        return {f"{file.rsplit('/', 1)[-1]}:{i}" for i, line in enumerate(source, 1) if text in line}


def spot(h: Tensor) -> Tensor:
    """One at the struck sample and token, zero elsewhere."""
    return torch.zeros_like(h).index_put((torch.tensor(SAMPLE), torch.tensor(TOKEN)), torch.ones_like(h[0, 0]))


def loud(h: Tensor, value: float = 200.0) -> Tensor:
    """Large at the struck place."""
    return h + spot(h) * value


def vanishing(h: Tensor) -> Tensor:
    """Positive, but zero at the struck place."""
    return (h.abs() + 1) * (1 - spot(h))


@dataclass(frozen=True)
class Fault:
    """A fault and what must be said of it.

    Args:
        plant (`Callable`):
            What happens to the hidden states.
        op, cause, phase, node:
            What must be named.
        dtype (`torch.dtype`):
            The dtype of the model.
        located (`bool`):
            Whether it belongs to one sample and token.
        line (`Callable`, *optional*):
            The function with the marked line, if it is another.
    """

    plant: Callable[[Tensor], Tensor]
    op: str
    cause: Cause
    phase: str = "forward"
    node: str | None = None
    dtype: torch.dtype = SINGLE
    located: bool = True
    line: Callable | None = None

    @property
    def name(self) -> str:
        return self.plant.__name__


FAULTS: dict[str, Fault] = {}


def fault(op: str, cause: Cause, **more: Any) -> Callable:
    def register(plant: Callable) -> Callable:
        FAULTS[plant.__name__] = Fault(plant, op, cause, **more)
        return plant

    return register


# ---- overflow ----


@fault("aten.mm.default", Cause.FP16_OVERFLOW, dtype=HALF)
def matmul_fp16(h):
    weight = torch.eye(h.shape[-1], dtype=h.dtype) * 400
    return loud(h) @ weight  # culprit


@fault("aten.mul.Tensor", Cause.FP16_OVERFLOW, dtype=HALF)
def gate_fp16(h):
    gate, up = loud(h, 300), loud(h, 300)
    return F.silu(gate) * up  # culprit


@fault("aten.pow.Tensor_Scalar", Cause.FP16_OVERFLOW, dtype=HALF, phase="backward", node="RsqrtBackward0")
def rsqrt_fp16(h):
    # Its derivative is a cube: too large at the struck place. An infinity that ends as a zero elsewhere is healthy.
    x = (h + 1) * (1 - spot(h) * 0.999) + spot(h).roll(1, 0) * 300
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-7)  # culprit
    return h + scale


@fault("aten._to_copy.default", Cause.FP16_OVERFLOW, dtype=HALF)
def cast_fp16(h):
    wide = loud(h.float(), 1e6)
    return wide.to(torch.float16)  # culprit


@fault("aten.cumsum.default", Cause.FP16_OVERFLOW, dtype=HALF)
def cumsum_fp16(h):
    return loud(h, 3e4).cumsum(-1)  # culprit


@fault("aten.scatter_add.default", Cause.FP16_OVERFLOW, dtype=HALF)
def scatter_fp16(h):
    index = torch.zeros_like(h, dtype=torch.long)
    return h.scatter_add(-1, index, loud(h, 3e4))  # culprit


@fault("aten.mul.Tensor", Cause.BF16_OVERFLOW, dtype=BRAIN)
def scale_bf16(h):
    return loud(h.clamp(-1, 1)) * 3e38  # culprit


@fault("aten.pow.Tensor_Scalar", Cause.FP32_OVERFLOW)
def square_fp32(h):
    return loud(h, 1e30) ** 2  # culprit


@fault("aten.cumprod.default", Cause.FP32_OVERFLOW)
def cumprod_fp32(h):
    return loud(h, 1e10).cumprod(-1)  # culprit


@fault("aten.exp.default", Cause.EXP_OVERFLOW)
def exp_fp32(h):
    return h + torch.exp(loud(h))  # culprit


@fault("aten.exp.default", Cause.EXP_OVERFLOW, dtype=HALF)
def exp_fp16(h):
    return h + torch.exp(loud(h, 20))  # culprit


@fault("aten.exp.default", Cause.EXP_OVERFLOW)
def softmax_by_hand(h):
    weights = torch.exp(loud(h))  # culprit
    return h * (weights / weights.sum(-1, keepdim=True))


# ---- zero, in the forward ----


@fault("aten.log.default", Cause.LOG_OF_ZERO)
def log_zero(h):
    return h + torch.log(vanishing(h))  # culprit


@fault("aten.log2.default", Cause.LOG_OF_ZERO)
def entropy_by_hand(h):
    p = vanishing(h)
    return h + p * torch.log2(p)  # culprit


@fault("aten.div.Tensor", Cause.DIV_BY_ZERO)
def masked_mean(h):
    mask = (torch.arange(len(h)) != SAMPLE)[:, None].expand(h.shape[:2]).long()
    pooled = (h * mask[..., None]).sum(1) / mask.sum(1)[:, None]  # culprit
    return h + pooled[:, None]


@fault("aten.div.Tensor", Cause.DIV_BY_ZERO, dtype=HALF)
def masked_mean_fp16(h):
    mask = 1 - spot(h)
    return (h * mask) / mask  # culprit


@fault("aten.mean.default", Cause.DIV_BY_ZERO, located=False)
def empty_mean(h):
    return h + h[h > 1e9].mean()  # culprit


@fault("aten.var.correction", Cause.DIV_BY_ZERO, located=False)
def var_of_one(h):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return h + h[:, :1].var(1, keepdim=True)  # culprit


@fault("aten.reciprocal.default", Cause.DIV_BY_ZERO)
def one_over_zero(h):
    return h + 1 / vanishing(h)  # culprit


@fault("aten.rsqrt.default", Cause.DIV_BY_ZERO)
def rms_norm_without_eps(h):
    h = h * (1 - spot(h))
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))  # culprit


@fault("aten.native_layer_norm.default", Cause.DIV_BY_ZERO)
def layer_norm_without_eps(h):
    return F.layer_norm(h * (1 - spot(h)), h.shape[-1:], eps=0.0)  # culprit


@fault("aten.div.Tensor", Cause.DIV_BY_ZERO)
def normalize_without_eps(h):
    return F.normalize(h * (1 - spot(h)), dim=-1, eps=0.0)  # culprit


@fault("aten._softmax.default", Cause.MASKED_ROW_SOFTMAX)
def masked_row(h):
    scores = h.masked_fill(spot(h) > 0, -INF)
    return h * scores.softmax(-1)  # culprit


@fault("aten._log_softmax.default", Cause.MASKED_ROW_SOFTMAX)
def masked_row_where(h):
    scores = torch.where(spot(h) > 0, torch.tensor(-INF), h)
    return h + scores.log_softmax(-1)  # culprit


@fault("aten._softmax.default", Cause.MASKED_ROW_SOFTMAX, dtype=HALF)
def two_masks(h):
    mask = spot(h) * torch.finfo(h.dtype).min
    return h * (h + mask + mask).softmax(-1)  # culprit


# ---- zero, in the backward ----


@fault("aten.div.Tensor", Cause.SQRT_AT_ZERO, phase="backward", node="SqrtBackward0")
def sqrt_zero(h):
    return h + vanishing(h).sqrt()  # culprit


@fault("aten.pow.Tensor_Scalar", Cause.SQRT_AT_ZERO, phase="backward", node="PowBackward0")
def half_power(h):
    return h + vanishing(h) ** 0.5  # culprit


@fault("aten.div.Tensor", Cause.NORM_AT_ZERO, phase="backward", node="SqrtBackward0")
def norm_by_hand(h):
    x = h * (1 - spot(h))
    return h + (x * x).sum(-1, keepdim=True).sqrt()  # culprit


@fault("aten.div.Tensor", Cause.NORM_AT_ZERO, phase="backward", node="SqrtBackward0")
def distance_by_hand(h):
    x = h * (1 - spot(h))
    distance = torch.sqrt(x.pow(2).mean(-1))  # culprit
    return h + distance[..., None]


@fault("aten.div.Tensor", Cause.SQRT_AT_ZERO, phase="backward", node="SqrtBackward0")
def where_took_all(h):
    root = torch.where(vanishing(h) >= 0, vanishing(h).sqrt(), 0.0)  # culprit
    return h + root * (1 + torch.arange(h.shape[-1])) + (h * 0).clamp(min=0)


# ---- branches that were computed, but not selected ----


@fault("aten.div.Tensor", Cause.WHERE_UNSELECTED_BRANCH, phase="backward", node="SqrtBackward0")
def where_sqrt(h):
    x = vanishing(h)
    root = x.sqrt()  # culprit
    return h + torch.where(x > 0, root, 0.0)


@fault("aten.div.Tensor", Cause.WHERE_UNSELECTED_BRANCH, phase="backward", node="SqrtBackward0")
def where_sqrt_far(h):
    x = vanishing(h)
    root = x.sqrt()  # culprit
    return h + torch.where(x > 0, (root * 3).reshape(x.shape) + 1, 0.0)


@fault("aten.div.Tensor", Cause.WHERE_UNSELECTED_BRANCH, phase="backward", node="SqrtBackward0")
def masked_fill_sqrt(h):
    x = vanishing(h)
    root = x.sqrt()  # culprit
    return h + root.masked_fill(x == 0, 0.0)


@fault("aten.div.Tensor", Cause.WHERE_UNSELECTED_BRANCH, phase="backward", node="SqrtBackward0", located=False)
def index_sqrt(h):
    x = vanishing(h)
    root = x.sqrt()  # culprit
    return h + root[x > 0].mean()


@fault("aten.div.Tensor", Cause.WHERE_UNSELECTED_BRANCH, phase="backward", node="LogBackward0")
def where_log(h):
    x = vanishing(h)
    logarithm = torch.log(x)  # culprit
    return h + torch.where(x > 0, logarithm, 0.0)


@fault("aten.div.Tensor", Cause.WHERE_UNSELECTED_BRANCH, phase="backward", node="DivBackward0")
def where_div(h):
    x = vanishing(h)
    quotient = (h * (1 - spot(h))) / x  # culprit
    return h + torch.where(x > 0, quotient, 0.0)


@fault("aten.exp.default", Cause.WHERE_UNSELECTED_BRANCH)
def where_exp(h):
    x = loud(h)
    power = torch.exp(x)  # culprit
    return h + torch.where(x < 50, power, 0.0)


# ---- what is simply not finite ----

CONSTANT = torch.tensor(NAN)


@fault("aten.mul.Tensor", Cause.UNKNOWN, located=False)
def nan_scalar(h):
    return h * NAN  # culprit


@fault("aten.mul.Tensor", Cause.UNKNOWN, located=False, dtype=HALF)
def nan_constant(h):
    return h * CONSTANT  # culprit


@fault("aten.masked_fill.Scalar", Cause.UNKNOWN)
def nan_filled(h):
    return h.masked_fill(spot(h) > 0, NAN)  # culprit


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1 - spot(gradient))  # culprit


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 1

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, NAN)  # culprit


@fault("aten.div.Tensor", Cause.DIV_BY_ZERO, phase="backward", node="BadBackwardBackward", line=BadBackward.backward)
def custom_function(h):
    return BadBackward.apply(h)


@fault("aten.full_like.default", Cause.UNKNOWN, phase="backward", node="NanBackwardBackward", located=False,
       line=NanBackward.backward)  # fmt: skip
def custom_nan(h):
    return NanBackward.apply(h)


def poison(gradient):
    return gradient.masked_fill(spot(gradient) > 0, NAN)  # culprit


@fault("aten.masked_fill.Scalar", Cause.UNKNOWN, phase="backward", line=poison, node="MulBackward0")
def tensor_hook(h):
    h = h * 1
    h.register_hook(poison)
    return h


# ---- how a case runs ----


@dataclass
class Expected:
    """What must be said; `None` is not compared."""

    op: set[str]
    module: str | None
    source: set[str]
    phase: str
    cause: Cause
    node: str | None = None
    leaf: str | None = None
    place: tuple[int, ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def compare(origin: Origin | None, expected: Expected, batch: int) -> list[str]:
    """Returns what is wrong about an origin; empty if nothing is."""
    if origin is None:
        return ["nothing found"]
    facts: dict[str, tuple[Any, Any]] = {
        "op": (origin.op, expected.op),
        "module": (origin.module, {expected.module}),
        "source": (origin.source, expected.source),
        "phase": (origin.phase, {expected.phase}),
        "cause": (origin.cause, {expected.cause}),
        "node": (origin.node, {expected.node}),
        "leaf": (origin.leaf, {expected.leaf}),
    }
    if expected.phase == "input":  # who read it first is not known beforehand
        facts = {name: fact for name, fact in facts.items() if name in ("phase", "cause", "leaf")}
    wrong = [f"{name}: {got!r} not in {want!r}" for name, (got, want) in facts.items() if got not in want]
    wrong += [f"{k}: {getattr(origin, k)!r} is not {v!r}" for k, v in expected.extra.items() if getattr(origin, k) != v]
    if expected.place is not None and not points_to(origin, expected.place, batch):
        wrong.append(f"positions: {origin.positions} of {origin.shape} do not point to {expected.place}")
    return wrong


def points_to(origin: Origin, place: tuple[int, ...], batch: int) -> bool:
    """Whether every position is at the struck place; samples and tokens may have been flattened into one."""
    if not origin.positions:
        return False
    positions = origin.positions
    if len(origin.shape) == 2:  # the second is a feature, unless it is a loss per token
        positions = tuple(position[:1] for position in positions)
    if origin.shape[0] != batch:
        tokens = origin.shape[0] // batch
        return all(divmod(position[0], tokens) == place[:2] for position in positions)
    return all(position[: len(place)] == place[: len(position)] for position in positions)


def run_planted(architecture: Architecture, name: str, attention: str = "eager") -> list[str]:
    """Plants a fault of the table in the block of an architecture and returns what is wrong about the answer."""
    planted = FAULTS[name]
    model = architecture.build(planted.dtype, attention)
    inputs = architecture.inputs(planted.dtype)

    def strike(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (planted.plant(output[0]), *output[1:])
        return planted.plant(output)

    model.get_submodule(architecture.block).register_forward_hook(strike)
    origin, _ = find_in(model, lambda: model(**inputs).loss, inputs)
    expected = Expected(
        {planted.op}, architecture.block, {culprit_line(planted.line or planted.plant)}, planted.phase, planted.cause,
        planted.node, place=(SAMPLE, TOKEN) if planted.located else None,
    )  # fmt: skip
    return compare(origin, expected, len(next(iter(inputs.values()))))
