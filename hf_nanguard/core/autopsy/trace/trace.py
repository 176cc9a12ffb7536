"""Traces one forward and backward pass: every write of a non-finite value, and what the operator had read.

Each output of an operator is measured exactly (one `aminmax`); only if one is not finite are the inputs measured too, so a
record states with certainty which of them were finite. Values are followed by storage: views write nothing, and memory
from `empty` is not measured until an operator has written it. Modules are followed by their `__call__`, so a hook counts
as part of its module. No tensor is kept alive. Costs one reduction and one host read per operator: for replays, never for a
training step.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ....own_fields import own_fields
from ...rerun.nested_inputs import find_tensors
from ...torch_private import (
    TorchDispatchMode,
    accept_higher_order,
    last_sequence_number,
    operator_arguments,
    running_node,
    sequence_number,
)
from .memory import Memory, find_nonfinite_entries, first_places, is_float, measure, span_of, storage_key, strided
from .op_record import FINITE, Extent, Forward, Leaf, Operand, Place, Record

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
# In-place operators that do not read what they overwrite.
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
_RUNNING = ("running_mean", "running_var")  # of batch norms
_SUMS = ("sum", "mean", "dot", "nansum", "var", "linalg_vector_norm")
# Operators after which a sum still counts as one, e.g. between the sum and the root of a norm.
_ADJUSTMENTS = ("add", "sub", "div", "clamp", "clamp_min", "clamp_max", "maximum", "relu", "clone", "_to_copy")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "convolution", "convolution_backward")
_SELECTING = ("WhereBackward", "MaskedFillBackward", "MaskedSelectBackward", "IndexBackward", "MaskedScatterBackward")


class _Signature(NamedTuple):
    """What the schema of an operator says about it; `written` and `unstated` are places and names of arguments."""

    name: str
    op: str
    is_empty: bool
    is_pointwise: bool
    written: tuple[tuple[int, str], ...]
    reads_written: bool
    unstated: tuple[tuple[int, str], ...] = ()  # written too, though the schema does not say so


@cache
def _signature(func: Any) -> _Signature:
    arguments = operator_arguments(func)
    if arguments is None:  # of higher order: recorded as one operator
        return _Signature(str(func), f"higher_order.{func}", False, False, (), True)
    op = str(func)
    name = op.split(".")[1]
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    reads = not (name in _OVERWRITES or any(argument.is_out for argument in arguments))
    is_empty = name.startswith(("empty", "new_empty", "_empty", "resize_"))
    pointwise = torch.Tag.pointwise in func.tags
    unstated = [(i, a.name) for i, a in enumerate(arguments) if a.name in _RUNNING and a.alias_info is None]
    return _Signature(name, op, is_empty, pointwise, tuple(written), reads, tuple(unstated))


def _pick(places: Iterable[tuple[int, str]], args: Sequence, kwargs: Mapping[str, object]) -> list[Tensor]:
    """Returns the tensors in some arguments of a call."""
    return list(find_tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in places]))


@cache
def _role(code: CodeType) -> str:
    if code.co_name == "_engine_run_backward":
        return "engine"
    file = code.co_filename
    return "torch" if file.startswith((_TORCH, _OWN)) or file.endswith("contextlib.py") else "user"


def _find_line() -> tuple[CodeType | None, int]:
    """Returns the running line of the user's program; `None` if the autograd engine runs an operator of its own."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _role(frame.f_code) == "torch":
        frame = frame.f_back
    return (None, 0) if frame is None or _role(frame.f_code) == "engine" else (frame.f_code, frame.f_lineno)


class Trace(TorchDispatchMode):
    """Records what writes non-finite values while it is active.

    The unwrapped model gives the names of modules, parameters and buffers; `inputs` are the inputs of the pass by name.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor] | None = None):
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.outside: set[int] = set()
        self.leaves: dict[int, list[Leaf]] = {}
        self._add_leaves([*_name_leaves(model), *(Leaf("input", name, each) for name, each in (inputs or {}).items())])
        self.num_ops = 0
        self.stack: list[str | None] = []
        self.memory = Memory()
        self.sums: set[int] = set()  # storages that hold a sum
        self.selected: set[int] = set()  # storages into which the backward of a selection has put zeros
        self.forwards: dict[int, Forward] = {}

    @contextmanager
    def recording(self) -> Iterator["Trace"]:
        """Records inside the block, modules included."""
        accept_higher_order(Trace)
        with ExitStack() as stack:
            # `__call__` for modules compiled in place, `_call_impl` for those whose `__call__` a compiled model holds.
            for name in ("__call__", "_call_impl"):
                stack.enter_context(patch.object(nn.Module, name, self._following(getattr(nn.Module, name))))
            yield stack.enter_context(self)

    def _following(self, original: Callable) -> Callable:
        def call(module: nn.Module, *args: object, **kwargs: object) -> object:
            outer = self.stack[-1] if self.stack else None
            if id(module) not in self.names and id(module) not in self.outside:
                self._name_outside_module(module)
            self.stack.append(self.names.get(id(module), outer))
            try:
                return original(module, *args, **kwargs)
            finally:
                self.stack.pop()

        return call

    def _name_outside_module(self, module: nn.Module) -> None:
        """Names the weights of a module outside the model that the loss calls, e.g. a teacher; those of a wrapper have names."""
        inside = {id(each) for each in module.modules()}
        self.outside |= inside
        if self.names.keys().isdisjoint(inside):
            self._add_leaves(_name_leaves(module, f"{type(module).__name__}."))

    def _add_leaves(self, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            self.leaves.setdefault(storage_key(leaf.tensor), []).append(leaf)

    # ---- one operator ----

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        signature = _signature(func)
        inputs = list(find_tensors([*args, *kwargs.values()]))
        changed = _pick(signature.written, args, kwargs)
        before = {
            id(tensor): self.memory.extent_of(tensor)
            for tensor in changed
            if signature.reads_written or sum(tensor is other for other in inputs) > 1
        }
        before |= {id(tensor): measure(tensor) for tensor in _pick(signature.unstated, args, kwargs)}
        result = func(*args, **kwargs)
        self.num_ops += 1
        node = running_node()
        if node is None or torch.is_grad_enabled():
            self._note_forward(signature, inputs, node)
        outputs = changed or list(find_tensors(result))
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
                is_foreach = signature.name.startswith("_foreach")
                given = [arg[number] if is_foreach and isinstance(arg, (list, tuple)) else arg for arg in args]
                read = {} if signature.is_empty else self._judge_inputs(signature, output, before, given, kwargs)
                self.memory.remember(output, key, self._record(signature, output, extent, node, read))
            self._note_kind(signature, output, key, inputs, node)
        return result

    def _note_forward(self, signature: _Signature, inputs: list[Tensor], node: Node | None) -> None:
        """Notes where the forward of the newest autograd node runs, also while a checkpoint is recomputed."""
        sequence = last_sequence_number()
        known = self.forwards.get(sequence)
        if known is not None and not (known.provisional and any(tensor.requires_grad for tensor in inputs)):
            return
        # The gradient of a gradient has the place of the first one.
        place = self._locate_running(node) or self._forward_place(node)
        of_sum = any(storage_key(tensor) in self.sums for tensor in inputs)
        self.forwards[sequence] = Forward(signature.op, place, of_sum)
        if signature.written:  # a view that is written in place gets one more node, and that one will run
            self.forwards[sequence + 1] = Forward(signature.op, place, of_sum, provisional=True)

    def _locate_running(self, node: Node | None) -> Place | None:
        """Returns where a forward operator runs, `None` if it is part of a backward that can itself be differentiated."""
        code, line = _find_line()
        if node is not None and code is None:
            return None
        if node is None or self.stack:
            return Place(self.stack[-1] if self.stack else None, code, line)
        return Place(self._forward_place(node).module, code, line)

    def _forward_place(self, node: Node | None) -> Place:
        forward = None if node is None else self.forwards.get(sequence_number(node))
        return forward.place if forward else Place()

    def _note_kind(
        self, signature: _Signature, output: Tensor, key: int, inputs: list[Tensor], node: Node | None
    ) -> None:
        same = {storage_key(tensor) for tensor in inputs if tensor.numel() == output.numel()}
        name = signature.name.rstrip("_")
        of_sum = name in _SUMS or (name in _ADJUSTMENTS and not same.isdisjoint(self.sums))
        selected = node is not None and name not in _PRODUCTS and not same.isdisjoint(self.selected)
        if node is not None and not selected and node.name().startswith(_SELECTING):
            selected = _puts_zeros(name, inputs)
        for found, kind in ((of_sum, self.sums), (selected, self.selected)):
            (kind.add if found else kind.discard)(key)

    # ---- a non-finite output ----

    def _record(
        self, signature: _Signature, output: Tensor, extent: Extent, node: Node | None, read: dict[str, Any]
    ) -> Record:
        place = self._locate_running(node) if node is None or torch.is_grad_enabled() else None
        node_name, forward, in_python = None, None, False
        if place is None:
            assert node is not None
            node_name, forward, place = node.name(), self.forwards.get(sequence_number(node)), self._forward_place(node)
            code, line = _find_line()
            if code is not None:
                in_python, place = True, Place(place.module, code, line)
        return Record(
            self.num_ops, signature.op, extent, output.dtype, tuple(output.shape), place, node_name, forward,
            in_python=in_python, is_pointwise=signature.is_pointwise, uninitialised=signature.is_empty,
            device=output.device.type, **read,
        )  # fmt: skip

    def _judge_inputs(
        self, signature: _Signature, output: Tensor, before: dict[int, Extent], args: list, kwargs: dict[str, object]
    ) -> dict[str, object]:
        """Returns what a record says about the inputs of an operator."""
        overwritten = {id(tensor) for tensor in _pick(signature.written, args, kwargs)} - before.keys()
        inputs = find_tensors([*args, *kwargs.values()])
        seen = {id(tensor): tensor for tensor in inputs if id(tensor) not in overwritten}
        operands: dict[int, Operand] = {}
        for key, tensor in seen.items():
            if is_float(tensor):
                extent = before.get(key) or self.memory.extent_of(tensor)
                is_bad = extent.kind != "finite"
                writer = self.memory.find_writer(tensor, extent) if is_bad else None
                leaf = self._find_leaf(tensor) if is_bad and writer is None else None
                operands[key] = Operand(extent, writer, leaf, selected=storage_key(tensor) in self.selected)
        found: dict[str, object] = {
            "scalars": [value for value in (*args, *kwargs.values()) if isinstance(value, float)],
            "all_ignored": _ignores_all(signature.name, args),
        }
        if not any(o.extent.kind == "nan" and o.writer and not o.writer.uninitialised for o in operands.values()):
            part = strided(output)  # it may be an origin
            assert part is not None
            bad = find_nonfinite_entries(part)
            zeros = {key for key, tensor in seen.items() if key not in before and _is_zero_at(tensor, bad)}
            operands |= {key: replace(operand, zero=True) for key, operand in operands.items() if key in zeros}
            found["positions"] = first_places(bad)
            found["zero_args"] = {i for i, arg in enumerate(args) if _is_zero(arg, zeros)}
        return {**found, "operands": list(operands.values())}

    def _find_leaf(self, tensor: Tensor) -> Leaf | None:
        leaves = self.leaves.get(storage_key(tensor), [])
        part = strided(tensor)
        if part is None or len(leaves) < 2:
            return next(iter(leaves), None)
        start, end = span_of(part)
        spans = [(leaf, span_of(own)) for leaf in leaves if (own := strided(leaf.tensor)) is not None]
        return next((leaf for leaf, (low, high) in spans if low < end and start < high), leaves[0])

    def find_writer(self, tensor: Tensor) -> Record | None:
        """Returns the operator that wrote the non-finite values of `tensor`, `None` if there are none."""
        extent = measure(tensor)
        return None if extent.kind == "finite" else self.memory.find_writer(tensor, extent)


def _name_leaves(model: nn.Module, prefix: str = "") -> Iterator[Leaf]:
    """Names all tensors of a model; a plain attribute of a module counts as a buffer."""
    for name, parameter in model.named_parameters():
        yield Leaf("parameter", f"{prefix}{name}", parameter)
    for name, buffer in model.named_buffers():
        yield Leaf("buffer", f"{prefix}{name}", buffer)
    for path, module in model.named_modules():
        for name, value in own_fields(module).items():
            if isinstance(value, Tensor):
                yield Leaf("buffer", prefix + (f"{path}.{name}" if path else name), value)


def _puts_zeros(name: str, inputs: list[Tensor]) -> bool:
    """Whether the backward of a selection puts zeros into a gradient; it does not if everything was selected."""
    if name == "where":  # (condition, gradient, 0) for one branch, (condition, 0, gradient) for the other
        condition, first, _ = inputs
        return bool(condition.any() if first.ndim == 0 else not condition.all())
    if name == "masked_fill":
        return bool(inputs[1].any())
    return "scatter" in name or "index_put" in name


def _is_zero(arg: object, zeros: set[int]) -> bool:
    """Whether an argument is the number 0, or one of the tensors with these ids."""
    return id(arg) in zeros or (isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == 0)


def _is_zero_at(tensor: Tensor, bad: Tensor) -> bool:
    """Whether a tensor is exactly 0 where the output is not finite, or anywhere if it cannot be broadcast to the output."""
    part = strided(tensor)
    if part is None or part.numel() == 0 or part.device.type == "meta":
        return False
    zero = (part.float() if part.element_size() == 1 and part.is_floating_point() else part.detach()) == 0
    sizes = zip(reversed(part.shape), reversed(bad.shape), strict=False)
    if part.ndim <= bad.ndim and all(own in (size, 1) for own, size in sizes):  # it can be broadcast
        zero = zero & bad
    return bool(zero.any())


def _ignores_all(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator is `nll_loss_forward(input, target, weight, reduction, ignore_index)` and ignores every target."""
    if "nll_loss" not in name or "backward" in name:
        return False
    target = args[1]
    ignored = args[4] if len(args) > 4 else -100
    return bool((target == ignored).all())
