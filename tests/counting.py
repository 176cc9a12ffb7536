"""Counts what a stretch of code asks of the device: operations, and reads that make the host wait."""

from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")


class Count(TorchDispatchMode):
    """Counts dispatched operations, and host reads: those the dispatcher sees and those it does not."""

    def __init__(self):
        super().__init__()
        self.ops: Counter = Counter()
        self.hidden_reads: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        """All host reads."""
        return self.ops["aten._local_scalar_dense.default"] + sum(self.hidden_reads.values())

    @property
    def num_ops(self) -> int:
        """All operations but the reads."""
        return sum(self.ops.values()) - self.ops["aten._local_scalar_dense.default"]


@contextmanager
def counting():
    """Counts inside the block. `tolist`, `cpu` and `numpy` do not reach the dispatcher and are counted by patching."""
    count = Count()
    originals = {name: getattr(torch.Tensor, name) for name in ("tolist", "cpu", "numpy")}

    def patched(name):
        def method(self, *args, **kwargs):
            count.hidden_reads[name] += 1
            return originals[name](self, *args, **kwargs)

        return method

    for name in originals:
        setattr(torch.Tensor, name, patched(name))
    try:
        with count:
            yield count
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
