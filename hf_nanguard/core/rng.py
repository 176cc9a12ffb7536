"""Captures and restores the random state of a process: torch on CPU and accelerator, Python and NumPy.

Reading the state of a generator, also of CUDA, is a small copy on the host. So capturing it for every micro-batch makes no
host read.
"""

import random
import sys
from copy import deepcopy
from ctypes import string_at
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
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

    def __eq__(self, other: object) -> bool:
        """Whether no generator was used between the two."""
        return isinstance(other, RngState) and self._values() == other._values()

    def _values(self) -> list[object]:
        states = [self.cpu] if self.device is None else [self.cpu, self.device]  # both on the host
        numpy = [] if self.numpy is None else [self.numpy[1].tobytes(), *self.numpy[2:]]
        return [*(string_at(state.data_ptr(), state.nbytes) for state in states), self.python, *numpy]

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(self.device_type).set_rng_state(self.device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


Generator = Any  # of torch, of Python or of NumPy: these have no type in common


def is_generator(value: object) -> bool:
    """Returns whether a value is a generator of random numbers whose state can be put back."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    is_old_numpy = numpy is not None and isinstance(value, numpy.random.RandomState)
    return isinstance(value, torch.Generator) or is_old_numpy or _is_new_numpy(value)


def _is_new_numpy(generator: Generator) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(generator, numpy.random.Generator)


class OwnGenerator:
    """The state of a generator that code has for itself."""

    def __init__(self, generator: Generator):
        self.generator = generator
        self.state = self._read()

    def _read(self) -> Any:
        if _is_new_numpy(self.generator):
            return deepcopy(self.generator.bit_generator.state)
        return self.generator.getstate() if isinstance(self.generator, random.Random) else self.generator.get_state()

    @property
    def is_changed(self) -> bool:
        """Whether it was used since."""
        return _flat(self._read()) != _flat(self.state)

    def restore(self) -> None:
        """Puts the state back."""
        if _is_new_numpy(self.generator):
            self.generator.bit_generator.state = deepcopy(self.state)
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(self.state)
        else:
            self.generator.set_state(self.state)


def _flat(state: Any) -> Any:
    """Returns a state without tensors and arrays, whose `==` is no single answer."""
    if isinstance(state, Tensor):
        return string_at(state.data_ptr(), state.nbytes)
    if isinstance(state, dict):
        return {key: _flat(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_flat, state))
    return state.tobytes() if hasattr(state, "tobytes") else state
