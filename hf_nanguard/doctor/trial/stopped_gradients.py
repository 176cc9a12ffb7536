"""Which code takes tensors out of the graph in a forward pass, as DoRA's norm and boxes that are refined layer by layer."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

HOSTS = ("transformers.", "peft.")


class Detaches(TorchFunctionMode):
    """Notes the modules whose code detaches a tensor with a gradient inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.detach and args[0].requires_grad:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            self.modules |= {caller} if not caller.startswith("torch.") else set()
        return func(*args, **(kwargs or {}))
