"""Which code stops or changes gradients in a forward pass, as DoRA's norm, boxes that are refined layer by layer, and gradient reversal."""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.overrides import TorchFunctionMode

HOSTS = ("transformers.", "peft.")
GETS_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class Detaches(TorchFunctionMode):
    """Notes the modules whose code takes a tensor with a gradient out of the graph inside the block: by `detach`, `data` or `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.detach, GETS_DATA):
            is_stopped = args[0].requires_grad
        elif func is functional.gumbel_softmax:  # whose own calls are not seen
            is_stopped = bool((kwargs or {}).get("hard")) and result.requires_grad
        else:
            is_stopped = not torch.is_grad_enabled() and _needs_gradient([args, kwargs]) and _has_floats(result)
            is_stopped = is_stopped and not _is_in_function()
        if is_stopped:
            self.modules.add(_find_caller())
        return result


def _list_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _list_tensors(each)


def _needs_gradient(value: object) -> bool:
    return any(each.requires_grad for each in _list_tensors(value))


def _has_floats(value: object) -> bool:
    return any(each.is_floating_point() for each in _list_tensors(value))


def _is_in_function() -> bool:
    """Returns whether a custom function is running, whose forward pass has no graph because it has a backward pass of its own."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_globals.get("__name__") == "torch.autograd.function":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _find_caller() -> str:
    """Returns the module of the code outside of torch that made the call, or that of torch if the model has no other."""
    frame, found = sys._getframe(2), ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name != __name__ and not name.startswith("torch."):
            return name if not found or not name.startswith("hf_nanguard.") else found
        found = found or (name if name != __name__ else "")
        frame = frame.f_back  # type: ignore[assignment]
    return found


def find_custom_functions(value: Tensor) -> list[str]:
    """Returns the names of the custom functions in the graph of a value that are neither of torch nor of the hosts."""
    names: set[str] = set()
    nodes, seen = [value.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
        cls = getattr(node, "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
        if cls is not None and not cls.__module__.startswith(("torch.", *HOSTS)):
            names.add(f"{cls.__module__}.{cls.__qualname__}")
    return sorted(names)
