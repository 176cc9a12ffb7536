"""Facts of a bundle that anybody may have written: read with their types checked, and refused in one sentence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import huggingface_hub.constants
from transformers.utils import logging

from ..errors import ArgumentError
from ..plain_text import format_error

Kind = TypeVar("Kind")
Facts = Mapping[str, object]


def take(facts: Facts, name: str, kind: type[Kind]) -> Kind | None:
    """Returns a fact, `None` if it was not recorded, or raises an [`ArgumentError`] if it is not of the given type."""
    value = facts.get(name)
    if value is not None and not isinstance(value, kind):
        raise ArgumentError(f"The bundle's fact {name!r} must be a {kind.__name__}, got {str(value)[:60]!r}.")
    return value


def take_names(facts: Facts, name: str) -> list[str] | None:
    """Returns a fact that is a list of names, `None` if it was not recorded."""
    names = take(facts, name, list)
    if names is not None and not all(isinstance(item, str) for item in names):
        raise ArgumentError(f"The bundle's fact {name!r} must be a list of names, got {str(names)[:60]!r}.")
    return names


def needs_factory(reason: str) -> ArgumentError:
    """Returns the error that says why a bundle's model or loss cannot be rebuilt, and what to do."""
    return ArgumentError(
        f"{reason}. Pass --factory module:function, a function of yours that builds the model and the loss."
    )


@contextmanager
def foreign_code(failure: str) -> Iterator[None]:
    """Runs host libraries and the user's code on values that anybody may have written: off the network whatever the
    environment says, without banners, and with any error as one sentence that begins with `failure`."""
    offline, verbosity = huggingface_hub.constants.HF_HUB_OFFLINE, logging.get_verbosity()
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    try:
        yield
    except ArgumentError:
        raise
    except Exception as error:
        raise needs_factory(f"{failure} ({format_error(error, 200)})") from error
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
