"""What will go wrong is often known before the first step: rows that nobody initialised, an eps that rounds to zero.

NaN in weights and optimizer state is found by `WeightMonitor.check_start`. Here is what is finite and bad anyway, which is
reported and changes nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..event import Culprit, Event, JsonValue, Remedy
from ..finite import dtype_name, find_rows, local, read_host
from ..state_tensors import is_plain
from ..vocabulary import Action, Cause, Signal

HUGE = 1e6  # multiple of the usual largest entry of a row, and least magnitude, of rows of arbitrary memory
SAFE_EPS = 1e-4
WIDE = (torch.float32, torch.bfloat16, torch.float64)  # of float16 the smallest normal number is a usual weight


def find_bad_start(model: nn.Module, optimizer: Optimizer | None, step: int) -> Iterator[Event]:
    """Yields events about a state that is finite and cannot train well, with one host read."""
    yield from _find_garbage(model, step)
    if optimizer is not None:
        yield from _find_zero_eps(optimizer, step)


@torch.no_grad()
def _find_garbage(model: nn.Module, step: int) -> Iterator[Event]:
    """Rows of embeddings that look like memory that was never written: denormal as a whole, or huge beside the others."""
    # Not as attributes: to read a parametrized weight computes it, and may write buffers (`spectral_norm`).
    weights = {
        name: dict(module.named_parameters(recurse=False)).get("weight")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    tables = {
        name: local(weight)
        for name, weight in weights.items()
        if weight is not None and not weight.is_meta and is_plain(local(weight))
        if weight.dtype in WIDE and weight.numel()
    }
    masks = {name: _mark_garbage(table) for name, table in tables.items()}
    counts = read_host([mask.sum() for mask in masks.values()])
    for (name, mask), count in zip(masks.items(), counts, strict=True):
        if count:
            rows, parameter = find_rows(mask), f"{name}.weight"
            shown = ", ".join(map(str, rows))
            message = (
                f"Before step {step}, {int(count)} of {len(mask)} rows of {parameter} look uninitialised (row {shown}): all "
                "entries are denormal, or far beyond those of the other rows. Initialise them."
            )
            values: dict[str, JsonValue] = {"num_bad": int(count), "num_entries": len(mask), "rows": list(rows)}
            culprit, cause = Culprit(phase="parameter", parameter=parameter), Cause.UNINITIALISED_WEIGHT
            yield Event(
                step, Signal.PARAM_NONFINITE, Action.OBSERVED, message, values=values, culprit=culprit, cause=cause
            )


def _mark_garbage(table: Tensor) -> Tensor:
    largest = table.abs().amax(1)
    usual = largest.median()
    is_denormal = (largest > 0) & (largest < torch.finfo(table.dtype).tiny)
    return is_denormal | ((largest > HUGE) & (largest / HUGE > usual))


def _find_zero_eps(optimizer: Optimizer, step: int) -> Iterator[Event]:
    """An eps that is 0 in the dtype of the weights; fused kernels, and optimizers that are not torch's, compute in float32."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        eps, dtypes = group.get("eps"), {parameter.dtype for parameter in group["params"]}
        if not isinstance(eps, float) or not eps or group.get("fused"):
            continue
        for dtype in dtypes:
            if dtype.is_floating_point and not torch.tensor(eps, dtype=dtype):
                yield _describe_eps(type(optimizer).__name__, eps, dtype_name(dtype), step)
                return


def _describe_eps(name: str, eps: float, dtype: str, step: int) -> Event:
    message = (
        f"Before step {step}, eps {eps:g} of {name} is 0 in {dtype}, the dtype of weights and moments: an entry whose second moment is "
        f"0 is divided by 0. Set eps to {SAFE_EPS:g}, use the fused optimizer, or keep the weights in float32."
    )
    remedies = (
        Remedy("larger_eps", False, note=f"eps {SAFE_EPS:g}"),
        Remedy("fused", False),
        Remedy("float32_state", False),
    )
    culprit, values = Culprit(phase="optimizer"), {"eps": eps}
    cause = Cause.ADAM_EPS_UNDERFLOW
    return Event(
        step,
        Signal.OPTIMIZER_NONFINITE,
        Action.OBSERVED,
        message,
        values=values,
        culprit=culprit,
        cause=cause,
        remedies=remedies,
    )
