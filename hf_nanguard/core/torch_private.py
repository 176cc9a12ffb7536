"""Every private or undocumented name of torch that the core uses, each with the condition under which it can go."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

# Can go when torch exports them from a public module.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointFunction

# The modules of torch whose Python functions ask for a `__torch_function__` first. Can go when such a mode also sees what
# these functions call.
OVERRIDABLE_MODULES = (torch.nn.functional, torch.functional, torch._tensor, torch.autograd)

# ---- tensors ----


def foreach_norm(tensors: list[Tensor] | tuple[Tensor, ...], order: float) -> list[Tensor]:
    """Returns the norm of each tensor by one fused kernel per device and dtype.

    Can go when torch has a public foreach norm."""
    return list(torch._foreach_norm(tensors, order)) if tensors else []


def pre_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """Returns the hooks that run before a module's forward.

    Can go when torch lists the hooks of a module."""
    return list(module._forward_pre_hooks.values())


def write_count(tensor: Tensor) -> int:
    """Returns how often a tensor was written in place, as autograd counts it.

    Can go when torch has a public counter of in-place writes."""
    return tensor._version


def storage_address(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of a plain tensor while it is alive.

    Can go when `untyped_storage()` has a public identity that costs no weak reference."""
    return tensor.untyped_storage()._cdata


def is_zero_tensor(tensor: Tensor) -> bool:
    """Returns whether a tensor is one of autograd's immutable zeros, which have no storage.

    Can go when torch has a public name for this."""
    return tensor._is_zerotensor()


def sparse_values(tensor: Tensor) -> Tensor:
    """Returns the values of a sparse tensor as they are, coalesced or not.

    Can go when `values()` accepts uncoalesced tensors."""
    return tensor._values()


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Lets a tensor have the backward hooks of another.

    Can go when hooks of a tensor can be listed and registered again."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks


# ---- autograd and operators ----


def operator_arguments(operator: object) -> Sequence[Any] | None:
    """Returns the declared arguments of an operator, with what is written in place; `None` for one of higher order, e.g. flex
    attention.

    Can go when operators have a public schema."""
    return operator._schema.arguments if isinstance(operator, torch._ops.OpOverload) else None


def running_node() -> Node | None:
    """Returns the autograd node whose backward is running, `None` in a forward.

    Can go when torch has a public name for this."""
    return torch._C._current_autograd_node()


def is_in_backward() -> bool:
    """Returns whether a backward pass is running, e.g. one that recomputes a checkpointed block.

    Can go when torch has a public name for this."""
    return torch._C._current_graph_task_id() != -1


def run_after_backward(callback: Callable[[], None]) -> None:
    """Calls a function once the running backward has done everything that is queued before it.

    Can go when torch offers a hook on the end of a backward pass.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def last_sequence_number() -> int:
    """Returns the sequence number of the autograd node that was created last.

    Can go when a tensor's node can be asked in a dispatch mode, below autograd."""
    return torch._C._autograd._get_sequence_nr() - 1


def sequence_number(node: Node) -> int:
    """Returns the sequence number of an autograd node.

    Can go when nodes have a public identity that their forward knows as well."""
    return node._sequence_nr()


def accept_higher_order(mode: type[TorchDispatchMode]) -> None:
    """Lets a dispatch mode with `supports_higher_order_operators` see operators such as flex attention.

    Can go when torch 2.8 is not supported any more: later versions ask the mode itself."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for operator in torch._ops._higher_order_ops.values():
        if mode not in operator.python_key_table:
            operator.py_impl(mode)(partial(_dispatch_to_mode, operator))


def _dispatch_to_mode(operator: object, mode: TorchDispatchMode, *args: object, **kwargs: object) -> object:
    return mode.__torch_dispatch__(operator, [], args, kwargs)


# ---- modules ----


@dataclass(frozen=True, eq=False)
class StateSlot:
    """Where a module keeps a buffer or a parameter.

    Can go when `named_buffers` can also return the module, and `nn.Module` can replace a buffer without the checks of
    `__setattr__`."""

    module: nn.Module
    table: dict[str, Any]
    name: str
    is_buffer: bool

    def get(self) -> Tensor | None:
        """Returns the tensor, `None` if it was deleted or set to `None`."""
        return self.table.get(self.name)

    def put(self, tensor: Tensor) -> None:
        self.table[self.name] = tensor


def list_state_slots(model: nn.Module) -> list[StateSlot]:
    """Returns the slots of all buffers, and of parameters that are plain tensors; one used twice comes twice.

    Can go together with [`StateSlot`]."""
    slots = [
        StateSlot(module, table, name, table is module._buffers)
        for module in model.modules()
        for table in (module._buffers, module._parameters)
        for name in table
    ]
    return [slot for slot in slots if (tensor := slot.get()) is not None and (slot.is_buffer or _is_plain(tensor))]


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and not parameter.is_meta


def list_tensor_slots(model: nn.Module) -> list[tuple[dict[str, object], str]]:
    """Returns where modules keep parameters and buffers: dictionaries and keys, so that a tensor can be exchanged without
    the checks of `nn.Module`. Recurrent layers keep their parameters a second time.

    Can go when `torch.func.functional_call` covers tied tensors, recurrent layers and models called through hooks."""
    modules = list(model.modules())
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    slots: list[tuple[dict[str, Any], str]] = [(table, key) for table in tables for key in table]
    return slots + [(vars(module), "_flat_weights") for module in modules if isinstance(module, nn.RNNBase)]


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module runs as a compiled graph: wrapped, compiled in place, or by its `forward` alone. The class of the
    wrapper is known by name because importing it costs an import of `torch._dynamo`.

    Can go when torch has a public name for this."""
    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
        return True
    forward = vars(module).get("forward", type(module).forward)
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def has_compiled_part(model: nn.Module) -> bool:
    """Returns whether a model or one of its modules runs as a compiled graph, which ignores hooks.

    Can go together with [`is_compiled`]."""
    return any(is_compiled(module) for module in model.modules())


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Returns the module that `torch.compile` has wrapped, or the module itself.

    Can go when the wrapper has a public name for it."""
    return getattr(model, "_orig_mod", model)


def plain_name(name: str) -> str:
    """Returns the name of a parameter without what `torch.compile` adds to it.

    Can go when compiled modules report the names of the module they wrap."""
    return name.replace("_orig_mod.", "")


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the tensors that a wrapper of tensors consists of, e.g. a quantized one; none of a plain tensor.

    Can go when `is_traceable_wrapper_subclass` is public."""
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def is_saved(module: nn.Module, name: str) -> bool:
    """Returns whether a buffer is part of the state dict.

    Can go when torch reports it without building a state dict, which may copy and gather."""
    return name not in module._non_persistent_buffers_set


def is_norm_layer(module: nn.Module) -> bool:
    """Returns whether a module keeps running statistics (batch and instance norm).

    Can go when these layers have a public base class."""
    return isinstance(module, _NormBase)


def without_reentrant_checkpoints() -> AbstractContextManager[object]:
    """Returns a context in which reentrant gradient checkpointing runs its part of the model as it is. Otherwise a forward runs that
    part without gradients, as only its recomputation in the backward has them.

    Can go when reentrant checkpointing can be switched off from outside of a model."""

    def run_part(function: Callable[..., object], preserves_rng: bool, *args: object) -> object:
        return function(*args)

    return patch.object(CheckpointFunction, "apply", run_part)


# ---- loss scaler ----


def copy_scale(scaler: torch.amp.GradScaler) -> tuple[Tensor | None, Tensor | None]:
    """Returns copies of the loss scale and its growth counter on their device.

    Can go when `GradScaler.state_dict` returns them without a host read."""
    pair = scaler._scale, scaler._growth_tracker
    return tuple(None if value is None else value.clone() for value in pair)  # type: ignore[return-value]


def restore_scale(scaler: torch.amp.GradScaler, scale: Tensor | None, growth: Tensor | None) -> None:
    """Puts back what [`copy_scale`] returned.

    Can go when `GradScaler.load_state_dict` accepts tensors."""
    for current, saved in ((scaler._scale, scale), (scaler._growth_tracker, growth)):
        if current is not None and saved is not None:
            current.copy_(saved)


def copy_unscaled(scaler: torch.amp.GradScaler) -> dict[int, dict[str, object]]:
    """Returns which optimizers had their gradients unscaled in this step.

    Can go when `GradScaler` can undo `unscale_`."""
    return dict(scaler._per_optimizer_states)


def restore_unscaled(scaler: torch.amp.GradScaler, states: dict[int, dict[str, object]]) -> None:
    """Puts back what [`copy_unscaled`] returned; an empty dictionary lets `unscale_` run again.

    Can go when `GradScaler` can undo `unscale_`."""
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states.update(states)


# ---- DistributedDataParallel ----


def rebuild_buckets(model: nn.Module) -> None:
    """Makes DDP rebuild its buckets now. It does so in the first forward after its first reduction, by a collective, which
    ranks that run different numbers of passes would not reach together.

    Can go when DDP rebuilds its buckets without a collective."""
    if isinstance(model, DistributedDataParallel):
        model.reducer._rebuild_buckets()


def forget_used_parameters(model: nn.Module) -> None:
    """Makes DDP forget which parameters the passes under `no_sync` have used. With `find_unused_parameters` it keeps them until
    its next reduction, and then fails at one without a gradient, or gives zeros to one that no rank has used.

    Can go when DDP counts a parameter as used if it has a gradient."""
    if isinstance(model, DistributedDataParallel) and model.find_unused_parameters and not model.static_graph:
        model.reducer._reset_state()


def sync_buffers(model: nn.Module, active: bool) -> None:
    """Lets DDP broadcast buffers in the next forward, or not.

    Can go when `no_sync` also covers buffers."""
    if isinstance(model, DistributedDataParallel):
        model.require_forward_param_sync = active
