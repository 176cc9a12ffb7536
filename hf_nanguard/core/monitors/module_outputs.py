"""Measures the outputs of modules in one training step, on the device.

An output takes three reductions: `aminmax` for the largest magnitude (exact in every dtype; keeps NaN, inf and the sign of
an inf), a 2-norm in float32 for the RMS, and a count of non-zeros (a 0-norm in float32 stops counting at 2**24 on the CPU).
The share of values near the limit of the dtype takes two more operations and is measured only on request.

Only training forwards count: not evaluation, generation or reference models, nor the recomputation of gradient checkpointing
if the first forward was measured. A head whose weight the loss uses without calling the module, as TRL's losses do, is applied to a
few of its inputs after the backward pass. If a module returns several tensors, the first one is measured: the others may be masks.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...boundary import Boundary, RankError
from ..finite import dtype_name, is_sharded, local
from ..rerun.nested_inputs import find_tensors
from ..torch_private import is_in_backward
from ..vocabulary import Cause
from .base import Hook

NEAR_BITS = 4  # near the limit: within a factor of 16
CAUSES = {
    torch.float16: Cause.FP16_OVERFLOW,
    torch.bfloat16: Cause.BF16_OVERFLOW,
    torch.float32: None,
    torch.float64: None,
}
DTYPES = {torch.finfo(dtype).max: dtype for dtype in CAUSES}
NUM_STATES = 256  # inputs of a head that is not called
COLUMNS = 7  # minus lowest, highest, whether NaN, RMS, share of zeros, share near the limit, minus the dtype's limit


def find_tensor(output: object) -> Tensor | None:
    """Returns the first float tensor with at least one dimension in the output of a module, `None` without any."""
    return next((part for tensor in find_tensors(output) if _has_kernels(part := local(tensor))), None)


def _has_kernels(part: Tensor) -> bool:
    dense = part.layout is torch.strided and not part.is_nested and not part.is_meta
    return bool(dense and part.dtype in CAUSES and part.ndim and part.numel())


@dataclass(frozen=True)
class Activation:
    """The outputs of one module in one step: the maximum over its forwards and all ranks."""

    lowest: float
    highest: float
    has_nan: bool
    rms: float
    zeros: float  # share of exact zeros
    near_limit: float | None  # share within a factor of 16 of the dtype's limit, `None` if it was not measured
    limit: float  # the largest number of the dtype

    @property
    def largest(self) -> float:
        return math.nan if self.has_nan else max(-self.lowest, self.highest)

    @property
    def is_masked(self) -> bool:
        """Whether the only extreme value is -inf or the lowest number of the dtype, as masks are written."""
        return not self.has_nan and self.lowest <= -self.limit and self.highest < self.limit

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.largest)

    @property
    def dtype(self) -> str:
        """The name of the output's dtype."""
        return dtype_name(DTYPES[self.limit])

    @property
    def overflow_cause(self) -> Cause | None:
        """The cause of an event about an overflow of that dtype."""
        return CAUSES[DTYPES[self.limit]]


@dataclass(frozen=True)
class Head:
    """A head that the loss may use without calling it, and the module whose output it gets."""

    name: str
    module: nn.Module
    backbone: nn.Module


@dataclass(frozen=True)
class OutputMeasure:
    """Measurements of one output, on its device."""

    module: str
    numel: int
    dtype: torch.dtype
    lowest: Tensor
    highest: Tensor
    norm: Tensor
    nonzeros: Tensor
    near: Tensor | None


class OutputProbe:
    """Hooks that measure the outputs of modules in one step, while the model is in training mode, until `hooks` is closed.

    For the modules in `near` the share near the limit of the dtype is measured, too.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        near: Collection[str],
        boundary: Boundary,
        hooks: ExitStack,
        head: Head | None = None,
    ):
        self.model = model
        self.near = near
        self.measures: list[OutputMeasure] = []
        self.order: dict[str, None] = {}  # modules in the order of their first forward
        self.failures: dict[str, Exception] = {}  # modules whose outputs cannot be measured
        self._in_forward: set[str] = set()
        safe = partial(boundary.wrapped, "activation hooks")
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(Hook(safe(partial(self._measure, name)))))
        self.head = head if head is not None and head.name in modules else None
        self._states: Tensor | None = None  # the first inputs of the head
        if self.head is not None:
            hooks.enter_context(self.head.backbone.register_forward_hook(Hook(safe(self._keep_states))))

    def measure_head(self) -> bool:
        """Measures the head if it was not called in training, after the backward pass; returns whether it could be."""
        head, states, self._states = self.head, self._states, None
        if head is None or states is None or any(measured.module == head.name for measured in self.measures):
            return True
        logits = apply_head(head.module, states.flatten(0, -2)[:NUM_STATES])
        if logits is not None:
            self.order[head.name] = None
            self.measures.append(measure(head.name, logits, head.name in self.near))
        return logits is not None

    def _keep_states(self, module: nn.Module, args: object, output: object) -> None:
        is_forward = self.model.training and torch.is_grad_enabled() and not is_in_backward()
        if torch.compiler.is_compiling() or not is_forward or self._states is not None:
            return
        self._states = find_tensor(output)

    def _measure(self, name: str, module: nn.Module, args: object, output: object) -> None:
        if torch.compiler.is_compiling() or not self.model.training:
            return
        self.order[name] = None
        if not torch.is_grad_enabled():
            return  # generation, a reference model, or a checkpointed block that will run again with gradients
        if not is_in_backward():
            self._in_forward.add(name)
        elif name in self._in_forward:
            return
        tensor = find_tensor(output)
        if tensor is None or name in self.failures:
            return
        try:
            self.measures.append(measure(name, tensor, name in self.near))
        except Exception as error:  # tensor subclasses may raise anything, and the forward must continue
            self.failures[name] = error


def has_whole_weights(head: nn.Module) -> bool:
    """Returns whether this rank has the weights of a module, which are not sharded."""
    return not any(is_sharded(weight) or not weight.numel() for weight in head.parameters())


@torch.no_grad()
def apply_head(head: nn.Module, states: Tensor) -> Tensor | None:
    """Returns the logits of a head, `None` if its weights are sharded or take something else than these states."""
    home = next((weight for weight in head.parameters() if weight.is_floating_point()), states)
    if not has_whole_weights(head) or home.shape[-1] != states.shape[-1]:
        return None
    with ExitStack() as stack, torch.autocast(states.device.type, enabled=False):
        for module in head.modules():  # dropout of an adapter would draw random numbers
            stack.enter_context(patch.object(module, "training", False))
        return head(states.to(home))


@torch.no_grad()
def measure(module: str, tensor: Tensor, near: bool) -> OutputMeasure:
    """Measures one output of a module; with `near`, also the share near the dtype's limit."""
    lowest, highest = torch.aminmax(tensor)
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32  # a 2-norm of float16 overflows
    norm = torch.linalg.vector_norm(tensor, 2, dtype=wide)
    edge = torch.finfo(tensor.dtype).max * 2.0**-NEAR_BITS
    large = torch.count_nonzero(nn.functional.hardshrink(tensor, edge)) if near else None
    return OutputMeasure(
        module, tensor.numel(), tensor.dtype, lowest, highest, norm, torch.count_nonzero(tensor), large
    )  # fmt: skip


@torch.no_grad()
def tabulate(
    measures: Sequence[OutputMeasure], modules: Iterable[str], device: torch.device, has_failed: bool = False
) -> Tensor:
    """Returns one row of `COLUMNS` per module, on the device: the maximum of its measures, -inf without any; and a last row,
    which says whether this rank has failed."""
    wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    rows = {module: row for row, module in enumerate(modules)}
    table = torch.full((len(rows) + 1, COLUMNS), -math.inf, dtype=wide, device=device)
    if has_failed:
        table[-1] = 1.0
    groups: dict[tuple[torch.dtype, torch.device], list[OutputMeasure]] = {}
    for measured in measures:
        groups.setdefault((measured.dtype, measured.lowest.device), []).append(measured)
    for (dtype, _), group in groups.items():
        lowest, highest, norms, nonzeros = (
            torch.stack(column).to(device, wide)
            for column in zip(*((m.lowest, m.highest, m.norm, m.nonzeros) for m in group), strict=True)
        )
        sizes = torch.tensor([measured.numel for measured in group], dtype=wide, device=device)
        near = torch.full_like(sizes, -1.0)
        counts = {place: measured.near for place, measured in enumerate(group) if measured.near is not None}
        if counts:
            places = torch.tensor(list(counts), device=device)
            near[places] = torch.stack(list(counts.values())).to(device, wide) / sizes[places]
        limits = torch.full_like(sizes, -torch.finfo(dtype).max)
        has_nan = torch.isnan(highest).to(wide)
        columns = (-lowest, highest, has_nan, norms / sizes.sqrt(), 1 - nonzeros / sizes, near, limits)
        # A reduction over ranks may lose a NaN, so it is sent as a flag.
        values = torch.stack(columns, 1).nan_to_num(math.inf, math.inf, -math.inf)
        where = torch.tensor([rows[measured.module] for measured in group], device=device)
        table.scatter_reduce_(0, where[:, None].expand_as(values), values, "amax")
    return table


def read_table(table: Tensor, modules: Iterable[str]) -> dict[str, Activation]:
    """Returns the rows of a table by module, those without a measure left out; a `RankError` if a rank has failed. One host
    read."""
    *rows, last = table.tolist()
    if last[0] > 0:
        raise RankError("another rank has failed")
    return {
        module: Activation(-low, high, nan > 0, rms, zeros, None if near < 0 else near, -limit)
        for module, (low, high, nan, rms, zeros, near, limit) in zip(modules, rows, strict=True)
        if high > -math.inf
    }
