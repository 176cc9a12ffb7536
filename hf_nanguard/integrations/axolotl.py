"""The guard as a plugin of axolotl, with its settings as keys of the YAML file.

    plugins:
      - hf_nanguard.integrations.axolotl.NanGuardPlugin
    nanguard_max_bad_steps: 5

`NanGuardPlugin` and `NanGuardSettings` are made when axolotl asks for them, so that nothing here imports axolotl or pydantic before.
"""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import Trainer

from ..core.settings import PREFIX, SETTINGS
from ..hf.attach_guard import attach
from ..hf.compat.prepared_dataset import record_files
from ..hf.trainer.arguments import GuardArguments

logger = logging.getLogger("hf_nanguard")


def find_settings(config: Mapping[str, object]) -> dict[str, Any]:
    """Returns the settings of the guard in an axolotl config; axolotl has `None` for keys that are not there."""
    given = {f"{PREFIX}{name}": config.get(f"{PREFIX}{name}") for name in SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def guard_trainer(config: Mapping[str, Any], trainer: Trainer) -> None:
    """Guards the trainer that axolotl has built, whose dataset no longer has a record of the files it was loaded from."""
    attach(trainer, GuardArguments(**find_settings(config)))
    record_files(trainer.train_dataset, list_sources(config))
    logger.warning(
        "hf_nanguard: %s is guarded. Dataset rows in events are rows of the dataset that axolotl has prepared, which it "
        "shuffles before training.",
        type(trainer).__name__,
    )


def list_sources(config: Mapping[str, Any]) -> list[str]:
    """Returns what an axolotl config names as its data: files, patterns, folders, or datasets of the hub."""
    sources: list[str] = []
    for dataset in config.get("datasets") or ():
        given = dataset.get("data_files") or dataset.get("path")
        sources += [given] if isinstance(given, str) else given or ()
    return sources


@cache
def _make_settings() -> type:
    """Returns the settings as a pydantic model, which checks them when axolotl reads its YAML file."""
    from pydantic import create_model, model_validator

    def check(cls: type, values: object) -> Any:
        if isinstance(values, Mapping):
            GuardArguments(**find_settings(values))  # raises an ArgumentError, which is a ValueError
        return values

    fields: dict[str, Any] = {f"{PREFIX}{name}": (Any, None) for name in SETTINGS}
    before: Any = model_validator(mode="before")
    return create_model(
        "NanGuardSettings", __module__=__name__, __validators__={"check_settings": before(classmethod(check))}, **fields
    )


@cache
def _make_plugin() -> type:
    from axolotl.integrations.base import BasePlugin

    class NanGuardPlugin(BasePlugin):
        """Guards every trainer that axolotl builds."""

        def get_input_args(self) -> str:
            return f"{__name__}.NanGuardSettings"

        def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
            guard_trainer(cfg, trainer)

    return NanGuardPlugin


def __getattr__(name: str) -> Any:
    made = {"NanGuardPlugin": _make_plugin, "NanGuardSettings": _make_settings}
    if name not in made:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return made[name]()
