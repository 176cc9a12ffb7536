"""A trace of one forward and backward pass: every write of a non-finite value, and what the operator had read.

Each operator's outputs are judged by their exact extent (one `aminmax`); only when one is not finite are its inputs
judged too, so a record knows for certain which of them were finite. Values are followed by storage, views write nothing,
and memory from `empty` is not judged until somebody has written it. Modules are followed by their `__call__`, so that
what a hook does counts as done by the module it hangs on. No tensor is kept alive. Costs one reduction and one host
read per operator, so it belongs in a replay, never in a training step.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...torch_private import (
    TorchDispatchMode,
    is_operator,
    last_sequence_number,
    operator_arguments,
    running_node,
    sequence_number,
)
from .memory import Memory, find_nonfinite_entries, first_places, is_float, measure, span_of, storage_key, strided
from .op_record import FINITE, Extent, Forward, Leaf, Operand, Place, Record, record_is_mask

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
# In-place operators that do not read what they overwrite.
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
_RUNNING = ("running_mean", "running_var")  # of batch norms
_SUMS = ("sum", "mean", "dot", "nansum", "var", "linalg_vector_norm")
# A sum stays one through what is done to it before a root is taken.
_ADJUSTMENTS = ("add", "sub", "div", "clamp", "clamp_min", "clamp_max", "maximum", "relu", "clone", "_to_copy")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "convolution", "convolution_backward")
_SELECTING = ("WhereBackward", "MaskedFillBackward", "MaskedSelectBackward", "IndexBackward", "MaskedScatterBackward")


class _Signature(NamedTuple):
    name: str
    op: str
    is_empty: bool
    is_foreach: bool
    is_pointwise: bool
    written: tuple[tuple[int, str], ...]
    reads_written: bool
    unstated: tuple[tuple[int, str], ...] = ()  # written too, though the schema does not say so


@cache
def _signature(func: Any) -> _Signature:
    """What can be known of an operator from its schema."""
    if not is_operator(func):  # of higher order, as flex attention: seen as one
        return _Signature(str(func), f"higher_order.{func}", False, False, False, (), True)
    arguments = operator_arguments(func)
    op = str(func)
    name = op.split(".")[1]
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    reads = not (name in _OVERWRITES or any(argument.is_out for argument in arguments))
    is_empty = name.startswith(("empty", "new_empty", "_empty", "resize_"))
    pointwise = torch.Tag.pointwise in func.tags
    unstated = [(i, a.name) for i, a in enumerate(arguments) if a.name in _RUNNING and a.alias_info is None]
    return _Signature(
        name, op, is_empty, name.startswith("_foreach"), pointwise, tuple(written), reads, tuple(unstated)
    )


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


class _Made(NamedTuple):
    """What is known of a value without looking at it: whether it is a sum, and whether `where` has put zeros in it."""

    of_sum: bool = False
    selected: bool = False


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

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor] | None = None):
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.strangers: set[int] = set()
        self.leaves: dict[int, list[Leaf]] = {}
        self._add_leaves([*_name_leaves(model), *(Leaf("input", name, each) for name, each in (inputs or {}).items())])
        self.num_ops = 0
        self.stack: list[str | None] = []
        self.memory = Memory()
        self.made: dict[int, _Made] = {}
        self.forwards: dict[int, Forward] = {}

    @contextmanager
    def recording(self) -> Iterator["Trace"]:
        """Records inside the block, modules included."""
        # The outer one for modules compiled in place, the inner one for those whose `__call__` a compiled model holds.
        originals = {name: getattr(nn.Module, name) for name in ("__call__", "_call_impl")}
        for name, original in originals.items():
            setattr(nn.Module, name, self._following(original))
        try:
            with self:
                yield self
        finally:
            for name, original in originals.items():
                setattr(nn.Module, name, original)

    def _following(self, original: Callable) -> Callable:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            outer = self.stack[-1] if self.stack else None
            if id(module) not in self.names and id(module) not in self.strangers:
                self._meet_stranger(module)
            self.stack.append(self.names.get(id(module), outer))
            try:
                return original(module, *args, **kwargs)
            finally:
                self.stack.pop()

        return call

    def _meet_stranger(self, module: nn.Module) -> None:
        """Names the weights of a module that the loss calls beside the model, e.g. a teacher; a wrapper's have names already."""
        inside = {id(each) for each in module.modules()}
        self.strangers |= inside
        if self.names.keys().isdisjoint(inside):
            self._add_leaves(_name_leaves(module, f"{type(module).__name__}."))

    def _add_leaves(self, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            self.leaves.setdefault(storage_key(leaf.tensor), []).append(leaf)

    # ---- one operator ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        signature = _signature(func)
        inputs = _tensors([*args, *kwargs.values()])
        changed: list[Tensor] = []
        before: dict[int, Extent] = {}
        if signature.written:
            changed = _tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in signature.written])
            for tensor in changed:
                if signature.reads_written or sum(tensor is other for other in inputs) > 1:
                    before[id(tensor)] = self.memory.extent_of(tensor)
        for tensor in _tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in signature.unstated]):
            before[id(tensor)] = measure(tensor)
        result = func(*args, **kwargs)
        self.num_ops += 1
        node = running_node()
        if node is None or torch.is_grad_enabled():
            self._note_forward(signature, inputs, node)
        outputs = changed or _tensors([result])
        if not outputs:
            return result
        known = () if changed or signature.name.startswith("lift_fresh") else {storage_key(tensor) for tensor in inputs}
        for number, output in enumerate(outputs):
            key = storage_key(output)
            if not key or key in known:
                continue
            extent = FINITE if signature.is_empty else measure(output)
            if extent.kind == "finite" and not signature.is_empty:
                self.memory.forget(output, key)
            else:
                self._record(signature, output, extent, node, _Call(number, inputs, changed, before, args, kwargs))
            self.made[key] = self._describe(signature, output, inputs, node)
        return result

    def _note_forward(self, signature: _Signature, inputs: list[Tensor], node: Any) -> None:
        """Remembers where the autograd node was made whose forward is running, also in a checkpoint's recomputation."""
        sequence = last_sequence_number()
        known = self.forwards.get(sequence)
        if known is not None and not (known.provisional and any(tensor.requires_grad for tensor in inputs)):
            return
        place = self._locate_running(node)
        if place is None:  # the gradient of a gradient: it belongs where the first one does
            outer = self.forwards.get(sequence_number(node))
            place = outer.place if outer else Place()
        of_sum = any(self.made.get(storage_key(tensor), _Made()).of_sum for tensor in inputs)
        self.forwards[sequence] = Forward(signature.op, place, of_sum)
        if signature.written:  # written in place, a view gets one more node: the one that will run
            self.forwards[sequence + 1] = Forward(signature.op, place, of_sum, provisional=True)

    def _locate_running(self, node: Any) -> Place | None:
        """Returns where a forward runs, `None` if it is not one but a backward that can itself be differentiated."""
        code, line = _find_line()
        if node is not None and code is None:
            return None
        if node is None or self.stack:
            return Place(self.stack[-1] if self.stack else None, code, line)
        outer = self.forwards.get(sequence_number(node))
        return Place(outer.place.module if outer else None, code, line)

    def _describe(self, signature: _Signature, output: Tensor, inputs: list[Tensor], node: Any) -> _Made:
        size = output.numel()
        same = [self.made.get(storage_key(tensor), _Made()) for tensor in inputs if tensor.numel() == size]
        name = signature.name.rstrip("_")
        of_sum = name in _SUMS or (name in _ADJUSTMENTS and any(made.of_sum for made in same))
        selected = node is not None and name not in _PRODUCTS and any(made.selected for made in same)
        if node is not None and not selected and node.name().startswith(_SELECTING):
            selected = _puts_zeros(name, output, inputs)
        return _Made(of_sum, selected)

    # ---- a bad output ----

    def _record(self, signature: _Signature, output: Tensor, extent: Extent, node: Any, call: "_Call") -> None:
        record = Record(self.num_ops, signature.op, extent, output.dtype, tuple(output.shape), Place())
        running = self._locate_running(node) if node is None or torch.is_grad_enabled() else None
        if running is not None:
            record.place = running
        else:
            record.node = node.name()
            record.forward = self.forwards.get(sequence_number(node))
            record.place = record.forward.place if record.forward else Place()
            code, line = _find_line()
            if code is not None:
                record.in_python = True
                record.place = Place(record.place.module, code, line)
        record.device = output.device.type
        record.uninitialised = signature.is_empty
        record.is_pointwise = signature.is_pointwise
        if not signature.is_empty:
            self._judge_inputs(record, output, signature, call)
        self.memory.remember(output, record)

    def _judge_inputs(self, record: Record, output: Tensor, signature: _Signature, call: "_Call") -> None:
        inputs, args = call.inputs, call.args
        if signature.is_foreach:
            args = [arg[call.number] if isinstance(arg, (list, tuple)) else arg for arg in args]
            inputs = _tensors(args)
        overwritten = {id(tensor) for tensor in call.changed} - call.before.keys()
        seen: dict[int, Tensor] = {id(tensor): tensor for tensor in inputs if id(tensor) not in overwritten}
        floats = [tensor for tensor in seen.values() if is_float(tensor)]
        extents = [call.before[id(t)] if id(t) in call.before else self.memory.extent_of(t) for t in floats]
        writers = [
            None if e.kind == "finite" else self.memory.find_writer(t, e) for t, e in zip(floats, extents, strict=True)
        ]
        zeros: set[int] = set()
        judged = [e.kind for e, w in zip(extents, writers, strict=True) if w is not None and not w.uninitialised]
        if "nan" not in judged:  # it may be an origin
            part = strided(output)
            assert part is not None
            bad = find_nonfinite_entries(part)
            record.positions = first_places(bad)
            zeros = {key for key, tensor in seen.items() if key not in call.before and _is_zero_at(tensor, bad)}
            record.zero_args = {
                i for i, arg in enumerate(args)
                if id(arg) in zeros or (isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == 0)
            }  # fmt: skip
        for tensor, extent, writer in zip(floats, extents, writers, strict=True):
            leaf = self._find_leaf(tensor) if extent.kind != "finite" and writer is None else None
            selected = self.made.get(storage_key(tensor), _Made()).selected
            zero = id(tensor) in zeros
            record.operands.append(Operand(extent, tensor.dtype, writer, leaf, tuple(tensor.shape), zero, selected))
        record.scalars = [value for value in (*args, *call.kwargs.values()) if isinstance(value, float)]
        if "nll_loss" in record.name and "backward" not in record.name:
            record.all_ignored = _ignores_all(args)
        record.is_mask = record_is_mask(record)

    def _find_leaf(self, tensor: Tensor) -> Leaf | None:
        leaves = self.leaves.get(storage_key(tensor), [])
        part = strided(tensor)
        if part is None or len(leaves) < 2:
            return next(iter(leaves), None)
        start, end = span_of(part)
        spans = [(leaf, span_of(own)) for leaf in leaves if (own := strided(leaf.tensor)) is not None]
        return next((leaf for leaf, (low, high) in spans if low < end and start < high), leaves[0])

    def find_writer(self, tensor: Tensor) -> Record | None:
        """Returns the operator that wrote the non-finite values of `tensor`, `None` if there are none or nobody did."""
        extent = measure(tensor)
        return None if extent.kind == "finite" else self.memory.find_writer(tensor, extent)


class _Call(NamedTuple):
    """One call of an operator: which of its outputs is meant, and what it was given."""

    number: int
    inputs: list[Tensor]
    changed: list[Tensor]
    before: dict[int, Extent]
    args: Any
    kwargs: Any


def _name_leaves(model: nn.Module, prefix: str = "") -> Iterator[Leaf]:
    """Names all that a model holds; a tensor that a module merely has counts as a buffer."""
    for name, parameter in model.named_parameters():
        yield Leaf("parameter", f"{prefix}{name}", parameter)
    for name, buffer in model.named_buffers():
        yield Leaf("buffer", f"{prefix}{name}", buffer)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield Leaf("buffer", prefix + (f"{path}.{name}" if path else name), value)


def _puts_zeros(name: str, output: Tensor, inputs: list[Tensor]) -> bool:
    """Whether the backward of a selection puts zeros into a gradient; if everything was selected, it does not."""
    if name == "where":  # (condition, gradient, 0) for the one branch, (condition, 0, gradient) for the other
        condition, first, _ = inputs
        return bool(condition.any() if first.ndim == 0 else not condition.all())
    if name == "masked_fill":
        return bool(inputs[1].any())
    return "scatter" in name or "index_put" in name


def _is_zero_at(tensor: Tensor, bad: Tensor) -> bool:
    """Whether a tensor holds an exact zero at a bad place of the output, or anywhere if their shapes do not compare."""
    part = strided(tensor)
    if part is None or part.numel() == 0 or part.device.type == "meta":
        return False
    zero = (part.float() if part.element_size() == 1 and part.is_floating_point() else part.detach()) == 0
    if _spreads_to(part.shape, bad.shape):
        zero = zero & bad
    return bool(zero.any())


def _spreads_to(shape: torch.Size, target: torch.Size) -> bool:
    trailing = target[len(target) - len(shape) :] if len(shape) <= len(target) else ()
    return len(trailing) == len(shape) and all(a in (b, 1) for a, b in zip(shape, trailing, strict=True))


def _ignores_all(args: Any) -> bool:
    """Whether every target of `nll_loss_forward(input, target, weight, reduction, ignore_index)` is ignored."""
    target = args[1]
    ignored = args[4] if len(args) > 4 else -100
    return bool((target == ignored).all())
