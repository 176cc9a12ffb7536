"""What a trace writes down of an operator that wrote a non-finite value. Plain values; no tensor but the leaves."""

import math
import os
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

_CONSTANTS = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where",
              "index_fill", "index_fill_", "constant_pad_nd", "masked_scatter")  # fmt: skip
# What adds up a mask makes a value of it.
_ADDING = ("sum", "mean", "nansum", "nll_loss_forward", "nll_loss2d_forward", "mm", "bmm", "addmm", "baddbmm", "dot")
_NEGATIONS = ("neg", "neg_", "sub", "sub_", "rsub", "abs", "abs_")


class Extent(NamedTuple):
    """The lowest and highest value of a tensor; both NaN if it holds a NaN."""

    low: float
    high: float

    @property
    def kind(self) -> str:
        """`"nan"`, `"inf"` or `"finite"`."""
        if math.isnan(self.high):
            return "nan"
        return "inf" if math.isinf(self.low) or math.isinf(self.high) else "finite"

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high)) if self.kind != "nan" else math.nan


FINITE = Extent(0.0, 0.0)


@dataclass(frozen=True)
class Leaf:
    """A tensor that was there before the pass.

    Args:
        kind (`str`):
            `"parameter"`, `"buffer"` or `"input"`.
        name (`str`):
            Its name.
        tensor (`Tensor`):
            Itself.
    """

    kind: str
    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Place:
    """Where in the user's program an operator ran: module, code and line."""

    module: str | None = None
    code: CodeType | None = None
    line: int = 0

    @property
    def source(self) -> str | None:
        """File and line, `None` if they are not known."""
        return None if self.code is None else f"{os.path.basename(self.code.co_filename)}:{self.line}"


@dataclass(frozen=True)
class Forward:
    """A forward operator that an autograd node may come back to: what it was, where, and whether it read a sum."""

    op: str
    place: Place
    of_sum: bool = False
    provisional: bool = False


@dataclass(frozen=True)
class Operand:
    """A float input of an operator, judged before it ran.

    Args:
        extent (`Extent`):
            Its extent.
        dtype (`torch.dtype`):
            Its dtype.
        writer (`Record`, *optional*):
            Who wrote the non-finite values in it.
        leaf (`Leaf`, *optional*):
            Which leaf it is, if nobody wrote them.
        shape (`tuple[int, ...]`):
            Its shape.
        zero (`bool`):
            Whether it holds an exact zero, at a bad place of the output where they can be compared; only looked at if
            no operator had written a NaN input.
        selected (`bool`):
            Whether it is a gradient in which `where` or the like has put zeros.
    """

    extent: Extent
    dtype: torch.dtype
    writer: "Record | None" = None
    leaf: Leaf | None = None
    shape: tuple[int, ...] = ()
    zero: bool = False
    selected: bool = False


@dataclass
class Record:
    """One operator that wrote a non-finite value.

    Args:
        index (`int`):
            When: its number among all operators of the pass.
        op (`str`):
            Its name, `aten.exp.default`.
        extent (`Extent`), dtype (`torch.dtype`), shape (`tuple`):
            Of what it wrote.
        place (`Place`):
            Where it ran; for the backward, where the forward operator ran that it belongs to.
        node (`str`, *optional*):
            The autograd node, in the backward.
        forward (`Forward`, *optional*):
            The forward operator of that node.
        operands (`list[Operand]`):
            Its float inputs.
        scalars (`list[float]`):
            Numbers among its arguments.
        positions (`list`):
            The first places of non-finite values, as [`find_positions`] gives them, if no operator had written a NaN input.
        zero_args (`set[int]`):
            Which arguments are zero, at a bad place of the output where they can be compared; as in [`Operand`].
        is_pointwise (`bool`):
            Whether each element of its output depends on one element of each input: such an operator makes no NaN by
            overflow.
        in_python (`bool`):
            Whether Python code of the user ran it inside the backward: a custom function, a hook.
        uninitialised (`bool`):
            Whether it is memory from `empty` that nobody has written yet.
        all_ignored (`bool`):
            For a loss over classes: whether it ignored every target.
        is_mask (`bool`):
            Whether its infinities are constants of the program, or come from nothing but such: a mask.
        device (`str`):
            The type of device of what it wrote.
    """

    index: int
    op: str
    extent: Extent
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Place
    node: str | None = None
    forward: Forward | None = None
    operands: list[Operand] = field(default_factory=list)
    scalars: list[float] = field(default_factory=list)
    positions: list[tuple[int, ...]] = field(default_factory=list)
    zero_args: set[int] = field(default_factory=set)
    is_pointwise: bool = False
    in_python: bool = False
    uninitialised: bool = False
    all_ignored: bool = False
    is_mask: bool = False
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The operator without namespace and overload: `exp`."""
        return self.op.split(".")[1] if "." in self.op else self.op

    @property
    def numel(self) -> int:
        """How many elements it wrote."""
        return math.prod(self.shape)

    @property
    def has_zero(self) -> bool:
        """Whether an input was zero where the output is bad."""
        return 0.0 in self.scalars or any(operand.zero for operand in self.operands)

    @property
    def bad_operands(self) -> list[Operand]:
        """The inputs that were not finite."""
        return [operand for operand in self.operands if operand.extent.kind != "finite"]


def record_is_mask(record: Record) -> bool:
    """Returns whether the infinities of a record are constants of the program, or come from nothing but such."""
    if record.extent.kind != "inf":
        return False
    if not record.bad_operands:
        if record.name.startswith("lift_fresh"):
            return True
        constant = record.name in _CONSTANTS or record.extent.high != math.inf
        return constant and any(map(math.isinf, record.scalars))
    return all(operand_is_mask(operand) for operand in record.bad_operands) and _keeps_masks(record)


def _keeps_masks(record: Record) -> bool:
    """Whether an operator passes infinities of its inputs on, rather than making new ones."""
    if record.name in _ADDING:
        return False
    finite = [o.extent for o in record.operands if o.extent.kind == "finite"]
    flips = record.name in _NEGATIONS or any(e.low < 0 for e in finite) or any(s < 0 for s in record.scalars)
    if record.extent.high == math.inf and not flips and all(o.extent.high != math.inf for o in record.bad_operands):
        return False
    return all(extent.largest <= torch.finfo(record.dtype).max / 2 for extent in finite)


def operand_is_mask(operand: Operand) -> bool:
    """Returns whether the infinities of an operand are a mask: a constant, or an additive mask given as such."""
    if operand.extent.kind != "inf":
        return False
    if operand.writer is not None:
        return operand.writer.is_mask
    leaf = operand.leaf
    return leaf is not None and operand.extent.high != math.inf and (leaf.kind == "buffer" or "mask" in leaf.name)
