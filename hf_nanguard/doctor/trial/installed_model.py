"""A model built once more from the installed file of transformers, where nothing is patched, with the weights of the first."""

import copy
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel

from ..trial.law_result import NotApplicable


def build_again(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same class name, made by a fresh copy of the file that defines it. It shares the weights of the first."""
    with _imported_again(type(model).__module__) as module:
        cls = getattr(module, type(model).__name__, None)
        if cls is None:
            raise NotApplicable(f"the installed file does not define {type(model).__name__}")
        other: PreTrainedModel = cls(copy.deepcopy(model.config))
    other.load_state_dict(model.state_dict(), assign=True)
    other.tie_weights()
    for (_, mine), (_, own) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        mine.requires_grad_(own.requires_grad)
    nn.Module.to(other, model.device)
    return other


@contextmanager
def _imported_again(name: str) -> Iterator[ModuleType]:
    """Runs the file of an installed module under another name, by which it is found inside the block only."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise NotApplicable(f"the file of {name} cannot be found")
    again = importlib.util.spec_from_file_location(f"{name}_as_installed", spec.origin)
    if again is None or again.loader is None:
        raise NotApplicable(f"the file of {name} cannot be read")
    module = importlib.util.module_from_spec(again)
    sys.modules[again.name] = module  # where its dataclasses, and the hosts, look for the module of a class
    try:
        again.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[again.name]
