"""What a trace records of an operator that wrote a non-finite value. Plain values; the only tensors are the leaves."""

import math
import os
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

_CONSTANTS = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor", "where",
              "index_fill", "index_fill_", "constant_pad_nd", "masked_scatter")  # fmt: skip
# Operators that add up their inputs: an infinity in the result is not a mask any more.
_ADDING = ("sum", "mean", "nansum", "nll_loss_forward", "nll_loss2d_forward", "mm", "bmm", "addmm", "baddbmm", "dot")
SOFTMAX = ("softmax", "logsumexp", "scaled_dot_product", "attention")
_NEGATIONS = ("neg", "neg_", "sub", "sub_", "rsub", "abs", "abs_")


class Extent(NamedTuple):
    """The lowest and highest value of a tensor; both NaN if it contains NaN."""

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
        return max(abs(self.low), abs(self.high)) if self.kind != "nan" else math.nan


FINITE = Extent(0.0, 0.0)


@dataclass(frozen=True)
class Leaf:
    """A tensor that existed before the pass."""

    kind: str  # "parameter", "buffer" or "input"
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
    """The forward operator of an autograd node: what it was, where it ran, and whether it read a sum."""

    op: str
    place: Place
    of_sum: bool = False
    provisional: bool = False


@dataclass(frozen=True)
class Operand:
    """A float input of an operator, as it was before the operator ran."""

    extent: Extent
    writer: "Record | None" = None  # the operator that wrote the non-finite values in it
    leaf: Leaf | None = None  # which leaf it is, if no operator wrote them
    # whether it is 0 at a non-finite place of the output, or anywhere if it cannot be broadcast to the output;
    # determined only if no operator had written a NaN input
    zero: bool = False
    # whether it is a gradient into which the backward of a selection such as `where` has put zeros
    selected: bool = False

    @property
    def is_mask(self) -> bool:
        """Whether its infinities are a mask: a constant of the program, or an additive mask given as buffer or input."""
        if self.extent.kind != "inf":
            return False
        if self.writer is not None:
            return self.writer.is_mask
        leaf = self.leaf
        return leaf is not None and self.extent.high != math.inf and (leaf.kind == "buffer" or "mask" in leaf.name)

    @property
    def is_masked_score(self) -> bool:
        """Whether its infinities are log-probabilities of masked scores."""
        return self.writer is not None and self.writer.is_masked_score


@dataclass
class Record:
    """One operator that wrote a non-finite value."""

    index: int  # its number among all operators of the pass
    op: str  # its name, e.g. `aten.exp.default`
    extent: Extent  # of its output, as are dtype, shape and device
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: Place  # where it ran; in the backward, where its forward operator ran
    node: str | None = None  # the autograd node, in the backward
    forward: Forward | None = None  # the forward operator of that node
    operands: list[Operand] = field(default_factory=list)  # its float inputs
    scalars: list[float] = field(default_factory=list)  # numbers among its arguments
    # the first places of non-finite values (`first_places`), if no operator had written a NaN input
    positions: list[tuple[int, ...]] = field(default_factory=list)
    zero_args: set[int] = field(default_factory=set)  # which arguments are 0, as `zero` in `Operand`
    # each output element depends on one element of each input: an overflow in such an operator is never NaN
    is_pointwise: bool = False
    in_python: bool = False  # whether Python code of the user ran it inside the backward: a custom function, a hook
    uninitialised: bool = False  # whether it is memory from `empty` that no operator has written yet
    all_ignored: bool = False  # for a loss over classes: whether it ignored every target
    device: str = "cpu"
    # whether its infinities are constants of the program, or passed on from such constants. It is derived at once,
    # because a chain of writers may be too long for recursion.
    is_mask: bool = field(init=False)
    # whether these constants are log-probabilities: a softmax over masked scores wrote or passed them on
    is_masked_score: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_mask = self._has_mask()
        self.is_masked_score = self.is_mask and (self.is_softmax or any(o.is_masked_score for o in self.operands))

    @property
    def is_softmax(self) -> bool:
        """Whether it is a softmax or contains one."""
        return any(part in self.name for part in SOFTMAX)

    @property
    def name(self) -> str:
        """The operator without namespace and overload: `exp`."""
        return self.op.split(".")[1] if "." in self.op else self.op

    @property
    def has_zero(self) -> bool:
        """Whether an input was 0 where the output is not finite."""
        return 0.0 in self.scalars or any(operand.zero for operand in self.operands)

    @property
    def bad_operands(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.extent.kind != "finite"]

    def _has_mask(self) -> bool:
        if self.extent.kind != "inf":
            return False
        if self.name.startswith("lift_fresh"):  # a constant that the program made from a Python number
            return True
        if not self.bad_operands:
            constant = self.name in _CONSTANTS or self.extent.high != math.inf
            return constant and any(map(math.isinf, self.scalars))
        return all(operand.is_mask for operand in self.bad_operands) and self._passes_on()

    def _passes_on(self) -> bool:
        """Whether the infinities in its output are those of its inputs, rather than new ones."""
        if self.name in _ADDING:
            return False
        finite = [o.extent for o in self.operands if o.extent.kind == "finite"]
        flips = self.name in _NEGATIONS or any(e.low < 0 for e in finite) or any(s < 0 for s in self.scalars)
        if self.extent.high == math.inf and not flips and all(o.extent.high != math.inf for o in self.bad_operands):
            return False
        return all(extent.largest <= torch.finfo(self.dtype).max / 2 for extent in finite)
