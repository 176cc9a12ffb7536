"""The record of the last good checkpoint: written whole, and anything else in its place is no record."""

import os

import pytest

from hf_nanguard.checkpoints.good_record import FILE, GoodRecord, read_good, write_good

RECORD = GoodRecord(5, "checkpoint-5", "abc", {"loss": 1.0}, ["buffer"])


def test_it_reads_back_as_it_was_written(tmp_path):
    assert read_good(tmp_path) is None
    write_good(tmp_path, RECORD)
    assert read_good(tmp_path) == RECORD


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", "[1]", "\0", '{"step": 1e999}', '{"schema": 1, "step": "x"}'])
def test_a_damaged_one_is_none(content, tmp_path):
    write_good(tmp_path, RECORD)
    (tmp_path / FILE).write_text(content)
    assert read_good(tmp_path) is None


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_does_not_block(kind, tmp_path):
    path = tmp_path / FILE
    path.parent.mkdir()
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    assert read_good(tmp_path) is None
