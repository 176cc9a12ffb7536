"""L5: a non-finite or half-written state never becomes the newest good checkpoint, and rotation never deletes the last good one."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from hf_nanguard import ArgumentError, CheckpointGuardCallback, GuardArguments, NonFiniteError, attach, scan_checkpoint
from hf_nanguard.checkpoints.checkpoint_files import QUARANTINE
from hf_nanguard.checkpoints.good_record import GoodRecord, read_good, write_good

from ..models import token_dataset
from ..trainers import build, events_of

SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "gradient_accumulation_steps": 1}


class PoisonedSave:
    """Writes NaN into a saved weight, after the host has saved it: what memory holds stays finite."""

    def __init__(self, trainer, *steps: int):
        self.trainer, self.steps, self.save = trainer, steps, trainer.save_model
        trainer.save_model = self

    def __call__(self, output_dir=None, _internal_call=False):
        self.save(output_dir, _internal_call)
        if self.trainer.state.global_step in self.steps and _internal_call:
            poison(Path(output_dir))


def poison(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3, 1] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def checkpoints(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.glob("checkpoint-*")), key=lambda name: int(name.split("-")[1]))


def custody_of(way: str, tmp_path: Path, **overrides):
    """A trainer whose checkpoints are kept, guarded or stock with the callback."""
    extra = {"callbacks": [CheckpointGuardCallback()]} if way == "callback" else {}
    extra["eval_dataset"] = token_dataset(2)
    return build("plain", tmp_path, guard=way == "guarded", extra=extra, **{**SAVES, **overrides})


WAYS = ("guarded", "callback")


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_bad_save_is_never_the_newest_and_costs_no_good_one(way, limit, tmp_path):
    trainer = custody_of(way, tmp_path, save_total_limit=limit)
    PoisonedSave(trainer, 3, 4)
    trainer.train()
    kept = {None: ["checkpoint-1", "checkpoint-2"], 1: ["checkpoint-2"], 2: ["checkpoint-1", "checkpoint-2"]}[limit]
    assert checkpoints(tmp_path) == kept
    assert all(scan_checkpoint(tmp_path / name).is_good for name in kept)
    assert len(checkpoints(tmp_path / QUARANTINE)) == (2 if limit is None else limit)
    events = [event for event in events_of(trainer) if event["signal"] == "checkpoint_nonfinite"]
    assert [(event["step"], event["action"]) for event in events] == [(3, "refused"), (4, "refused")]
    assert "lm_head.weight contains NaN in 1 of" in events[0]["message"]
    record = read_good(tmp_path)
    assert (record.step, record.path) == (2, "checkpoint-2")


@pytest.mark.parametrize("way", WAYS)
def test_a_healthy_run_is_stock_except_for_the_folder_of_the_guard(way, tmp_path):
    runs = {}
    for name in ("stock", way):
        options = {**SAVES, "save_total_limit": 2}
        trainer = build("plain", tmp_path / name, guard=False, **options) if name == "stock" else custody_of(way, tmp_path / name, save_total_limit=2)  # fmt: skip
        trainer.train()
        runs[name] = trainer
    ours = {"nanguard_state.json", "training_args.bin", "trainer_state.json"}  # the last two name the output directory
    files = {
        name: {
            path.relative_to(tmp_path / name).as_posix(): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file() and "nanguard" not in path.parts and path.name not in ours
        }
        for name in runs
    }
    assert files["stock"] == files[way]
    assert len(files["stock"]) > 8
    assert not [event for event in events_of(runs[way]) if event["signal"] == "checkpoint_nonfinite"]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_not_finite_before_the_run_is_no_fault_of_a_checkpoint(way, tmp_path):
    def build_odd(**overrides):
        trainer = custody_of(way, tmp_path, **overrides)
        trainer.model.register_buffer("mask", torch.tensor([float("nan"), 1.0]))
        trainer.model.spare = torch.nn.Parameter(torch.tensor([float("-inf"), 1.0, 2.0]), requires_grad=False)
        trainer.model.bound = torch.nn.Parameter(torch.tensor([float("inf"), 1.0, 2.0]))
        return trainer

    trainer = build_odd(max_steps=2)
    trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert events_of(trainer) == []
    assert read_good(tmp_path).accepted == ["bound", "mask", "spare"]
    resumed = build_odd(max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[-1]["step"] == 3


@pytest.mark.parametrize("way", WAYS)
def test_load_best_never_loads_a_bad_one(way, tmp_path):
    """Step 2 has the best metric, and its save is bad."""

    trainer = custody_of(
        way, tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=False, save_total_limit=1,
    )  # fmt: skip
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}
    trainer.evaluate = lambda *args, **kwargs: {"eval_loss": losses[trainer.state.global_step]}
    PoisonedSave(trainer, 2)
    trainer.train()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert trainer.state.best_global_step == 3
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    loaded = load_file(tmp_path / "checkpoint-3" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(trainer.model.lm_head.weight, loaded)


@pytest.mark.parametrize("way", WAYS)
def test_a_best_checkpoint_that_was_damaged_later_is_not_loaded(way, tmp_path):
    class Damage(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                poison(tmp_path / "checkpoint-1")

    trainer = custody_of(way, tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
    trainer.add_callback(Damage())
    trainer.evaluate = lambda *args, **kwargs: {"eval_loss": float(trainer.state.global_step)}
    trainer.train()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    [event] = [event for event in events_of(trainer) if event["signal"] == "checkpoint_nonfinite"]
    assert "checkpoint-1 was not loaded" in event["message"]


class Preemption(TrainerCallback):
    """Asks for the checkpoint of the host's own callback for preemptible machines, as SIGTERM does after some seconds."""

    def __init__(self, step: int):
        self.step = step

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.saver.jit_manager.is_checkpoint_requested = True


@pytest.mark.parametrize("way", WAYS)
def test_the_checkpoint_of_a_preemption_is_kept(way, tmp_path):
    """The host marks it as incomplete until after it was saved, and so read back."""
    trainer = custody_of(way, tmp_path, enable_jit_checkpoint=True, save_steps=100, save_total_limit=1)
    preemption, before = Preemption(2), signal.getsignal(signal.SIGTERM)
    [preemption.saver] = [
        each for each in trainer.callback_handler.callbacks if type(each).__name__ == "JITCheckpointCallback"
    ]
    trainer.add_callback(preemption)
    trainer.train()
    signal.signal(signal.SIGTERM, before)
    assert trainer.state.global_step == 3  # it ended early
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert read_good(tmp_path).path == "checkpoint-3"
    assert events_of(trainer) == []


def test_the_mark_of_an_interrupted_save_does_not_outlive_the_next_one(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "checkpoint-is-incomplete.txt").touch()
    trainer = custody_of("guarded", tmp_path, max_steps=2)
    trainer.train()
    assert read_good(tmp_path).path == "checkpoint-2"
    assert events_of(trainer) == []


# ---- resume ----


def truncate(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


DAMAGE = {
    "NaN": lambda folder: poison(folder),
    "truncated weights": lambda folder: truncate(folder, "model.safetensors"),
    "truncated optimizer": lambda folder: truncate(folder, "optimizer.pt"),
    "no optimizer": lambda folder: (folder / "optimizer.pt").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no trainer state": lambda folder: (folder / "trainer_state.json").unlink(),
    "truncated trainer state": lambda folder: truncate(folder, "trainer_state.json"),
    "a state without steps": lambda folder: (folder / "trainer_state.json").write_text("{}"),
    "weights without tensors": lambda folder: save_file({}, folder / "model.safetensors"),
    "an empty folder in place of the optimizer": lambda folder: (
        (folder / "optimizer.pt").unlink(),
        (folder / "optimizer_0").mkdir(),
    ),
    "truncated config": lambda folder: truncate(folder, "config.json"),
    "marked as incomplete": lambda folder: (folder / "checkpoint-is-incomplete.txt").touch(),
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    build("plain", folder, guard=False, **{**SAVES, "max_steps": 3}).train()
    return folder


@pytest.fixture(scope="module")
def resumed_from_2(finished_run, tmp_path_factory):
    """The head after a stock run was resumed from the second checkpoint."""
    reference = build("plain", tmp_path_factory.mktemp("reference"), guard=False, **SAVES)
    reference.train(resume_from_checkpoint=str(finished_run / "checkpoint-2"))
    return reference.model.lm_head.weight


@pytest.mark.parametrize("name", DAMAGE)
def test_a_resume_takes_the_newest_checkpoint_that_is_good_and_complete(
    name, finished_run, resumed_from_2, tmp_path, caplog
):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    DAMAGE[name](tmp_path / "checkpoint-3")
    trainer = custody_of("guarded", tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(trainer.model.lm_head.weight, resumed_from_2)
    assert f"Resuming from {tmp_path / 'checkpoint-2'}. Skipped checkpoint-3: " in caplog.text
    assert "Skipped checkpoint-3" in events_of(trainer)[0]["message"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", ["true", "run"])
def test_every_way_to_ask_for_it(way, asked, finished_run, tmp_path, caplog):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    poison(tmp_path / "checkpoint-3")
    trainer = custody_of(way, tmp_path)
    trainer.train(True if asked == "true" else str(tmp_path))
    assert "Skipped checkpoint-3" in caplog.text
    assert trainer.state.global_step == 4
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_a_good_newest_checkpoint_is_taken_without_a_word(finished_run, tmp_path, caplog):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    trainer = custody_of("guarded", tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert "Skipped" not in caplog.text
    assert events_of(trainer) == []


def test_no_good_checkpoint_is_an_error_that_names_each(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    for name in checkpoints(tmp_path):
        poison(tmp_path / name)
    with pytest.raises(ArgumentError, match=r"checkpoint-3: .*checkpoint-2: .*checkpoint-1: "):
        custody_of("guarded", tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", ["true", "run"])
def test_a_run_that_was_interrupted_in_its_first_save_begins_anew(way, asked, finished_run, tmp_path, caplog):
    """Nobody has a checkpoint to go back to then, and `train()` would only say so."""
    half = tmp_path / "checkpoint-1"
    shutil.copytree(finished_run / "checkpoint-1", half)
    (half / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-2").mkdir()
    trainer = custody_of(way, tmp_path)
    trainer.train(resume_from_checkpoint=True if asked == "true" else str(tmp_path))
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3, 4]
    assert "begins anew" in caplog.text
    assert scan_checkpoint(half).is_good


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_save_is_no_reason_to_begin_anew_if_there_was_a_good_one(way, tmp_path):
    write_good(tmp_path, GoodRecord(1, "checkpoint-1", "", None, []))
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ArgumentError, match=r"checkpoint-1: .*interrupted"):
        custody_of(way, tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("way", WAYS)
def test_the_record_names_the_best_checkpoint_if_the_host_has_deleted_the_last(way, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = custody_of(way, tmp_path, metric_for_best_model="eval_runtime", greater_is_better=False, **options)
    trainer.add_callback(BestIs(2))
    trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    record = read_good(tmp_path)
    assert (record.step, record.path) == (2, "checkpoint-2")
    assert record.metric["loss"] == next(row["loss"] for row in trainer.state.log_history if row["step"] == 2)


class BestIs(TrainerCallback):
    """Makes the metric of one step the best."""

    def __init__(self, step):
        self.step = step

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_runtime"] = 0.0 if state.global_step == self.step else 1.0


def test_a_bad_path_is_reported_before_the_first_step(finished_run, tmp_path, caplog):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    trainer = custody_of("guarded", tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert "has no optimizer state, but other training state" in caplog.text
    assert f"The newest good checkpoint is {tmp_path / 'checkpoint-2'}." in caplog.text


UNUSED = 1  # a row of the embedding that no batch uses


def poison_moment(folder: Path) -> None:
    path = folder / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    moments = next(each for each in state["state"].values() if each["exp_avg"].ndim == 2)
    moments["exp_avg"][UNUSED, 0] = float("nan")
    torch.save(state, path)


BAD_STARTS = {"NaN weight": poison, "NaN moment of an unused row": poison_moment}


def resume_bad(name: str, setting: str, finished_run: Path, folder: Path, bad: tuple[int, ...] = (3,)):
    shutil.copytree(finished_run, folder, dirs_exist_ok=True)
    for step in bad:
        BAD_STARTS[name](folder / f"checkpoint-{step}")
    extra = {"guard": GuardArguments(nanguard_on_bad_start=setting)}
    trainer = build("plain", folder, extra=extra, **SAVES)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return trainer


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_bad_start_is_repaired_by_the_good_checkpoint_before_it(name, finished_run, resumed_from_2, tmp_path):
    trainer = resume_bad(name, "repair", finished_run, tmp_path)
    assert torch.equal(trainer.model.lm_head.weight, resumed_from_2)
    [event] = events_of(trainer)
    assert (event["signal"], event["action"]) == ("checkpoint_nonfinite", "refused")
    assert f"Resuming from {tmp_path / 'checkpoint-2'} and not from {tmp_path / 'checkpoint-3'}" in event["message"]


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_bad_start_goes_back_as_far_as_it_takes(name, finished_run, tmp_path):
    trainer = resume_bad(name, "repair", finished_run, tmp_path, bad=(3, 2))
    message = events_of(trainer)[0]["message"]
    assert f"Resuming from {tmp_path / 'checkpoint-1'} and not from" in message
    assert "Also skipped checkpoint-2: " in message
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_bad_start_without_an_earlier_good_checkpoint_halts(name, finished_run, tmp_path):
    with pytest.raises(NonFiniteError, match=r"This was the case before the first step of this run"):
        resume_bad(name, "repair", finished_run, tmp_path, bad=(3, 2, 1))


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_halt_at_a_bad_start_names_the_good_checkpoint_before_it(name, finished_run, tmp_path):
    with pytest.raises(NonFiniteError) as error:
        resume_bad(name, "halt", finished_run, tmp_path)
    assert f"The last good checkpoint is {tmp_path / 'checkpoint-2'}." in str(error.value)


def test_a_guard_that_comes_after_a_bad_checkpoint_was_loaded_does_not_call_it_good(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    poison(tmp_path / "checkpoint-3")
    trainer = build("plain", tmp_path, guard=False, **SAVES)

    class Late(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            attach(trainer)

    trainer.add_callback(Late())
    with pytest.raises(NonFiniteError) as error:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert f"The last good checkpoint is {tmp_path / 'checkpoint-2'}." in str(error.value)


def test_checkpoints_of_weights_only_are_resumed_if_there_are_no_others(tmp_path):
    build("plain", tmp_path, guard=False, **SAVES, save_only_model=True).train()
    trainer = custody_of("guarded", tmp_path, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


def test_a_full_disk_during_a_save_loses_nothing(tmp_path):
    trainer = custody_of("guarded", tmp_path, save_total_limit=1)
    save = trainer._save_optimizer_and_scheduler

    def fail(output_dir):
        if trainer.state.global_step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(output_dir)

    trainer._save_optimizer_and_scheduler = fail
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert read_good(tmp_path).path == "checkpoint-2"
    resumed = custody_of("guarded", tmp_path, save_total_limit=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert checkpoints(tmp_path) == ["checkpoint-4"]


# ---- kill -9 ----

MAX_AHEAD = 5  # steps that a run gets before it is killed


def train_on(folder: Path, num_steps: int) -> None:
    """Trains, from the last good checkpoint if there is one."""
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = build("plain", folder, max_steps=num_steps, **saves, **LONG)
    trainer.train(resume_from_checkpoint=True if checkpoints(folder) else None)


LONG = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}


def start(folder: Path, num_steps: int) -> multiprocessing.Process:
    """Starts such a run in a process of its own, forked because imports take longer than the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads of this process, which the run does not use
        process = multiprocessing.get_context("fork").Process(target=train_on, args=(folder, num_steps))
        process.start()
    return process


def kill_while_saving(folder: Path, num_steps: int, rng: random.Random) -> None:
    """Kills a run a random time after a random checkpoint has appeared, so most likely in the middle of a save."""
    process = start(folder, num_steps)
    newest = max((int(name.split("-")[1]) for name in checkpoints(folder)), default=0)
    wanted = newest + rng.randint(1, MAX_AHEAD)
    end = time.monotonic() + 120
    while time.monotonic() < end and process.is_alive() and not (folder / f"checkpoint-{wanted}").exists():
        time.sleep(0.001)
    time.sleep(rng.random() * 0.05)
    process.kill()
    process.join()


def check_killed_runs(folder: Path, num_kills: int) -> None:
    rng, num_steps = random.Random(num_kills), MAX_AHEAD * num_kills + 10  # stock runs past its end if resumed there
    for _ in range(num_kills):
        kill_while_saving(folder, num_steps, rng)
    last = start(folder, num_steps)
    last.join()
    assert last.exitcode == 0
    state = json.loads((folder / f"checkpoint-{num_steps}" / "trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "loss" in row] == list(
        range(1, num_steps + 1)
    )  # each step once
    assert scan_checkpoint(folder / f"checkpoint-{num_steps}").is_good
    reference = build("plain", folder / "reference", guard=False, max_steps=num_steps, **LONG)
    reference.train()
    final = load_file(folder / f"checkpoint-{num_steps}" / "model.safetensors")
    assert torch.equal(final["lm_head.weight"], reference.model.lm_head.weight)


def test_a_killed_run_ends_as_if_it_had_not_been_killed(tmp_path):
    check_killed_runs(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_that_is_killed_twenty_times_ends_as_if_it_had_not_been(tmp_path):
    check_killed_runs(tmp_path, 20)
