"""The guard as a callback of ms-swift, registered by a file of `--external_plugins`.

# guard.py
from hf_nanguard.integrations.ms_swift import register

register()

swift sft ... --external_plugins guard.py --callbacks nanguard
"""

from typing import Any

from ..hf.callbacks import NanGuardCallback
from ..hf.trainer.arguments import Given, read_guard_arguments

NAME = "nanguard"


def register(guard: Given = None) -> None:
    """Adds `nanguard`, with these settings, to the callbacks that `swift --callbacks` knows."""
    from swift.callbacks import callbacks_map

    settings = read_guard_arguments(guard)

    def make(args: Any, trainer: Any) -> NanGuardCallback:
        return NanGuardCallback(settings)

    callbacks_map[NAME] = make
