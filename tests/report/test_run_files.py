"""JSONL files: appended, flushed, strict, readable after a crash."""

import json
import os
import signal
import subprocess
import sys
import tracemalloc

import pytest

from hf_nanguard.report import run_files
from hf_nanguard.report.run_files import (
    FollowedFile,
    JsonlWriter,
    Tail,
    events_path,
    read_events,
    read_jsonl,
    read_lines,
)
from hf_nanguard.testing import INF, NAN
from tests.test_safe_files import ODD, plant_odd

HOSTILE = 'line\nbreak\r\n\u2028\u2029\x85\x0b\x0c\x1c\x00 é 漢 \U0001f4a5 \ud800 " \\ </script> {"a":1}'


def test_nothing_is_made_before_the_first_object(tmp_path):
    JsonlWriter(tmp_path / "nanguard" / "events.jsonl")
    assert list(tmp_path.iterdir()) == []


def contents(path):
    """Returns the objects of a file without the ids of their runs."""
    return [{key: value for key, value in item.items() if key != "run"} for item in read_jsonl(path)]


def test_objects_are_appended_in_order_and_seen_at_once(tmp_path):
    path = tmp_path / "a" / "b" / "events.jsonl"
    writer = JsonlWriter(path)
    for index in range(3):
        writer({"index": index})
        assert [item["index"] for item in read_jsonl(path)] == list(range(index + 1))


def test_a_second_writer_goes_on_where_the_first_ended(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = JsonlWriter(str(path))
    writer({"index": 1})
    writer({"index": 2})
    again = JsonlWriter(path)
    again({"index": 3})
    assert [item["index"] for item in read_jsonl(path)] == [1, 2, 3]
    first, second, third = (item["run"] for item in read_jsonl(path))
    assert first == second != third, "each writer is another run"


def test_events_of_the_last_run_are_read_by_default(tmp_path):
    folder = tmp_path / "nanguard"
    for run in ("a", "b"):
        for step in range(2):
            JsonlWriter(folder / "events.jsonl", run)({"step": step, "signal": run})
    for path in (tmp_path, folder, folder / "events.jsonl"):
        assert [event["signal"] for event in read_events(path)] == ["b", "b"]
        assert len(read_events(path, every_run=True)) == 4
    assert read_events(tmp_path / "none") == []


def test_a_last_run_without_events_has_none(tmp_path):
    JsonlWriter(tmp_path / "events.jsonl", "a")({"step": 1})
    for run in ("a", "b"):
        JsonlWriter(tmp_path / "metrics.jsonl", run)({"loss": 1.0})
    assert read_events(tmp_path) == []
    JsonlWriter(tmp_path / "events.jsonl", "c")({"step": 2})  # it has not logged a row yet
    assert [event["step"] for event in read_events(tmp_path)] == [2]


def test_hostile_text_stays_on_its_line_and_comes_back(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = JsonlWriter(path)
    writer({"message": HOSTILE, HOSTILE: 1})
    writer({"message": "next"})
    assert path.read_bytes().count(b"\n") == 2
    assert contents(path) == [{"message": HOSTILE, HOSTILE: 1}, {"message": "next"}]


@pytest.mark.parametrize("value", [NAN, INF, -INF, [NAN], {"deep": {"er": INF}}])
def test_a_nonfinite_number_is_refused_and_leaves_no_half_line(tmp_path, value):
    path = tmp_path / "events.jsonl"
    writer = JsonlWriter(path)
    writer({"good": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        writer({"bad": value})
    writer({"good": 2})
    assert contents(path) == [{"good": 1}, {"good": 2}]


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path, cut):
    path = tmp_path / "events.jsonl"
    whole = json.dumps({"first": 1}) + "\n"
    last = json.dumps({"second": 22})
    path.write_text(whole + last[:cut], encoding="utf-8")
    assert contents(path) == [{"first": 1}]


def test_a_resumed_run_goes_on_after_a_cut_line(tmp_path):
    """What comes after the crash must not be glued to the half line, and all whole lines must stay readable."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"first": 1}\n{"second": 2, "hal', encoding="utf-8")
    writer = JsonlWriter(path)
    writer({"third": 3})
    writer({"fourth": 4})
    assert contents(path) == [{"first": 1}, {"third": 3}, {"fourth": 4}]


BAD_LINES = {
    "not json": b"not json",
    "cut": b'{"a": 1',
    "a list": b"[1, 2]",
    "a number": b"3",
    "null": b"null",
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "beyond a float": b'{"a": 1e999}',
    "a huge integer": b'{"a": ' + b"9" * 5000 + b"}",
    "invalid utf-8": b'{"a": "\xff\xfe"}',
    "too deep": b'{"a":' * 100_000,
    "zeros": b"\0" * 50,
    "glued": b'{"a": 1}{"b": 2}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_skipped_and_counted(line, tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"first": 1}\n' + line + b'\n\n{"third": 3}\n' + line)
    assert read_lines(path) == ([{"first": 1}, {"third": 3}], 2)
    assert read_events(tmp_path, every_run=True) == [{"first": 1}, {"third": 3}]
    assert f"skipped 2 incomplete or invalid lines of {path}" in caplog.text


def test_healthy_lines_are_not_counted(tmp_path, caplog):
    JsonlWriter(tmp_path / "events.jsonl")({"big": 2**60, "small": 1e-300})
    assert read_lines(tmp_path / "events.jsonl")[1] == 0
    assert read_events(tmp_path)[0]["big"] == 2**60
    assert caplog.text == ""


def test_a_tail_leaves_out_earlier_objects_and_cut_lines(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.write_text('{"old": 1}\n{"cut', encoding="utf-8")
    tail = Tail(path)
    assert tail.read() == []
    JsonlWriter(path, "a")({"new": 1})
    assert tail.read() == [{"run": "a", "new": 1}]
    assert caplog.text == "", "it is read again and again"


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_a_regular_file_is_refused_once_and_the_run_goes_on(kind, tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    is_unharmed = plant_odd(kind, path)
    writer = JsonlWriter(path)
    for index in range(3):
        writer({"index": index})
    assert is_unharmed()
    [line] = [record.getMessage() for record in caplog.records]
    assert f"cannot write to {path}" in line
    assert ("Is a directory" if kind == "folder" else "not a regular file") in line


def test_a_pipe_in_the_place_of_a_file_does_not_block_a_reader(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    assert read_events(tmp_path) == []


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    """At most one line's length of a file is held, whatever its size; a 3 GiB hole in a file is one line."""
    monkeypatch.setattr(run_files, "MAX_LINE", 1000)
    path = tmp_path / "events.jsonl"
    followed = FollowedFile(path)
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate(10_000_000)
    tracemalloc.start()
    assert followed.read() == [{"a": 1}]
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    with path.open("ab") as file:
        file.write(b'\n{"a": 2}\n{"a": 3')
    assert followed.read() == [{"a": 2}]
    assert followed.num_invalid > 1
    with path.open("ab") as file:
        file.write(b"}\n")
    assert followed.read() == [{"a": 3}]


def test_an_empty_file_has_no_objects(tmp_path):
    (tmp_path / "events.jsonl").touch()
    assert list(read_jsonl(tmp_path / "events.jsonl")) == []


def test_a_killed_process_loses_nothing_it_has_written(tmp_path):
    path = tmp_path / "events.jsonl"
    script = (
        "import os, signal; from hf_nanguard.report.run_files import JsonlWriter\n"
        f"w = JsonlWriter({str(path)!r})\n"
        "for i in range(5): w({'i': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [item["i"] for item in read_jsonl(path)] == list(range(5))


def test_each_rank_has_its_file(tmp_path):
    assert events_path(tmp_path, 0) == tmp_path / "events.jsonl"
    assert events_path(str(tmp_path), 3) == tmp_path / "events-rank3.jsonl"
