"""The guard as a callback of ms-swift, registered by a file of `--external_plugins`.

# guard.py
from hf_nanguard.integrations.ms_swift import register

register()

swift sft ... --external_plugins guard.py --callbacks nanguard
"""

import logging
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from ..hf.callbacks import NanGuardCallback
from ..hf.callbacks.harmless_callback import harmless
from ..hf.compat.prepared_dataset import record_files
from ..hf.compat.trainer import find_trainer
from ..hf.trainer.arguments import Given, read_guard_arguments

logger = logging.getLogger("hf_nanguard")

NAME = "nanguard"


@harmless
class SwiftGuardCallback(NanGuardCallback):
    """The guard, which is told the files of the dataset: ms-swift hands its trainer no record of them."""

    def on_init_end(self, args, state, control, **kwargs):
        super().on_init_end(args, state, control, **kwargs)
        trainer = find_trainer()
        if trainer is not None:
            record_files(trainer.train_dataset, list_files(sys.argv))
            logger.warning(
                "hf_nanguard: %s is guarded. Dataset rows in events are rows of the dataset that ms-swift has prepared, which "
                "it shuffles before training.",
                type(trainer).__name__,
            )


def list_files(words: Sequence[str]) -> list[str]:
    """Returns the data files on this machine that a command line of ms-swift names. To it, `rows.jsonl#500` are 500 rows."""
    behind = words[words.index("--dataset") + 1 :] if "--dataset" in words else []
    named = [word.partition("#")[0] for word in takewhile(lambda word: not word.startswith("--"), behind)]
    return [name for name in named if Path(name).is_file()]


def register(guard: Given = None) -> None:
    """Adds `nanguard`, with these settings, to the callbacks that `swift --callbacks` knows."""
    from swift.callbacks import callbacks_map

    settings = read_guard_arguments(guard)

    def make(args: object, trainer: object) -> NanGuardCallback:
        return SwiftGuardCallback(settings)

    callbacks_map[NAME] = make
