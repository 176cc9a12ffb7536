"""`train()` under `nanguard run --resume`: it continues from the newest good checkpoint, as if it had never stopped."""

import inspect
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_nanguard.report.run_files import read_jsonl
from hf_nanguard.takeover.built_trainers import Takeover
from hf_nanguard.takeover.resumed_training import resume_training
from hf_nanguard.takeover.run_progress import Progress

from ..trainers import build


class Crash(TrainerCallback):
    """Raises after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyError("planted")


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """Returns a function that makes trainers resume, as at the start of a process; undone after the test."""
    monkeypatch.setattr(Trainer, "train", Trainer.train)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (tmp_path / "progress").mkdir()
    host, said = Trainer.train, []

    def begin(reason: str | None = None) -> list[str]:
        Trainer.train = host
        said.clear()
        resume_training(Trainer, Progress(str(tmp_path / "progress")), reason, said.append)
        return said

    return begin


def make(folder: Path, *callbacks: TrainerCallback, steps: int = 6):
    settings = {"max_steps": steps, "save_steps": 2, "save_strategy": "steps"}
    with Takeover({}, lambda text: None):
        trainer = build("plain", folder, guard=False, **settings)
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def weights(trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_a_crash_leaves_no_trace(tmp_path, resume):
    whole = make(tmp_path / "whole")
    whole.train()
    said = resume()
    broken = make(tmp_path / "run", Crash(5))
    with pytest.raises(KeyError, match="planted"):
        broken.train()
    assert said == []  # there was no checkpoint, so nothing was resumed
    assert Progress(str(tmp_path / "progress")).read_step() == 4
    said = resume("KeyError at step 4")
    again = make(tmp_path / "run")
    again.train()
    assert said == [f"training resumes from {tmp_path / 'run' / 'checkpoint-4'}."]
    assert again.state.global_step == 6
    assert all(map(torch.equal, weights(again), weights(whole)))
    [event] = read_jsonl(tmp_path / "run" / "nanguard" / "events.jsonl")
    assert (event["signal"], event["action"], event["step"]) == ("run_restarted", "rewound", 4)
    assert event["values"] == {"reason": "KeyError at step 4", "checkpoint": str(tmp_path / "run" / "checkpoint-4")}


def test_a_checkpoint_that_is_cut_short_is_passed_over(tmp_path, resume):
    resume()
    make(tmp_path, steps=4).train()
    newest = tmp_path / "checkpoint-4" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    said = resume()
    trainer = make(tmp_path)
    trainer.train()
    assert said[0].startswith(f"training resumes from {tmp_path / 'checkpoint-2'} (not from checkpoint-4: ")
    assert trainer.state.global_step == 6


def test_what_the_script_asks_for_itself_is_kept(tmp_path, resume):
    resume()
    make(tmp_path, steps=4).train()
    said = resume()
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert said == []
    assert trainer.state.global_step == 6


def test_a_script_that_looks_for_its_checkpoint_itself_does_not_resume_from_a_bad_one(tmp_path, resume):
    resume()
    make(tmp_path, steps=4).train()
    newest = tmp_path / "checkpoint-4"
    (newest / "model.safetensors").write_bytes(b"")
    said = resume()
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=str(newest))
    assert said[0].startswith(
        f"training resumes from {tmp_path / 'checkpoint-2'} (not from {newest}: model.safetensors is empty"
    )
    assert trainer.state.global_step == 6
    (newest / "model.safetensors").write_bytes(b"")
    other = make(tmp_path / "other")  # the rest of a folder that is not its own may be of another run
    with pytest.raises(Exception, match=r"model\.safetensors|while deserializing"):
        other.train(resume_from_checkpoint=str(newest))


def test_a_script_that_always_resumes_starts_without_a_checkpoint(tmp_path, resume):
    said = resume()
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert (said, trainer.state.global_step) == ([], 6)


def test_a_restart_continues_from_what_the_run_has_saved_and_not_from_where_it_once_began(tmp_path, resume):
    make(tmp_path / "before", steps=2).train()
    asked = str(tmp_path / "before" / "checkpoint-2")
    said = resume()
    with pytest.raises(KeyError):
        make(tmp_path / "run", Crash(5)).train(resume_from_checkpoint=asked)
    assert said == []
    said = resume("KeyError at step 4")
    trainer = make(tmp_path / "run")
    trainer.train(resume_from_checkpoint=asked)
    assert said == [f"training resumes from {tmp_path / 'run' / 'checkpoint-4'}."]
    assert trainer.state.global_step == 6


def test_a_checkpoint_from_before_the_run_is_no_reason_to_leave_what_the_script_asks_for(tmp_path, resume):
    make(tmp_path, steps=4).train()
    for path in (tmp_path / "checkpoint-4").iterdir():
        os.utime(path, (1, 1))
    resume()
    said = resume("KeyError at step 2")
    make(tmp_path, steps=6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert said == []


def test_a_script_with_a_new_folder_at_each_start_continues(tmp_path, resume):
    said = resume()
    for name in ("first", "second"):  # a script that trains twice
        trainer = make(tmp_path / f"{name}-at-10", *([Crash(5)] if name == "second" else []))
        if name == "first":
            trainer.train()
    with pytest.raises(KeyError):
        trainer.train()
    said = resume("KeyError at step 4")
    for name, step in (
        ("first", 6),
        ("second", 4),
    ):  # the first is complete, after which the host alone trains a step more
        trainer = make(tmp_path / f"{name}-at-11")
        trainer.train()
        assert said.pop() == f"training resumes from {tmp_path / f'{name}-at-10' / f'checkpoint-{step}'}."
        assert trainer.state.global_step == 6
    assert said == []


def test_a_second_training_in_the_same_folder_starts_as_usual(tmp_path, resume):
    said = resume()
    trainer = make(tmp_path, steps=2)
    trainer.train()
    trainer.train()
    assert said == []
    assert trainer.state.global_step == 2
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert (names.count("StepNote"), names.count("JITCheckpointCallback")) == (1, 1)


def test_the_signature_stays(resume):
    before = inspect.signature(Trainer.train)
    resume()
    assert inspect.signature(Trainer.train) == before


def test_an_uncaught_error_is_noted(tmp_path, resume, capsys):
    resume()
    error = ValueError("mine")
    sys.excepthook(ValueError, error, None)
    assert Progress(str(tmp_path / "progress")).read_error() == "ValueError"
    assert "ValueError: mine" in capsys.readouterr().err
