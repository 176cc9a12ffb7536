"""Counts what a block of code asks of torch: operators, and host reads, which make the host wait for the device.

A dispatch mode sees `item`, `float` and `bool` as `_local_scalar_dense`, but it does not see `tolist`, `cpu` and `numpy`;
those methods are patched inside the block. Boolean indexing and operators whose output size depends on the data also wait
for a GPU, but they are not counted as reads, except `nonzero`.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

from torch import Tensor

from ..core.torch_private import TorchDispatchMode

READ_OPERATORS = (
    "aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default", "aten.nonzero.default",
)  # fmt: skip
READ_METHODS = ("tolist", "cpu", "numpy")


class OperationCounter(TorchDispatchMode):
    """Context manager that records the operators and the host reads of its block.

    It records the current thread only. A read counts once, however many operators it runs.

    Attributes:
        ops (`list[str]`):
            The operators that ran, in order, for example `"aten.add.Tensor"`.
        reads (`list[str]`):
            The host reads, in order: an operator, or a method of `Tensor` that the dispatcher does not see.

    Example:

    ```python
    with OperationCounter() as counter:
        loss = model(**batch).loss
        loss.item()
    print(counter.num_ops, counter.num_reads)
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.reads: list[str] = []
        self._reading = False
        self._patches = ExitStack()

    @property
    def num_reads(self) -> int:
        """The number of host reads."""
        return len(self.reads)

    @property
    def num_ops(self) -> int:
        """The number of operators that are not host reads."""
        return sum(op not in READ_OPERATORS for op in self.ops)

    @property
    def op_counts(self) -> Counter[str]:
        """How often each operator ran."""
        return Counter(self.ops)

    def _patched(self, name: str) -> Callable[..., object]:
        original = getattr(Tensor, name)

        def method(tensor: Tensor, *args: object, **kwargs: object) -> object:
            if self._reading:
                return original(tensor, *args, **kwargs)
            self.reads.append(name)
            self._reading = True
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self._reading = False

        return method

    def __enter__(self) -> "OperationCounter":
        for name in READ_METHODS:
            self._patches.enter_context(patch.object(Tensor, name, self._patched(name)))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.ops.append(str(func))
        if str(func) in READ_OPERATORS and not self._reading:
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))
