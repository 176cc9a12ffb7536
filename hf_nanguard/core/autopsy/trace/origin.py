"""Where a bad number was born: the walk from a poisoned result back to an operator whose inputs were all finite.

The first non-finite value of a pass is not always to blame: masks hold -inf, and a kernel may overflow where nobody looks.
So the walk begins at what is known to be bad, the loss or a gradient, and follows only non-finite inputs: NaN before
inf, the earlier writer before the later. Infinities that are nothing but a mask are not followed.
"""

import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...vocabulary import Cause
from .cause import infer_cause, infer_leaf_cause
from .memory import SHOWN_POSITIONS, find_nonfinite_entries, measure, strided
from .op_record import Leaf, Operand, Record, operand_is_mask
from .trace import Trace

SOFTMAX = ("softmax", "log_softmax", "logsumexp", "scaled_dot_product")


@dataclass(frozen=True)
class Origin:
    """Where a bad number was born. Plain values only; what is not known is `None`.

    Args:
        phase (`str`):
            As in the event's culprit: `"input"`, `"forward"`, `"loss"`, `"backward"`, `"parameter"`, `"optimizer"`.
        kind (`str`):
            `"nan"` or `"inf"`.
        cause (`Cause`):
            Why, where that can be told.
        op, module, source (`str`, *optional*):
            The operator, the module in which it ran (as in `named_modules()`), file and line. In the backward: the
            backward operator, and module and line of the forward operator it belongs to. For a leaf: who read it first.
        text (`str`, *optional*):
            The source line itself.
        node (`str`, *optional*):
            The autograd node, in the backward.
        dtype (`str`, *optional*):
            What the operator wrote.
        largest, limit (`float`, *optional*):
            The largest magnitude among its finite inputs, and the largest finite number of its dtype.
        leaf, parameter (`str`, *optional*):
            The name of a leaf that was not finite itself, and whether it is a parameter (or buffer).
        num_bad (`int`, *optional*):
            How many of its entries were not.
        outside (`bool`):
            Whether the operator read it from somewhere the trace cannot see: a tensor nobody named, or another rank.
        masked (`bool`):
            Whether it read infinities of a mask besides finite values.
        positions (`tuple`), shape (`tuple`):
            The first places of bad values, all but the last dimension, and the shape they are to be read in.
    """

    phase: str
    kind: str
    cause: Cause
    op: str | None = None
    module: str | None = None
    source: str | None = None
    text: str | None = None
    node: str | None = None
    dtype: str | None = None
    largest: float | None = None
    limit: float | None = None
    leaf: str | None = None
    parameter: str | None = None
    num_bad: int | None = None
    outside: bool = False
    masked: bool = False
    positions: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    shape: tuple[int, ...] = field(default=(), compare=False)

    @property
    def signature(self) -> tuple[str | None, ...]:
        """What makes two origins the same fault."""
        return (self.phase, self.op, self.module, self.source, self.leaf)


def find_origin(
    run: Callable[[], Tensor], model: nn.Module, gradients: Callable[[], list[tuple[str, Tensor]]],
    inputs: dict[str, Tensor],
) -> Origin | None:  # fmt: skip
    """Runs a pass under a trace and walks back from its non-finite result; `None` if the result was finite.

    Args:
        run (`Callable`):
            Runs forward and backward and returns the loss.
        model (`nn.Module`):
            The bare model.
        gradients (`Callable`):
            Returns the named gradients afterwards.
        inputs (`dict[str, Tensor]`):
            The inputs by name.
    """
    trace = Trace(model, inputs)
    with trace.recording():
        loss = run()
    start = trace.find_writer(loss)
    if start is None:
        written = [record for _, gradient in gradients() if (record := trace.find_writer(gradient)) is not None]
        start = min(written, key=lambda record: record.index, default=None)
    return None if start is None else describe_origin(*walk_back(start))


def walk_back(record: Record) -> tuple[Record, Operand | None, bool]:
    """Returns the operator at which a bad number was born, the leaf it read if that was bad, and whether a gradient of
    exactly zero met an infinity on the way: the mark of a branch that was computed, but not selected."""
    unselected = False
    while True:
        unselected = unselected or _meets_unselected(record)
        operand = _choose(record)
        if operand is None or operand.writer is None:
            return record, operand, unselected
        record = operand.writer


def _choose(record: Record) -> Operand | None:
    """Returns the non-finite input to follow, `None` if the operator itself is to blame."""
    bad = [operand for operand in record.bad_operands if operand.writer is not None or operand.leaf is not None]
    followed = [operand for operand in bad if not operand_is_mask(operand)]
    if any(name in record.name for name in SOFTMAX) and record.extent.kind == "nan":
        followed = [o for o in followed if o.extent.kind == "nan" or o.extent.high == math.inf]
    # Garbage that a buffer held before it was filled is not followed as long as there is anything else.
    written = [o for o in followed if o.writer is None or not o.writer.uninitialised]
    followed = written or followed
    same = [operand for operand in followed if operand.extent.kind == record.extent.kind]
    return min(same or followed, key=_age, default=None)


def _age(operand: Operand) -> float:
    return math.inf if operand.writer is None else operand.writer.index


def _meets_unselected(record: Record) -> bool:
    """Whether a backward operator made NaN of a zero that `where` had put into a gradient."""
    if record.node is None or record.extent.kind != "nan":
        return False
    if any(operand.extent.kind == "nan" for operand in record.operands):
        return False
    return any(operand.selected and operand.zero for operand in record.operands)


def describe_origin(record: Record, operand: Operand | None, unselected: bool) -> Origin:
    """Turns a record into plain values."""
    place = record.place
    finite = [o.extent.largest for o in record.operands if o.extent.kind == "finite"]
    text = None
    if place.code is not None:
        text = linecache.getline(place.code.co_filename, place.line).strip() or None
    common: dict[str, Any] = {
        "op": record.op,
        "module": place.module,
        "source": place.source,
        "text": text,
        "node": record.node,
        "dtype": str(record.dtype).removeprefix("torch."),
        "largest": max(finite, default=None),
        "limit": torch.finfo(record.dtype).max,
        "kind": record.extent.kind,
        "masked": any(operand_is_mask(o) for o in record.bad_operands),
        "positions": tuple(record.positions),
        "shape": record.shape,
    }
    if operand is not None and operand.leaf is not None:
        return _describe_leaf(operand.leaf, operand, common)
    outside = any(_is_outside(o) for o in record.bad_operands) and not record.name.startswith("lift_fresh")
    cause = infer_cause(record, text or "", unselected)
    return Origin(phase=_phase(record), cause=cause, outside=outside, **common)


def _is_outside(operand: Operand) -> bool:
    """Whether nobody is known to have written the bad values of an operand; -inf alone may well be a mask."""
    return (
        operand.writer is None
        and operand.leaf is None
        and operand.extent.high != -math.inf
        and (operand.extent.kind == "nan" or operand.extent.high == math.inf)
    )


def _phase(record: Record) -> str:
    if record.node is not None:
        return "backward"
    code = record.place.code
    named = "" if code is None else f"{code.co_filename.rsplit('/', 1)[-1]} {code.co_name}"
    return "loss" if not record.place.module and (record.place.module is None or "loss" in named) else "forward"


def _describe_leaf(leaf: Leaf, operand: Operand, common: dict[str, Any]) -> Origin:
    part = strided(leaf.tensor)
    assert part is not None  # it was read from memory
    bad = find_nonfinite_entries(part)
    known = {
        "leaf": leaf.name,
        "num_bad": int(bad.sum()),
        "kind": measure(leaf.tensor).kind,
        "dtype": str(leaf.tensor.dtype).removeprefix("torch."),
    }
    if leaf.kind == "input":
        places = bad.nonzero()[:SHOWN_POSITIONS].tolist()
        known |= {"positions": tuple(map(tuple, places)), "shape": tuple(leaf.tensor.shape)}
        return Origin(phase="input", cause=Cause.INPUT_NONFINITE, **{**common, **known})
    known["parameter"] = leaf.name
    return Origin(phase="parameter", cause=infer_leaf_cause(leaf, bad), **{**common, **known})
