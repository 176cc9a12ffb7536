"""What a run leaves behind: rows of the log, and a state in checkpoints that nobody's broken file can turn against it."""

import json

import pytest

from hf_nanguard import Guard
from hf_nanguard.hf.trainer.run_record import STATE_FILE, RunRecord, load_guard, save_guard

from ...trainers import build


def test_state_goes_through_a_checkpoint(tmp_path):
    guard = Guard()
    guard.counter.count_microbatches(4, 1)
    guard.norms.add(0, 2.5)
    save_guard(guard, tmp_path)
    again = Guard()
    assert load_guard(again, tmp_path)
    assert again.state_dict() == guard.state_dict()


def test_a_checkpoint_without_a_state_is_none(tmp_path):
    assert not load_guard(Guard(), tmp_path)
    save_guard(Guard(), tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"counter": 3, "norms": {}, "bad_in_a_row": "x"}'])
def test_a_broken_state_is_told_and_left_out(text, tmp_path, caplog):
    (tmp_path / STATE_FILE).write_text(text)
    guard = Guard()
    assert load_guard(guard, tmp_path)
    assert "was not readable" in caplog.text
    assert guard.counter.seen == 0


def test_rows_are_strict_json(tmp_path):
    trainer = build("plain", tmp_path)
    record = RunRecord(trainer, 0)
    trainer.state.log_history.append({"loss": float("nan"), "step": 1})
    record.write_row()
    [line] = (tmp_path / "nanguard" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"run": record.events.run, "loss": "nan", "step": 1}
