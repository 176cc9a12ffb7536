"""`quarantine.jsonl`: the rows of a dataset that were proved to be the cause of a bad step, one a line.

    {"schema": 1, "run": "7f3a91c2", "time": "2026-11-18T03:50:43Z", "row": 1017, "dataset": "2000-5be1c0a9d2f3e477",
     "content": "90c1e4f2ab3377d0", "signal": "loss_nonfinite", "cause": "div_by_zero", "step": 40}

Only plain numbers and names, no text of the data. A file that somebody else has written is data like any other: it is limited in size,
nothing in it is run, and a line that is not such an object is counted and ignored.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...core.event import JsonObject, parse_strict
from ...core.vocabulary import Action, Cause, Signal
from ...safe_files import append_line, make_folder, read_file

FILE = "quarantine.jsonl"
SCHEMA = 1
MAX_BYTES = 16 * 2**20
# A model that is about to overflow does so on some rows first; the others say how a weight became bad, not which row did it.
UNPROVED = {
    str(cause)
    for cause in (
        Cause.FP16_OVERFLOW, Cause.BF16_OVERFLOW, Cause.FP32_OVERFLOW, Cause.EXP_OVERFLOW, Cause.NORM_OVERFLOW, Cause.KL_OVERFLOW,
        Cause.RATIO_OVERFLOW, Cause.PARAM_NONFINITE, Cause.UNINITIALISED_WEIGHT, Cause.OPTIMIZER_STATE,
        Cause.ADAM_EPS_UNDERFLOW, Cause.LR_TOO_HIGH, Cause.TRANSIENT,
    )
}  # fmt: skip
SPIKES = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)  # finite: a row that causes one may be hard, or new, and not bad
NO_CONTENTS: Mapping[int, str] = MappingProxyType({})
OF_DATA = ("input", "forward", "loss", "backward")  # phases; a bad parameter is not the fault of the row that uses it


@dataclass(frozen=True)
class QuarantinedRow:
    row: int  # of the dataset as the trainer was given it
    dataset: str  # its fingerprint
    signal: str
    cause: str | None
    step: int
    run: str
    content: str | None = None  # a digest of the row, if it can be read


def find_proved_rows(event: Mapping[str, Any]) -> list[int]:
    """Returns the rows that an event proves to be the cause; none if others share it, or if it was not tested.

    Proved by an autopsy: these samples suffice to reproduce the fault in every replay, and the others of the batch, or other
    micro-batches, are finite. Proved by the examination of a spike: its verdict is `rows`.
    """
    values, culprit = event.get("values") or {}, event.get("culprit") or {}
    examination, autopsy = values.get("examination") or {}, values.get("autopsy") or {}
    if examination.get("verdict") == "rows":
        return list(examination["rows"])
    is_proved = autopsy.get("scope") == "samples" and autopsy.get("reproducible") is True
    is_of_data = culprit.get("phase") in OF_DATA and event.get("cause") not in UNPROVED
    is_window = event.get("action") == Action.REWOUND  # its rows are all that were used since the snapshot
    return list(culprit.get("rows") or []) if is_proved and is_of_data and not is_window else []


def quarantine_rows(
    folder: Path, rows: Iterable[int], dataset: str, signal: Signal, step: int, run: str, cause: Cause | None = None,
    contents: Mapping[int, str] = NO_CONTENTS,
) -> list[int]:  # fmt: skip
    """Appends rows to the file of a folder and returns those that were not in it yet, or for a finite spike only.

    Rows are those of the dataset as the trainer was given it; `dataset` is its fingerprint. `signal` and `cause` say what they
    have caused, `step` when (0 before a run). `contents` are digests of the rows: one that has changed by the next run is
    trained on. Raises an `OSError` if the file cannot be written.
    """
    entries = [entry for entry in read_quarantine(folder)[0] if entry.dataset == dataset]
    known = {(entry.row, entry.content) for entry in entries if entry.signal not in SPIKES or signal in SPIKES}
    added = [row for row in dict.fromkeys(rows) if (row, contents.get(row)) not in known]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    for row in added:
        entry = {
            "schema": SCHEMA, "run": run, "time": now, "row": row, "dataset": dataset, "content": contents.get(row),
            "signal": str(signal), "cause": None if cause is None else str(cause), "step": step,
        }  # fmt: skip
        make_folder(folder)
        append_line(folder / FILE, (json.dumps(entry) + "\n").encode("ascii"), private=True)
    return added


def read_quarantine(folder: Path) -> tuple[list[QuarantinedRow], str | None]:
    """Returns the rows in the file of a folder, and what is wrong with the file; a file that is not there has no rows."""
    try:
        lines = read_file(folder / FILE, MAX_BYTES).splitlines()
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError) as error:
        return [], f"it cannot be read ({error})"
    found = [_parse(line) for line in lines if line.strip()]
    entries = [entry for entry in found if entry is not None]
    num_bad = len(found) - len(entries)
    return entries, f"{num_bad} of its lines {'is' if num_bad == 1 else 'are'} no entry" if num_bad else None


def _parse(line: bytes) -> QuarantinedRow | None:
    try:
        item: JsonObject = parse_strict(line)
    except ValueError:
        return None
    if not isinstance(item, dict) or item.get("schema") != SCHEMA:
        return None
    entry = QuarantinedRow(*(item.get(name) for name in QuarantinedRow.__dataclass_fields__))  # type: ignore[arg-type]
    is_whole = all(type(number) is int and number >= 0 for number in (entry.row, entry.step))
    is_text = all(isinstance(text, str) for text in (entry.dataset, entry.signal, entry.run))
    may_be_text = all(isinstance(text, (str, type(None))) for text in (entry.cause, entry.content))
    return entry if is_whole and is_text and may_be_text else None
