"""Finds where a non-finite value came from: walks from the result back to an operator whose inputs were all finite.

The first non-finite value of a pass is not always the cause: masks contain -inf, and a kernel may overflow in values that
are never used. So the walk begins at the non-finite loss or gradient and follows only non-finite inputs: NaN before inf,
the earlier writer before the later. Infinities that are only a mask are not followed.
"""

import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ...finite import dtype_name
from ...vocabulary import Cause
from .cause import infer_cause, infer_leaf_cause
from .memory import SHOWN_POSITIONS, find_nonfinite_entries, measure, strided
from .op_record import Leaf, Operand, Record
from .trace import Trace


@dataclass(frozen=True)
class Origin:
    """Where a non-finite value came from. Plain values only; what is not known is `None`.

    In the backward, `op` is the backward operator, `module` and `source` are those of its forward operator. For a leaf (an
    input, parameter or buffer that was not finite itself) they are those of the operator that read it first.
    """

    phase: str  # as in the event's culprit
    kind: str  # "nan" or "inf"
    cause: Cause
    op: str | None = None
    module: str | None = None  # as in `named_modules()`
    source: str | None = None  # file and line
    text: str | None = None  # the source line itself
    node: str | None = None  # the autograd node, in the backward
    dtype: str | None = None  # of the output of the operator, or of the leaf
    largest: float | None = None  # the largest magnitude among its finite inputs
    limit: float | None = None  # the largest finite number of its dtype
    leaf: str | None = None  # the name of the leaf
    parameter: str | None = None  # the same, if it is not an input
    num_bad: int | None = None  # entries of the leaf that were not finite
    outside: bool = False  # whether it was read from a tensor that the trace does not know
    masked: bool = False  # whether the operator read infinities of a mask besides finite values
    # the first places of non-finite values, without the last dimension
    positions: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    shape: tuple[int, ...] = field(default=(), compare=False)  # the shape that the positions refer to

    @property
    def signature(self) -> tuple[str | None, ...]:
        """What two origins of the same fault have in common."""
        return (self.phase, self.op, self.module, self.source, self.leaf)


def find_origin(
    run: Callable[[], Tensor], model: nn.Module, gradients: Callable[[], list[tuple[str, Tensor]]],
    inputs: dict[str, Tensor],
) -> Origin | None:  # fmt: skip
    """Runs a pass under a trace and walks back from its non-finite result; `None` if the result was finite.

    `run` runs forward and backward and returns the loss; `gradients` returns the named gradients afterwards. The model must be
    unwrapped.
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
    """Returns the operator at which a non-finite value first appeared, the leaf it read if that was not finite, and whether a
    gradient of exactly 0 met an infinity on the way: the sign of a branch that was computed, but not selected."""
    unselected = False
    while True:
        unselected = unselected or _meets_unselected(record)
        operand = _choose(record)
        if operand is None or operand.writer is None:
            return record, operand, unselected
        record = operand.writer


def _choose(record: Record) -> Operand | None:
    """Returns the non-finite input to follow, `None` if the operator itself is the origin."""
    bad = [operand for operand in record.bad_operands if operand.writer is not None or operand.leaf is not None]
    followed = [operand for operand in bad if not operand.is_mask]
    if record.is_softmax and record.extent.kind == "nan":
        followed = [o for o in followed if o.extent.kind == "nan" or o.extent.high == math.inf]
    # What memory held before it was written is followed only if there is nothing else.
    written = [o for o in followed if o.writer is None or not o.writer.uninitialised]
    followed = written or followed
    same = [operand for operand in followed if operand.extent.kind == record.extent.kind]
    return min(same or followed, key=lambda o: math.inf if o.writer is None else o.writer.index, default=None)


def _meets_unselected(record: Record) -> bool:
    """Whether a backward operator turned a 0 that `where` had put into a gradient into NaN."""
    kinds = [operand.extent.kind for operand in record.operands]
    makes_nan = record.node is not None and record.extent.kind == "nan" and "nan" not in kinds
    return makes_nan and any(operand.selected and operand.zero for operand in record.operands)


def describe_origin(record: Record, operand: Operand | None, unselected: bool) -> Origin:
    """Returns the origin that a walk has reached, as plain values."""
    place = record.place
    text = None if place.code is None else linecache.getline(place.code.co_filename, place.line).strip() or None
    origin = Origin(
        phase=_phase(record),
        kind=record.extent.kind,
        cause=infer_cause(record, text or "", unselected),
        op=record.op,
        module=place.module,
        source=place.source,
        text=text,
        node=record.node,
        dtype=dtype_name(record.dtype),
        largest=max((o.extent.largest for o in record.operands if o.extent.kind == "finite"), default=None),
        limit=torch.finfo(record.dtype).max,
        outside=any(map(_is_outside, record.bad_operands)) and not record.name.startswith("lift_fresh"),
        masked=any(o.is_mask for o in record.bad_operands),
        positions=tuple(record.positions),
        shape=record.shape,
    )
    return origin if operand is None or operand.leaf is None else _blame_leaf(origin, operand.leaf)


def _is_outside(operand: Operand) -> bool:
    """Whether no known operator wrote the non-finite values of an operand; -inf alone may be a mask."""
    is_mask = operand.extent.kind == "inf" and operand.extent.high != math.inf
    return operand.writer is None and operand.leaf is None and not is_mask


def _phase(record: Record) -> str:
    if record.node is not None:
        return "backward"
    code = record.place.code
    named = "" if code is None else f"{code.co_filename.rsplit('/', 1)[-1]} {code.co_name}"
    named += f" {record.op}"  # older models call e.g. `ctc_loss` in their forward
    return "loss" if not record.place.module and (record.place.module is None or "loss" in named) else "forward"


def _blame_leaf(reader: Origin, leaf: Leaf) -> Origin:
    """Returns the origin for a leaf, given the one that describes its first reader."""
    part = strided(leaf.tensor)
    assert part is not None  # it was read from memory
    bad = find_nonfinite_entries(part)
    origin = replace(
        reader,
        kind=measure(leaf.tensor).kind,
        leaf=leaf.name,
        num_bad=int(bad.sum()),
        dtype=dtype_name(leaf.tensor.dtype),
        outside=False,
    )
    if leaf.kind == "input":
        positions = tuple(map(tuple, bad.nonzero()[:SHOWN_POSITIONS].tolist()))
        shape = tuple(leaf.tensor.shape)
        return replace(origin, phase="input", cause=Cause.INPUT_NONFINITE, positions=positions, shape=shape)
    return replace(origin, phase="parameter", cause=infer_leaf_cause(bad), parameter=leaf.name)
