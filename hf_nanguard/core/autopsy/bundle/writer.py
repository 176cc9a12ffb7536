"""Writes a bundle: a folder with one bad micro-batch and what is known about it."""

import errno
import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from glob import escape
from itertools import count
from pathlib import Path

from ...event import JsonObject
from ...settings import SETTINGS
from ..evidence.suspect_batch import SuspectBatch
from ..evidence.verdict import Verdict
from .content import MAX_FACTS, format_bytes, gather_content
from .readme import format_readme
from .tensor_file import count_bytes, save_tensors

WEIGHTS = SETTINGS["bundle_weights"].choices
MAX_BYTES = 2 * 2**30
SPARE_BYTES = 2**20  # for the file system itself


def write_bundle(
    folder: Path, suspect: SuspectBatch, verdict: Verdict, facts: JsonObject, *, weights: str = "none",
    text: bool = True, max_bytes: int = MAX_BYTES,
) -> Path:  # fmt: skip
    """Writes a bundle completely or not at all, also if the disk is full, and returns its folder.

    If the folder, e.g. `autopsy/step-42`, exists, `step-42-2` is used, and so on. `facts` are what a replay needs to rebuild
    model and loss, as JSON values without training data; `"versions"` among them are added to those recorded here. A
    parameter that the verdict names is saved whatever `weights` are asked for. Token ids are saved also without `text`.
    Weights beyond `max_bytes` are left out; of inputs beyond it only the culprit samples are saved, if known and not too large.
    """
    SETTINGS["bundle_weights"].check(weights, "weights")
    if not text:
        verdict = replace(verdict, blame=replace(verdict.blame, texts={}))
    facts, files = gather_content(suspect, verdict, facts, _find_step(folder.name), weights, text, max_bytes)
    document, readme = _encode(facts), format_readme(verdict, facts, list(files.get("weights.safetensors", ())), text)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    num_bytes = sum(count_bytes(tensors.values()) for tensors in files.values())
    _check_space(folder.parent, num_bytes + len(document) + len(readme))
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        draft.mkdir()
        (draft / "facts.json").write_bytes(document)
        (draft / "README.md").write_text(readme, encoding="utf-8", errors="backslashreplace")
        for name, tensors in files.items():
            save_tensors(draft / name, tensors)
            with suppress(PermissionError):  # safetensors lets only the owner read; a colleague should as well
                shutil.copymode(draft / "facts.json", draft / name)
        return _publish(draft, folder)
    except BaseException:  # also an interrupt: no incomplete bundle is left behind
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _find_step(name: str) -> int:
    """Returns the step in the name of a folder, 0 if there is none."""
    digits = name.removeprefix("step-").split("-")[0]
    return int(digits) if digits.isdecimal() else 0


def clear_leftovers(folder: Path) -> None:
    """Removes incomplete bundles of this name that processes which have ended left behind."""
    for draft in folder.parent.glob(f".{escape(folder.name)}.*.partial"):
        owner = draft.name.split(".")[-2]
        if owner.isdecimal() and (int(owner) == os.getpid() or not _is_running(int(owner))):
            shutil.rmtree(draft, ignore_errors=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # elsewhere signal 0 ends the process
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True


def _encode(facts: JsonObject) -> bytes:
    """Returns facts as strict JSON; a value that JSON does not support is replaced by its type."""
    text = json.dumps(facts, allow_nan=False, indent=1, default=lambda value: f"[left out: {type(value).__name__}]")
    if len(text) > MAX_FACTS:
        raise OSError(errno.EFBIG, f"The facts of a bundle take {format_bytes(len(text))}, more than allowed.")
    return text.encode("ascii")


def _check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"A bundle of {format_bytes(size)} does not fit into the {format_bytes(free)} of free disk space",
            str(folder),
        )


def _publish(draft: Path, folder: Path) -> Path:
    """Renames the finished folder to its final name, or to the next free one."""
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
