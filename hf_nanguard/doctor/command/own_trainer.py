"""The trainer of `nanguard doctor --trainer module:function`."""

import importlib
import os
import sys

from transformers import Trainer

from ...errors import ArgumentError
from ...plain_text import format_error


def build_own(target: str) -> Trainer:
    """Calls a function of the user's, given as `module:function`, that returns a trainer."""
    module, _, name = target.partition(":")
    if not name:
        raise ArgumentError(f"--trainer must be MODULE:FUNCTION, got {target!r}. For example my_module:build.")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), name)
        trainer = build()
    except SystemExit as error:
        raise ArgumentError(
            f"--trainer {target} must return a Trainer, but it called sys.exit({error.code!r})."
        ) from error
    except Exception as error:  # code of the user's
        raise ArgumentError(f"--trainer {target} failed ({format_error(error)}).") from error
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"--trainer {target} must return a Trainer, got {type(trainer).__name__}.")
    return trainer
