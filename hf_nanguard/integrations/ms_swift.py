"""The guard as a callback of ms-swift, registered by a file of `--external_plugins`.

# guard.py
from hf_nanguard.integrations.ms_swift import register

register()

swift sft ... --external_plugins guard.py --callbacks nanguard
"""

import json
import logging
from pathlib import Path

from ..hf.callbacks import NanGuardCallback
from ..hf.callbacks.harmless_callback import harmless
from ..hf.compat.prepared_dataset import record_files
from ..hf.compat.trainer import find_trainer
from ..hf.trainer.arguments import Given, read_guard_arguments
from ..safe_files import read_file

logger = logging.getLogger("hf_nanguard")

NAME = "nanguard"
MAX_BYTES = 2**20  # of the arguments that ms-swift has saved


@harmless
class SwiftGuardCallback(NanGuardCallback):
    """The guard, which is told the files of the dataset: ms-swift hands its trainer no record of them."""

    def on_init_end(self, args, state, control, **kwargs):
        super().on_init_end(args, state, control, **kwargs)
        trainer = find_trainer()
        if trainer is not None:
            record_files(trainer.train_dataset, list_sources(Path(args.output_dir)))
            logger.warning(
                "hf_nanguard: %s is guarded. Dataset rows in events are rows of the dataset that ms-swift has prepared, which "
                "it shuffles before training.",
                type(trainer).__name__,
            )


def list_sources(folder: Path) -> list[str]:
    """Returns what a run of ms-swift names as its data, by the arguments that it has saved in its output folder before it builds
    its trainer: files, folders, or datasets of the hub. To it, `rows.jsonl#500` are 500 rows."""
    file = folder / "args.json"
    saved = json.loads(read_file(file, MAX_BYTES)) if file.is_file() else {"dataset": []}
    return [source.partition("#")[0] for source in saved["dataset"]]


def register(guard: Given = None) -> None:
    """Adds `nanguard`, with these settings, to the callbacks that `swift --callbacks` knows."""
    from swift.callbacks import callbacks_map

    settings = read_guard_arguments(guard)

    def make(args: object, trainer: object) -> NanGuardCallback:
        return SwiftGuardCallback(settings)

    callbacks_map[NAME] = make
