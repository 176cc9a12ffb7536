"""A model whose forward draws no random numbers: rates of dropout, layer drop and jitter are 0 for a while, and weights of
auxiliary losses too."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ...own_fields import own_fields

RANDOM = ("drop", "jitter")
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
AUXILIARY = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")


def _is_rate(owner: object, name: str) -> bool:
    return any(part in name.lower() for part in RANDOM) or (name == "p" and isinstance(owner, DROPOUTS))


def has_rate(module: nn.Module) -> bool:
    """Returns whether a module has a rate of dropout that is not 0."""
    return any(
        type(value) is float and value > 0 and _is_rate(module, name) for name, value in own_fields(module).items()
    )


@contextmanager
def without_randomness(owners: list[object], auxiliary: float = 0.0) -> Iterator[None]:
    """Sets these rates to 0 in modules, configs and other objects inside the block, and multiplies the weights of auxiliary losses by
    `auxiliary`."""
    found = [
        (each, name, value)
        for each in owners
        for name, value in own_fields(each).items()
        if type(value) is float and value and (_is_rate(each, name) or name in AUXILIARY)
    ]
    for each, name, value in found:
        own_fields(each)[name] = value * auxiliary if name in AUXILIARY else 0.0
    try:
        yield
    finally:
        for each, name, value in found:
            own_fields(each)[name] = value
