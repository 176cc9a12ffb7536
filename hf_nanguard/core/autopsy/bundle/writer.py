"""Writes a bundle: a folder with one bad micro-batch and what is known about it."""

import errno
import json
import os
import shutil
from itertools import count
from pathlib import Path

from ....safe_files import draft_of, make_folder, remove_drafts, write_file
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
    parameter that the verdict names is saved whatever `weights` are asked for. Without `text` nothing readable of the data is saved;
    token ids are.
    Weights beyond `max_bytes` are left out; of inputs beyond it only the culprit samples are saved, if known and not too large.
    """
    SETTINGS["bundle_weights"].check(weights, "weights")
    verdict = verdict.shown(text)
    facts, files = gather_content(suspect, verdict, facts, _find_step(folder.name), weights, text, max_bytes)
    document, readme = _encode(facts), format_readme(verdict, facts, list(files.get("weights.safetensors", ())), text)
    make_folder(folder.parent, private=True)
    remove_drafts(folder.parent)
    num_bytes = sum(count_bytes(tensors.values()) for tensors in files.values())
    _check_space(folder.parent, num_bytes + len(document) + len(readme))
    draft = draft_of(folder)
    try:
        draft.mkdir(0o700)
        write_file(draft / "facts.json", document, private=True)
        write_file(draft / "README.md", readme.encode(errors="backslashreplace"), private=True)
        for name, tensors in files.items():
            save_tensors(draft / name, tensors)
        return _publish(draft, folder)
    except BaseException:  # also an interrupt: no incomplete bundle is left behind
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _find_step(name: str) -> int:
    """Returns the step in the name of a folder, 0 if there is none."""
    digits = name.removeprefix("step-").split("-")[0]
    return int(digits) if digits.isdecimal() else 0


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
