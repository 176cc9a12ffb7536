"""Counts what a block of code asks of torch: operators, and values brought to the host.

A dispatch mode sees `item`, `float` and `bool` as `_local_scalar_dense`, but not `tolist`, `cpu` and `numpy`; those
are patched for the duration.
"""

from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READING = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default", "aten.nonzero.default")
UNSEEN = ("tolist", "cpu", "numpy")


class Counting(TorchDispatchMode):
    """A context with `ops`, the operators that ran inside, and `reads`, the host reads among and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.reads: list[str] = []
        self.inside = False
        self.patches = [patch.object(Tensor, name, self._reader(name)) for name in UNSEEN]

    def _reader(self, name: str) -> Any:
        original = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return original(tensor, *args, **kwargs)
            self.reads.append(name)
            self.inside = True
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self.inside = False

        return read

    def __enter__(self) -> "Counting":
        for each in self.patches:
            each.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for each in self.patches:
            each.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.ops.append(str(func))
        if str(func) in READING and not self.inside:
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))
