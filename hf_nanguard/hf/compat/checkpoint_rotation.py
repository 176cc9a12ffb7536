"""The Trainer's rotation of checkpoints: which ones it deletes after a save (`save_total_limit`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from transformers import Trainer
from transformers import trainer as trainer_module
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints


def checkpoint_folder(trainer: Trainer, trial: Any) -> Path:
    """Returns where the Trainer saves the checkpoint of the current step.

    Can go when the Trainer tells its callbacks.
    """
    return Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


@contextmanager
def deferred_rotation() -> Iterator[list[dict[str, Any]]]:
    """Holds back the host's rotation of checkpoints inside the block; yields the list of its calls, for [`rotate`].

    Can go when the Trainer asks somebody which checkpoints to delete.
    """
    calls: list[dict[str, Any]] = []
    original: Any = trainer_module.rotate_checkpoints
    trainer_module.rotate_checkpoints = lambda **call: calls.append(call)  # type: ignore[assignment]
    try:
        yield calls
    finally:
        trainer_module.rotate_checkpoints = original


def rotate(call: dict[str, Any], protected: set[Path]) -> None:
    """Deletes the checkpoints that the host would, except the protected ones, which do not count for its limit.

    Can go when `rotate_checkpoints` takes several checkpoints to protect.
    """
    found = [Path(each) for each in sort_checkpoints(call["output_dir"], use_mtime=call.get("use_mtime", False))]
    kept = {path.absolute() for path in protected} & {path.absolute() for path in found[:-1]}
    if not kept:
        trainer_module.rotate_checkpoints(**call)
        return
    limit, best = call.get("save_total_limit"), call.get("best_model_checkpoint")
    if limit is None or limit <= 0:
        return
    others = [each for each in found if each.absolute() not in kept]
    old = [each for each in others[:-1] if best is None or each != Path(best)]
    for each in old[: max(len(others) - limit, 0)]:
        rmtree(each, ignore_errors=True)
