"""What a run leaves behind: rows of the log, and a state in checkpoints that nobody's broken file can turn against it."""

import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from hf_nanguard import Guard, GuardArguments, NonFiniteError
from hf_nanguard.core.monitors.base import load_whole
from hf_nanguard.hf.custody.checkpoint_custody import CheckpointCustody
from hf_nanguard.hf.data.row_quarantine import RowQuarantine
from hf_nanguard.hf.trainer.run_record import STATE_FILE, RunRecord, load_guard, save_guard
from hf_nanguard.safe_files import find_machine
from hf_nanguard.testing import Fault, plant
from tests.test_safe_files import ODD, plant_odd

from ...laws.ways import params
from ...reference import assert_same, tensors_of
from ...trainers import build, events_of

LAYER = "model.layers.1.mlp.down_proj.weight"
SAVING = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 2}


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


def _changed(path, value):
    """Returns a function that changes a state at a path of keys, without its checksum."""

    def change(state):
        *parents, last = path
        for key in parents:
            state = state[key]
        state[last] = value

    return change


FORGED = {
    "no object": lambda state: [],
    "nothing in it": lambda state: {},
    "a count as text": _changed(("counter", "seen"), "many"),
    "a count that is huge": _changed(("counter", "seen"), 10**400),
    "a counter that is a number": _changed(("counter",), 3),
    "recent as text": _changed(("counter", "recent"), "abc"),
    "recent nested": _changed(("counter", "recent"), [[1], [2]]),
    "terms as lists": _changed(("counter", "terms"), {"a": [1, 2, 3]}),
    "norms as text": _changed(("norms", "values"), ["1.0", "nan"]),
    "norms that are huge": _changed(("norms", "values"), [10**400]),
    "norms nested": _changed(("norms", "values"), [[[[]]]]),
    "floor as text": _changed(("norms", "floor"), "nan"),
    "no norms": _changed(("norms",), None),
    "losses of another kind": _changed(("losses",), []),
    "loss divergence as text": _changed(("losses", "divergence"), {"logs": "x"}),
    "monitors as a list": _changed(("monitors",), [1]),
    "a monitor as a number": _changed(("monitors", "ActivationMonitor"), 5),
    "another schema": _changed(("schema",), "\x1b[31m"),
    "its checksum": _changed(("checksum",), "0" * 64),
}


def _forge(path, change):
    state = json.loads(path.read_text())
    changed = change(state)
    path.write_text(json.dumps(state if changed is None else changed))


BROKEN = {
    **{name: lambda path, change=change: _forge(path, change) for name, change in FORGED.items()},
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "NaN": lambda path: path.write_text(path.read_text().replace('"floor": ', '"floor": NaN, "x": ')),
    "1e999": lambda path: path.write_text(path.read_text().replace('"floor": ', '"floor": 1e999, "x": ')),
    "not utf-8": lambda path: path.write_bytes(b"\xff" * 100),
    "too deep": lambda path: path.write_bytes(b"[" * 100_000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_state_that_is_not_what_was_written_is_reported_and_nothing_of_it_is_used(spoil, tmp_path, caplog):
    written = Guard()
    written.counter.count_microbatches(4, 1)
    written.norms.add(0, 2.5)
    save_guard(written, tmp_path)
    spoil(tmp_path / STATE_FILE)
    guard, fresh = Guard(), Guard().state_dict()
    assert not load_guard(guard, tmp_path)
    assert guard.state_dict() == fresh
    [record] = caplog.records
    assert "was not readable" in record.getMessage()
    assert "start anew" in record.getMessage()


@pytest.mark.parametrize(
    "change", [FORGED[name] for name in ("a counter that is a number", "norms that are huge", "no norms")]
)
def test_a_state_of_another_version_is_loaded_whole_or_not_at_all(change):
    guard, other = Guard(), Guard()
    guard.counter.count_microbatches(2, 1)
    guard.norms.add(0, 1.5)
    before = json.dumps(guard.state_dict())
    other.counter.count_microbatches(9, 9)
    state = other.state_dict()
    change(state)
    with pytest.raises(ValueError, match="Error"):
        load_whole(guard, state)
    assert json.dumps(guard.state_dict()) == before


@pytest.mark.parametrize("name", ["a folder", "norms nested"])
def test_a_run_resumes_as_stock_does_without_a_usable_state(name, tmp_path, caplog):
    trainers = {}
    for kind in ("stock", "guarded"):
        build("plain", tmp_path / kind, guard=kind == "guarded", **SAVING).train()
        if kind == "guarded":
            BROKEN[name](tmp_path / kind / "checkpoint-2" / STATE_FILE)
        trainers[kind] = build("plain", tmp_path / kind, guard=kind == "guarded", **SAVING)
        trainers[kind].train(resume_from_checkpoint=str(tmp_path / kind / "checkpoint-2"))
    assert_same(tensors_of(trainers["guarded"]), tensors_of(trainers["stock"]))
    assert "was not readable" in caplog.text
    assert events_of(trainers["guarded"]) == []


def test_rows_are_strict_json(tmp_path):
    trainer = build("plain", tmp_path)
    record = RunRecord(trainer, 0)
    trainer.state.log_history.append({"loss": float("nan"), "step": 1})
    record.write_row()
    [line] = (tmp_path / "nanguard" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"run": record.events.run, "loss": "nan", "step": 1}


# ---- the file system ----


@pytest.mark.parametrize("kind", params("pipe", "link", cases=ODD))
def test_odd_files_in_the_places_of_ours_are_refused_and_the_run_ends_as_stock(kind, tmp_path, caplog):
    stock = build("plain", tmp_path / "stock", guard=False, **SAVING)
    stock.train()
    folder = tmp_path / "ours" / "nanguard"
    folder.mkdir(parents=True)
    unharmed = [plant_odd(kind, folder / name) for name in ("metrics.jsonl", "events.jsonl", "autopsy")]
    trainer = build("plain", tmp_path / "ours", **SAVING)
    trainer.train()
    assert_same(tensors_of(trainer), tensors_of(stock))
    plant(trainer, Fault("gradient", 1, parameter=LAYER))
    trainer.train()
    assert all(check() for check in unharmed)
    lines = [record.getMessage() for record in caplog.records if "cannot write to" in record.getMessage()]
    names = ["metrics.jsonl", "metrics.jsonl", "events.jsonl"]  # once a run and file
    assert [str(folder / name) in line for name, line in zip(names, lines, strict=True)] == [True] * 3


def test_a_state_that_cannot_be_written_is_reported_and_the_run_goes_on(tmp_path, caplog):
    trainer = build("plain", tmp_path, **SAVING)
    (tmp_path / "checkpoint-2" / STATE_FILE).mkdir(parents=True)
    trainer.train()
    assert trainer.state.global_step == 4
    assert f"{tmp_path / 'checkpoint-2' / STATE_FILE} was not written" in caplog.text
    assert (tmp_path / "checkpoint-4" / STATE_FILE).is_file()


def test_files_with_data_are_private_and_others_keep_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        trainer = build("plain", tmp_path, **SAVING)
        plant(trainer, Fault("gradient", 1, parameter=LAYER))
        trainer.train()
    finally:
        os.umask(before)
    ours = [*(tmp_path / "nanguard").rglob("*"), tmp_path / "checkpoint-2" / STATE_FILE]
    modes = {path.relative_to(tmp_path).as_posix(): oct(stat.S_IMODE(path.stat().st_mode)) for path in ours}
    without_data = ("nanguard/metrics.jsonl", "nanguard/good.json", f"checkpoint-2/{STATE_FILE}")
    shared = dict.fromkeys(without_data, "0o644")
    folders = {"nanguard/autopsy": "0o700", "nanguard/autopsy/step-1": "0o700"}
    assert len(modes) >= 8
    assert modes == {**dict.fromkeys(modes, "0o600"), **shared, **folders}


def test_drafts_of_a_killed_run_are_removed_at_the_next_start_and_nothing_is_in_the_temporary_folder(
    tmp_path, monkeypatch
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    drafts = [
        tmp_path / "nanguard" / "autopsy" / f".step-3.{find_machine()}-999999999.partial",
        tmp_path / "checkpoint-9" / f".{STATE_FILE}.{find_machine()}-999999999.partial",
    ]
    for draft in drafts:
        draft.mkdir(parents=True)
    trainer = build("plain", tmp_path, **SAVING)
    plant(trainer, Fault("gradient", 1, parameter=LAYER))
    trainer.train()
    assert [event["bundle"] for event in events_of(trainer)] == ["autopsy/step-1"]
    assert not any(draft.exists() for draft in drafts)
    assert list(temporary.iterdir()) == []
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_halt_is_logged_and_recorded_before_anything_is_saved(error, tmp_path, caplog, monkeypatch):
    extra = {"guard": GuardArguments(nanguard_max_rewinds=0)}
    trainer = build("plain", tmp_path, gradient_accumulation_steps=1, max_steps=20, extra=extra)
    plant(trainer, *[Fault("gradient", step, parameter=LAYER) for step in range(2, 12)])

    def fail(*args, **kwargs):
        assert [event["action"] for event in events_of(trainer)][-1] == "halted"
        assert "halted: 10 bad steps in a row" in caplog.text
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(NonFiniteError, match=r"after 10 bad steps in a row.*could not be saved .*(No space|failed)"):
        trainer.train()


@pytest.mark.parametrize("name", ["autopsy", "."])
def test_a_folder_that_cannot_be_listed_does_not_turn_the_guard_off(name, tmp_path, monkeypatch):
    """As of another user, or with all file descriptors in use."""
    unreadable, glob = (tmp_path / "nanguard" / name).resolve(), Path.glob

    def refuse(path, pattern, *args, **kwargs):
        if path.resolve() == unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return glob(path, pattern, *args, **kwargs)

    trainer = build("plain", tmp_path, **SAVING)
    plant(trainer, Fault("loss", 1, 0))
    monkeypatch.setattr(Path, "glob", refuse)
    trainer.train()
    assert [(event["signal"], event["action"]) for event in events_of(trainer)][-1] == ("loss_nonfinite", "skipped")
    assert torch.isfinite(trainer.model.get_parameter(LAYER)).all()


@pytest.mark.parametrize("owner", [CheckpointCustody, RowQuarantine])
def test_a_part_that_cannot_begin_does_not_turn_the_others_off(owner, tmp_path, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(owner, "begin_run", fail)
    trainer = build("plain", tmp_path, **SAVING)
    plant(trainer, Fault("loss", 1, 0))
    trainer.train()
    assert [event["signal"] for event in events_of(trainer)] == ["guard_failed", "loss_nonfinite"]
