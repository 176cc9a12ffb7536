"""quarantine.jsonl: what is written, what counts as proof, and files that somebody else has written."""

import json
import os

import pytest

from hf_nanguard.core.vocabulary import Cause, Signal
from hf_nanguard.hf.data.quarantine_file import FILE, MAX_BYTES, find_proved_rows, quarantine_rows, read_quarantine

GIVEN = {"dataset": "8-abc", "signal": Signal.LOSS_NONFINITE, "step": 4, "run": "r1", "cause": Cause.DIV_BY_ZERO}


def test_rows_are_written_once_and_read_back(tmp_path):
    assert quarantine_rows(tmp_path, [3, 5, 3], **GIVEN) == [3, 5]
    assert quarantine_rows(tmp_path, [5, 6], **GIVEN) == [6]
    assert quarantine_rows(tmp_path, [5], **{**GIVEN, "dataset": "9-other"}) == [5]
    entries, why = read_quarantine(tmp_path)
    assert [(entry.row, entry.dataset) for entry in entries] == [
        (3, "8-abc"),
        (5, "8-abc"),
        (6, "8-abc"),
        (5, "9-other"),
    ]
    assert (entries[0].signal, entries[0].cause, entries[0].step, entries[0].run) == (
        "loss_nonfinite",
        "div_by_zero",
        4,
        "r1",
    )
    assert why is None
    if os.name == "posix":
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_row_known_for_a_finite_spike_is_added_again_when_more_is_proved(tmp_path):
    spike = {**GIVEN, "signal": Signal.LOSS_SPIKE, "cause": None}
    assert quarantine_rows(tmp_path, [3], **spike) == [3]
    assert quarantine_rows(tmp_path, [3], **{**spike, "signal": Signal.GRAD_SPIKE}) == []
    assert quarantine_rows(tmp_path, [3], **GIVEN) == [3]
    assert quarantine_rows(tmp_path, [3], **spike) == []


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_quarantine(tmp_path) == ([], None)


LINES = [
    b"\x00\xff\xfe", b"[" * 5000, b"NaN", b'{"schema": 1}', b"__import__('os').system('id')",
    b'{"schema": 1, "run": "r", "row": -1, "dataset": "8-abc", "signal": "x", "cause": null, "step": 1}',
    b'{"schema": 1, "run": "r", "row": true, "dataset": "8-abc", "signal": "x", "cause": null, "step": 1}',
    b'{"schema": 1, "run": "r", "row": 1e9, "dataset": "8-abc", "signal": "x", "cause": null, "step": 1}',
    b'{"schema": 2, "run": "r", "row": 1, "dataset": "8-abc", "signal": "x", "cause": null, "step": 1}',
]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_line_that_is_no_entry_is_ignored(line, tmp_path):
    quarantine_rows(tmp_path, [3], **GIVEN)
    with (tmp_path / FILE).open("ab") as file:
        file.write(line + b"\n")
    entries, why = read_quarantine(tmp_path)
    assert [entry.row for entry in entries] == [3]
    assert why == "1 of its lines is no entry"


def test_a_file_that_is_too_large_or_no_file_is_not_read(tmp_path):
    (tmp_path / FILE).write_bytes(b" " * (MAX_BYTES + 1))
    assert read_quarantine(tmp_path)[1].startswith("it cannot be read (larger")
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    assert read_quarantine(tmp_path)[1].startswith("it cannot be read")


def event(scope="samples", phase="loss", cause="div_by_zero", reproducible=True, action="dropped"):
    autopsy = {"scope": scope, "reproducible": reproducible}
    culprit = {"rows": [7], "phase": phase}
    return {"values": {"autopsy": autopsy}, "culprit": culprit, "cause": cause, "action": action}


def test_an_autopsy_proves_rows_if_these_samples_suffice_in_every_replay():
    assert find_proved_rows(event()) == [7]


@pytest.mark.parametrize(
    "change",
    [
        {"scope": "untried"}, {"scope": "every_sample"}, {"scope": "only_sample"}, {"scope": "batch"},
        {"phase": "parameter"}, {"phase": "optimizer"}, {"reproducible": False}, {"reproducible": None},
        {"cause": "fp16_overflow"}, {"cause": "uninitialised_weight"}, {"cause": "transient"},
        {"action": "rewound"},
    ],
    ids=str,
)  # fmt: skip
def test_anything_less_proves_nothing(change):
    assert find_proved_rows(event(**change)) == []


def test_the_examination_of_a_spike_proves_rows_only_with_that_verdict():
    for verdict, rows in (("rows", [7]), ("batch", []), (None, [])):
        examination = {"verdict": verdict, "rows": [7]}
        window = {"rows": [5, 6, 7, 8]}  # of an event that was answered by a rewind
        assert find_proved_rows({"values": {"examination": examination}, "culprit": window}) == rows
    assert find_proved_rows({"values": {}, "culprit": None}) == []


def test_what_is_written_has_no_text_of_the_data(tmp_path):
    quarantine_rows(tmp_path, [3], **GIVEN)
    entry = json.loads((tmp_path / FILE).read_text())
    assert set(entry) == {"schema", "run", "time", "row", "dataset", "content", "signal", "cause", "step"}
