"""Writes a bundle: a folder with one bad micro-batch and what is known about it, for a colleague or for later."""

import errno
import json
import os
import shutil
from contextlib import suppress
from glob import escape
from itertools import count
from pathlib import Path
from typing import Any

from ...settings import SETTINGS
from ..evidence.suspect_batch import SuspectBatch
from ..evidence.verdict import Verdict
from .content import MAX_FACTS, MAX_LEVELS, gather_content, measure_depth, show_bytes
from .readme import write_readme
from .tensor_file import save_tensors

WEIGHTS = SETTINGS["bundle_weights"].choices
MAX_BYTES = 2 * 2**30
SPARE_BYTES = 2**20  # for the file system's own needs


def write_bundle(
    folder: Path, suspect: SuspectBatch, verdict: Verdict, facts: dict[str, Any], *, weights: str = "none",
    text: bool = True, max_bytes: int = MAX_BYTES,
) -> Path:  # fmt: skip
    """Writes a bundle, whole or not at all.

    Args:
        folder (`Path`):
            Where, e.g. `autopsy/step-42`. If it is there already, `step-42-2` is taken, and so on.
        specimen (`SuspectBatch`):
            The micro-batch.
        verdict (`Verdict`):
            What the autopsy found.
        facts (`dict`):
            What else a replay needs to know, as JSON values; `"versions"` among them join the versions noted here.
        weights (`str`, *optional*, defaults to `"none"`):
            `"none"`, `"trainable"` or `"all"`. A parameter that the verdict names is kept in any case.
        text (`bool`, *optional*, defaults to `True`):
            Whether decoded text may be inside. Token ids are, in any case.
        max_bytes (`int`, *optional*, defaults to 2 GiB):
            What all tensors together may take. Weights that do not fit are left out, and so are inputs, but for the
            culprit samples if these are known and fit.

    Returns:
        `Path`: the folder that was written.

    Raises:
        ArgumentError: `weights` is not one of the three.
        OSError: The disk is full or cannot be written. Nothing is left behind then.

    Example:

    ```python
    path = write_bundle(Path("autopsy/step-42"), specimen, verdict, {"step": 42})
    read_bundle(path).inputs
    ```
    """
    SETTINGS["bundle_weights"].check(weights, "weights")
    content = gather_content(suspect, verdict, facts, _find_step(folder.name), weights, text, max_bytes)
    document = _encode(content.facts)
    readme = write_readme(content, text)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    _check_space(folder.parent, content.num_bytes + len(document) + len(readme))
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        draft.mkdir()
        (draft / "facts.json").write_bytes(document)
        (draft / "README.md").write_text(readme, encoding="utf-8", errors="backslashreplace")
        for name, tensors in content.files.items():
            save_tensors(draft / name, tensors)
            with suppress(PermissionError):  # safetensors lets only the owner read; a colleague should, too
                shutil.copymode(draft / "facts.json", draft / name)
        return _publish(draft, folder)
    except BaseException:  # also an interrupt: half a bundle helps nobody
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _find_step(name: str) -> int:
    """Returns the step a folder is named after, 0 if it has a name of its own."""
    digits = name.removeprefix("step-").split("-")[0]
    return int(digits) if digits.isdecimal() else 0


def clear_leftovers(folder: Path) -> None:
    """Removes what processes that are no more have left of a bundle of this name."""
    for draft in folder.parent.glob(f".{escape(folder.name)}.*.partial"):
        owner = draft.name.split(".")[-2]
        if owner.isdecimal() and (int(owner) == os.getpid() or not _is_running(int(owner))):
            shutil.rmtree(draft, ignore_errors=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # elsewhere signal 0 is not a question
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _encode(facts: dict[str, Any]) -> bytes:
    """Returns facts as strict JSON; a value that JSON does not know is named by its type."""
    if measure_depth(facts) > MAX_LEVELS:
        raise OSError(errno.EFBIG, f"The facts of a bundle are nested deeper than {MAX_LEVELS} levels.")
    text = json.dumps(facts, allow_nan=False, indent=1, default=lambda value: f"[left out: {type(value).__name__}]")
    if len(text) > MAX_FACTS:
        raise OSError(errno.EFBIG, f"The facts of a bundle take {show_bytes(len(text))}, more than it may hold.")
    return text.encode("ascii")


def _check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"A bundle of {show_bytes(size)} needs more room than the {show_bytes(free)} free",
            str(folder),
        )


def _publish(draft: Path, folder: Path) -> Path:
    """Gives the finished folder its name, or the next free one after it."""
    for number in count(1):
        final = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if os.path.lexists(final):
            continue
        try:
            return draft.rename(final)
        except OSError as err:  # another process was faster
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
    raise AssertionError("unreachable")
