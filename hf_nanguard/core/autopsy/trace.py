"""A trace of one forward and backward pass: every write of a non-finite value, and what the operator had read.

Each operator's outputs are judged by their exact extent (one `aminmax`); only when one is not finite are its inputs
judged too, so a record knows for certain which of them were finite. Values are followed by storage, views write nothing,
and memory from `empty` is not judged until somebody has written it. No tensor is kept alive. Costs one reduction and one
host read per operator, so it belongs in a replay, never in a training step.
"""

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ..finite import local

SHOWN_POSITIONS = 64
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep
# In-place operators that do not read what they overwrite.
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
_CONSTANTS = ("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor",
              "lift_fresh", "lift_fresh_copy", "where", "index_fill", "index_fill_", "constant_pad_nd",
              "masked_scatter", "zeros", "zeros_like")  # fmt: skip


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


@torch.no_grad()
def measure(tensor: Tensor) -> Extent:
    """Returns the exact extent of a tensor; integers and empty tensors are finite."""
    part = tensor._values() if tensor.is_sparse else local(tensor)
    if not (part.is_floating_point() or part.is_complex()) or part.numel() == 0 or part.device.type == "meta":
        return FINITE
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    elif part.element_size() == 1:
        part = part.float()
    low, high = torch.aminmax(part.detach())
    return Extent(low.item(), high.item())


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
    """A forward operator that an autograd node may come back to: what it was, where, and what made its inputs."""

    op: str
    place: Place
    made_by: tuple[str, ...] = ()


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
        node (`str`, *optional*):
            The autograd node that had written it, for a gradient.
        shape (`tuple[int, ...]`):
            Its shape.
    """

    extent: Extent
    dtype: torch.dtype
    writer: "Record | None" = None
    leaf: Leaf | None = None
    node: str | None = None
    shape: tuple[int, ...] = ()


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
            The first places of non-finite values, all but the last dimension, if no input was NaN.
        has_zero (`bool`):
            Whether an input holds an exact zero; only looked at if none is NaN.
        uninitialised (`bool`):
            Whether it is memory from `empty` that nobody has written yet.
        all_ignored (`bool`):
            For a loss over classes: whether it ignored every target.
        is_mask (`bool`):
            Whether its infinities are constants of the program, or come from nothing but such: a mask.
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
    has_zero: bool = False
    uninitialised: bool = False
    all_ignored: bool = False
    is_mask: bool = False

    @property
    def name(self) -> str:
        """The operator without namespace and overload: `exp`."""
        return self.op.split(".")[1] if "." in self.op else self.op

    @property
    def bad_operands(self) -> list[Operand]:
        """The inputs that were not finite."""
        return [operand for operand in self.operands if operand.extent.kind != "finite"]


def _is_mask(record: Record) -> bool:
    """Returns whether the infinities of a record are constants of the program, or come from nothing but such."""
    if record.extent.kind != "inf":
        return False
    if not record.bad_operands:
        return record.name in _CONSTANTS and (
            record.name.startswith("lift_fresh") or any(map(math.isinf, record.scalars))
        )
    return all(operand_is_mask(operand) for operand in record.bad_operands) and _keeps_masks(record)


def _keeps_masks(record: Record) -> bool:
    """Whether an operator passes infinities of its inputs on, rather than making new ones."""
    finite = [o.extent.largest for o in record.operands if o.extent.kind == "finite"]
    return all(value <= torch.finfo(record.dtype).max / 2 for value in finite)


def operand_is_mask(operand: Operand) -> bool:
    """Returns whether the infinities of an operand are a mask: a constant, or an additive mask given as such."""
    if operand.extent.kind != "inf":
        return False
    if operand.writer is not None:
        return operand.writer.is_mask
    leaf = operand.leaf
    return leaf is not None and operand.extent.high != math.inf and (leaf.kind == "buffer" or "mask" in leaf.name)


class _Signature(NamedTuple):
    name: str
    op: str
    is_empty: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    reads_written: bool


@cache
def _signature(func: Any) -> _Signature:
    """What can be known of an operator from its schema."""
    schema = func._schema
    op = str(func)
    name = op.split(".")[1]
    written = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    reads = not (name in _OVERWRITES or any(argument.is_out for argument in schema.arguments))
    is_empty = name.startswith(("empty", "new_empty", "_empty"))
    return _Signature(name, op, is_empty, tuple(i for i, _ in written), tuple(n for _, n in written), reads)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _key(tensor: Tensor) -> tuple[int, Any]:
    part = tensor._values() if tensor.is_sparse else local(tensor)
    storage = part.untyped_storage()
    return storage._cdata, storage


class _Write(NamedTuple):
    record: Record
    start: int
    end: int
    storage: StorageWeakRef  # holds the address, not the memory


def _span(tensor: Tensor) -> tuple[int, int]:
    part = tensor._values() if tensor.is_sparse else local(tensor)
    size = part.element_size()
    start = part.storage_offset() * size
    reach = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True)) if part.numel() else 0
    return start, start + (reach + 1) * size


def _covers(tensor: Tensor) -> bool:
    part = tensor._values() if tensor.is_sparse else local(tensor)
    return part.numel() * part.element_size() >= part.untyped_storage().nbytes()


@cache
def _role(code: CodeType) -> str:
    if code.co_name == "_engine_run_backward":
        return "engine"
    file = code.co_filename
    return "torch" if file.startswith((_TORCH, _OWN)) or file.endswith("contextlib.py") else "user"


def _find_line() -> tuple[CodeType | None, int]:
    """Returns the line of the user's program that is running; none if the autograd engine itself is."""
    frame = sys._getframe(2)
    while frame is not None:
        role = _role(frame.f_code)
        if role == "user":
            return frame.f_code, frame.f_lineno
        if role == "engine":
            return None, 0
        frame = frame.f_back  # type: ignore[assignment]
    return None, 0


class Trace(TorchDispatchMode):
    """Records what writes non-finite values while it is active.

    Args:
        model (`nn.Module`):
            The bare model, for the names of its modules, parameters and buffers.
        inputs (`dict[str, Tensor]`, *optional*):
            The inputs of the pass by name.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor] | None = None):
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.leaves: dict[int, list[Leaf]] = {}
        named = [Leaf("parameter", name, tensor) for name, tensor in model.named_parameters()]
        named += [Leaf("buffer", name, tensor) for name, tensor in model.named_buffers()]
        named += [Leaf("input", name, tensor) for name, tensor in (inputs or {}).items()]
        for leaf in named:
            self.leaves.setdefault(_key(leaf.tensor)[0], []).append(leaf)
        self.num_ops = 0
        self.stack: list[str | None] = []
        self.writes: dict[int, list[_Write]] = {}
        self.made_by: dict[int, str] = {}
        self.forwards: dict[int, Forward] = {}
        self.recomputed: dict[int, Forward] = {}

    @contextmanager
    def recording(self) -> Iterator["Trace"]:
        """Records inside the block, modules included."""
        with ExitStack() as hooks:
            for hook in (
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            ):
                hooks.callback(hook.remove)
            hooks.enter_context(self)
            yield self

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        outer = self.stack[-1] if self.stack else None
        self.stack.append(self.names.get(id(module), outer))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()

    # ---- one operator ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        inputs = list(_tensors([*args, *kwargs.values()]))
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in zip(signature.written, signature.written_names, strict=True)]  # fmt: skip
        changed = list(_tensors(written))
        before = {id(tensor): measure(tensor) if signature.reads_written else FINITE for tensor in changed}
        result = func(*args, **kwargs)
        self.num_ops += 1
        node = torch._C._current_autograd_node()
        place, forward = self._locate(signature, inputs, node)
        keys = {_key(tensor)[0] for tensor in inputs}
        outputs = changed or [t for t in _tensors([result]) if _key(t)[0] not in keys]
        for output in outputs:
            extent = FINITE if signature.is_empty else measure(output)
            if extent.kind == "finite" and not signature.is_empty:
                self._forget(output)
            else:
                record = self._record(signature, output, extent, place, node, forward)
                record.uninitialised = signature.is_empty
                if not signature.is_empty:
                    self._judge_inputs(record, output, inputs, before, args, kwargs, signature)
                self._remember(output, record)
            self.made_by[_key(output)[0]] = signature.op if node is None else node.name()
        return result

    def _locate(self, signature: _Signature, inputs: list[Tensor], node: Any) -> tuple[Place, Forward | None]:
        code, line = _find_line()
        module = self.stack[-1] if self.stack else None
        running = node is None or (code is not None and self.stack)
        if running:
            sequence = torch._C._autograd._get_sequence_nr() - 1
            known = self.forwards if node is None else self.recomputed
            place = Place(module, code, line)
            if sequence not in known:
                known[sequence] = Forward(signature.op, place, tuple(self.made_by.get(_key(t)[0], "") for t in inputs))
            return place, None
        number = node._sequence_nr()
        forward = self.forwards.get(number) or self.recomputed.get(number)
        if code is not None:  # Python code inside the backward: a custom function or a hook
            return Place(forward.place.module if forward else None, code, line), forward
        return (forward.place if forward else Place()), forward

    def _record(
        self, signature: _Signature, output: Tensor, extent: Extent, place: Place, node: Any, forward: Forward | None
    ) -> Record:
        in_backward = node is not None and not (self.stack and forward is None)
        return Record(
            index=self.num_ops,
            op=signature.op,
            extent=extent,
            dtype=output.dtype,
            shape=tuple(output.shape),
            place=place,
            node=node.name() if in_backward else None,
            forward=forward,
        )

    def _judge_inputs(
        self, record: Record, output: Tensor, inputs: list[Tensor], before: dict[int, Extent], args: Any, kwargs: Any,
        signature: _Signature,
    ) -> None:  # fmt: skip
        floats = [tensor for tensor in inputs if tensor.is_floating_point() or tensor.is_complex()]
        for tensor in floats:
            changed = id(tensor) in before
            if changed and not signature.reads_written:
                continue
            extent = before[id(tensor)] if changed else self._extent_of(tensor)
            writer = leaf = None
            if extent.kind != "finite":
                writer = self._find_writer(tensor, extent)
                leaf = self._find_leaf(tensor) if writer is None else None
            node = self.made_by.get(_key(tensor)[0])
            record.operands.append(Operand(extent, tensor.dtype, writer, leaf, node, tuple(tensor.shape)))
        if not any(operand.extent.kind == "nan" for operand in record.operands):  # it may be an origin
            record.has_zero = any(
                bool((local(t) == 0).any()) for t in floats if id(t) not in before and not t.is_sparse
            )
            record.positions = find_positions(output)
        record.scalars = [value for value in (*args, *kwargs.values()) if isinstance(value, float)]
        if "nll_loss" in record.name and "backward" not in record.name:
            record.all_ignored = _ignores_all(args)
        record.is_mask = _is_mask(record)

    # ---- who wrote it ----

    def _remember(self, output: Tensor, record: Record) -> None:
        key, storage = _key(output)
        write = _Write(record, *_span(output), StorageWeakRef(storage))
        if _covers(output):
            self.writes[key] = [write]
        else:
            self.writes.setdefault(key, []).append(write)

    def _forget(self, output: Tensor) -> None:
        key, _ = _key(output)
        if key in self.writes and _covers(output):
            del self.writes[key]

    def _find_writer(self, tensor: Tensor, extent: Extent) -> Record | None:
        start, end = _span(tensor)
        found = [
            write.record
            for write in reversed(self.writes.get(_key(tensor)[0], []))
            if write.start < end and start < write.end
        ]
        judged = [record for record in found if not record.uninitialised]
        same = [record for record in judged if record.extent.kind == extent.kind]
        return next(iter(same or judged or found), None)

    def _extent_of(self, tensor: Tensor) -> Extent:
        """Returns the extent of an input, without looking again at what one operator has written and nobody since."""
        writes = self.writes.get(_key(tensor)[0], ())
        if len(writes) == 1 and not writes[0].record.uninitialised and tensor.dtype == writes[0].record.dtype:
            if _span(tensor) == (writes[0].start, writes[0].end) and _covers(tensor):
                return writes[0].record.extent
        return measure(tensor)

    def _find_leaf(self, tensor: Tensor) -> Leaf | None:
        return next(iter(self.leaves.get(_key(tensor)[0], [])), None)

    def find_writer(self, tensor: Tensor) -> Record | None:
        """Returns the operator that wrote the non-finite values of `tensor`, `None` if there are none or nobody did."""
        extent = measure(tensor)
        return None if extent.kind == "finite" else self._find_writer(tensor, extent)


def find_positions(tensor: Tensor) -> list[tuple[int, ...]]:
    """Returns the first places of non-finite values in a tensor; of matrices and more, without the last dimension."""
    part = tensor._values() if tensor.is_sparse else local(tensor)
    bad = ~torch.isfinite(part)
    if bad.ndim > 1:
        bad = bad.any(-1)
    return [tuple(index) for index in bad.nonzero()[:SHOWN_POSITIONS].tolist()]


def _ignores_all(args: Any) -> bool:
    """Whether every target of `nll_loss_forward(input, target, weight, reduction, ignore_index)` is ignored."""
    target = args[1]
    ignored = args[4] if len(args) > 4 else -100
    return bool((target == ignored).all())
