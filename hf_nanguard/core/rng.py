"""Captures and restores the random state of a process: torch on CPU and accelerator, Python and NumPy.

Reading the state of a generator, also of CUDA, is a small copy on the host. So capturing it for every micro-batch makes no
host read.
"""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RngState:
    """The state of every generator that a forward pass may use."""

    cpu: Tensor
    device: Tensor | None
    device_type: str
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def capture(cls, device_type: str = "cpu") -> "RngState":
        """Returns the current state of all generators, including that of the current device of `device_type`."""
        numpy = sys.modules.get("numpy")
        return cls(
            cpu=torch.get_rng_state(),
            device=None if device_type == "cpu" else torch.get_device_module(device_type).get_rng_state(),
            device_type=device_type,
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
        )

    def is_same(self, other: "RngState") -> bool:
        """Returns whether no generator was used between the two."""
        return all(map(torch.equal, self._tensors(), other._tensors())) and self.python == other.python

    def _tensors(self) -> list[Tensor]:
        numpy = [] if self.numpy is None else [torch.as_tensor(part) for part in self.numpy[1:]]
        return [self.cpu, *([] if self.device is None else [self.device]), *numpy]

    def restore(self) -> None:
        """Restores the state of every generator."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(self.device_type).set_rng_state(self.device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
