"""`nanguard run` on scripts that know nothing of us: what ruins them stock is survived, and all else is as without us."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_nanguard import GuardArguments, NonFiniteError
from hf_nanguard.cli.main import main
from hf_nanguard.report.run_files import read_jsonl
from hf_nanguard.takeover.built_trainers import Takeover
from hf_nanguard.takeover.hidden_frames import hide_frames, hide_in_tracebacks
from hf_nanguard.testing import Fault, plant
from tests.trainers import build

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"

# Script, what the trainer is called, the signal of what is planted in it, its dataset row.
PLANTED = [
    ("weighted", "Trainer", "input_nonfinite", 12),
    ("answers", "SFTTrainer", "loss_nonfinite", 9),
    ("rewards", "ScaledGRPOTrainer", "loss_nonfinite", 3),
    ("transcripts", "Seq2SeqTrainer", "input_nonfinite", 5),
    ("adversarial", "AdversarialTrainer", "loss_nonfinite", 4),
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated"),  # of a script, as strangers write them
    pytest.mark.filterwarnings("ignore:std.. degrees of freedom"),  # of a script, when one sample is tried alone
]


def arguments_of(name: str, folder: Path) -> list[str]:
    return [str(SCRIPTS / f"{name}.py"), *(["--output_dir"] if name == "weighted" else []), str(folder)]


def run_stock(words: list[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(words[0], run_name="__main__")


def run_guarded(words: list[str], monkeypatch, **settings: object) -> list[str]:
    """Runs a script under a takeover in this process, as `nanguard run` does in its own, and returns what was said."""
    said: list[str] = []
    with Takeover(settings, said.append):
        run_stock(words, monkeypatch)
    return said


def run_command(*words: str, **options) -> subprocess.CompletedProcess:
    """Runs `nanguard run` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = [sys.executable, "-m", "hf_nanguard.run", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, **options)


def is_sound(folder: Path) -> bool:
    return all(tensor.isfinite().all() for tensor in load_file(folder / "model.safetensors").values())


def told_by(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("nanguard: ")]


@pytest.mark.parametrize(("name", "trainer", "sign", "row"), PLANTED, ids=[name for name, *_ in PLANTED])
def test_what_ruins_a_script_is_survived(name, trainer, sign, row, tmp_path, monkeypatch):
    stock, guarded = tmp_path / "stock", tmp_path / "guarded"
    if name == "rewards":
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            run_stock(arguments_of(name, stock), monkeypatch)
    else:
        run_stock(arguments_of(name, stock), monkeypatch)
        assert not is_sound(stock)
    said = run_guarded(arguments_of(name, guarded), monkeypatch)
    assert is_sound(guarded)
    file = guarded / "nanguard" / "events.jsonl"
    [event] = read_jsonl(file)
    assert (event["signal"], row in event["culprit"]["rows"]) == (sign, True)
    assert said == [f"{trainer} is guarded; events go to {file}", f"1 event in {file}."]


def test_a_healthy_script_ends_bit_identical(tmp_path, monkeypatch):
    stock, guarded = tmp_path / "stock", tmp_path / "guarded"
    run_stock([*arguments_of("weighted", stock), "--rows", "12"], monkeypatch)
    torch.manual_seed(4321)
    said = run_guarded([*arguments_of("weighted", guarded), "--rows", "12"], monkeypatch)
    expected, actual = (load_file(folder / "model.safetensors") for folder in (stock, guarded))
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    [line] = said  # a healthy run has one more line than stock
    assert line.endswith(f"is guarded; events go to {guarded / 'nanguard' / 'events.jsonl'}")


# ---- settings ----


@pytest.fixture
def printing(tmp_path) -> str:
    """A script that tells what it was given, and stops there."""
    file = tmp_path / "printing.py"
    file.write_text("import sys\nprint(*sys.argv[1:])\n")
    return str(file)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nanguard_on_spike", "jump"], ["--nanguard_on_spike", "'jump'", "skip"]),
        (["--nanguard_on_spiek", "skip"], ["--nanguard_on_spiek"]),
        (["--bogus"], ["--bogus"]),
        (["--config", "missing.yaml"], ["--config", "'missing.yaml'"]),
    ],
)
def test_bad_settings_end_it_before_the_script_starts(words, told, printing, capsys):
    assert main(["run", *words, printing]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert [part for part in told if part not in output.err] == []


@pytest.mark.parametrize(
    "words", [[], ["--"], ["--nanguard_on_spike"], ["missing.py"], ["--", "missing.py"], ["-m"]], ids=str
)
def test_nothing_to_run(words, capsys):
    assert main(["run", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["--", "printing.py", "--help", "--nanguard_on_spike", "jump"], "--help --nanguard_on_spike jump"),
        (["printing.py", "-h", "--", "-m", "x"], "-h -- -m x"),
        (["--nanguard_mode", "observe", "-m", "printing", "--version"], "--version"),
    ],
    ids=str,
)
def test_what_follows_the_script_is_its_own(words, seen, printing):
    done = run_command(*words, cwd=Path(printing).parent)
    assert (done.returncode, done.stdout) == (0, f"{seen}\n")
    assert done.stderr == "nanguard: no Trainer was built, so nothing was guarded.\n"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_python_must_start_with_its_environment(flag, printing):
    code = (
        f"import sys; sys.path[:] = {[str(ROOT), *sys.path]!r}; from hf_nanguard.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, flag, "-c", code, "run", printing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot guard under -I, -E and -S" in done.stderr


def test_help_names_every_setting_and_its_variable(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    from hf_nanguard.core.settings import SETTINGS

    assert [name for name in SETTINGS if f"--nanguard_{name}" not in text] == []
    assert "NANGUARD_ON_SPIKE=skip" in text


# ---- how a script ends ----


def write(folder: Path, text: str) -> str:
    file = folder / "script.py"
    file.write_text(text)
    return str(file)


RAISING = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from transformers import Trainer
import weighted
def compute_loss(self, model, inputs, *args, **kwargs):
    raise ZeroDivisionError("in the loss")
Trainer.compute_loss, before = compute_loss, Trainer.compute_loss
try:
    weighted.main()
finally:
    Trainer.compute_loss = before
"""


def test_frames_of_the_guard_are_left_out_and_that_is_said(tmp_path, monkeypatch, capsys):
    words = [write(tmp_path, RAISING), "--output_dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "path", list(sys.path))
    frames = os.path.join("hf_nanguard", "hf", "trainer", "mixin.py")
    with pytest.raises(ZeroDivisionError, match="in the loss") as raised:
        run_guarded(words, monkeypatch)
    sys.modules.pop("weighted")
    error = raised.value
    sys.__excepthook__(type(error), error, error.__traceback__)
    assert frames in capsys.readouterr().err
    said: list[str] = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hide_in_tracebacks(said.append)
    sys.excepthook(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: in the loss" in shown
    assert frames not in shown
    assert len(said) == 1
    assert "frames of the guard hidden above; --full-traceback shows all." in said[0]


def test_a_halt_shows_the_script_and_not_the_guard(tmp_path):
    trainer = build("plain", tmp_path, extra={"guard": GuardArguments(nanguard_on_nonfinite="halt")})
    plant(trainer, Fault("loss", step=1))
    with pytest.raises(NonFiniteError) as raised:
        trainer.train()
    assert hide_frames(raised.value, set()) > 10
    files = [Path(frame.filename) for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert files[0] == Path(__file__)
    assert not any("hf_nanguard" in file.parts and "tests" not in file.parts for file in files)


def test_a_hook_of_the_script_stays_and_errors_of_the_guard_are_shown_whole(monkeypatch):
    own = lambda *error: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", own)
    hide_in_tracebacks(pytest.fail)
    assert sys.excepthook is own
    with pytest.raises(AttributeError) as raised:
        hide_frames(7, set())  # type: ignore[arg-type]
    assert hide_frames(raised.value, set()) == 0


# ---- processes ----


def test_a_child_needs_no_settings_file(tmp_path):
    """What the file says is handed on as it is: a child may start in another folder."""
    (tmp_path / "guard.yaml").write_text("nanguard_mode: observe\n")
    child = "import os, sys; print(type(sys.meta_path[0]).__name__, os.environ['NANGUARD_MODE'], os.environ.get('NANGUARD_CONFIG'))"
    script = write(
        tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True, cwd='/')"
    )
    done = run_command(script, cwd=tmp_path, env={"NANGUARD_CONFIG": "guard.yaml"})
    assert done.stdout == "ImportHook observe None\n"


FREE = f"""
import os, sys
assert "transformers" not in sys.modules and "torch" not in sys.modules
os.environ["HF_HUB_OFFLINE"] = "1"
sys.argv = [{str(SCRIPTS / "weighted.py")!r}, "--output_dir", sys.argv[1]]
import runpy
from transformers import Trainer
import transformers.trainer, inspect
assert Trainer is transformers.trainer.Trainer and "class Trainer" in inspect.getsource(Trainer)
import huggingface_hub.constants
print("offline", huggingface_hub.constants.HF_HUB_OFFLINE, flush=True)
runpy.run_path(sys.argv[0], run_name="__main__")
print("done", flush=True)
import time
time.sleep(60)
"""


def test_a_process_of_its_own_and_ctrl_c(interruptible, tmp_path):
    """The whole command: flags, variables and YAML, a planted failure, a sound end.

    The script is free to set its environment before it imports anything. Ctrl-C ends it as it ends Python, with its events
    reported.
    """
    config = tmp_path / "guard.yaml"
    config.write_text("nanguard_max_bad_steps: 7\nnanguard_on_spike: clip\n")
    variables = {"PYTHONPATH": str(ROOT), "NANGUARD_AUTOPSY": "no", "NANGUARD_ON_SPIKE": "observe"}
    environment = {**os.environ, **variables}
    environment.pop("HF_HUB_OFFLINE")
    options = ["--config", str(config), "--nanguard_on_spike=skip", "--"]
    command = [sys.executable, "-m", "hf_nanguard.run", *options, write(tmp_path, FREE), str(tmp_path / "run")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line == "done\n":
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=100)
    assert (lines[0], lines[-1]) == ("offline True", "done"), error
    assert process.returncode == -signal.SIGINT, error
    events = tmp_path / "run" / "nanguard" / "events.jsonl"
    assert told_by(error) == [
        "nanguard: Trainer is guarded with nanguard_on_spike=skip, nanguard_max_bad_steps=7, nanguard_autopsy=False; "
        f"events go to {events}",
        f"nanguard: 1 event in {events}.",
    ]
    assert is_sound(tmp_path / "run")
    assert not (tmp_path / "run" / "nanguard" / "autopsy").exists()
    assert "\nKeyboardInterrupt\n" in error
    assert "hf_nanguard" not in error.partition("Traceback")[2]


# ---- ranks ----

BOTH = f"""
import runpy, sys
folder = sys.argv[1]
for name, words in (("weighted", ["--output_dir", folder + "/weighted"]), ("rewards", [folder + "/rewards"])):
    sys.argv = [f"{SCRIPTS}/{{name}}.py", *words]
    runpy.run_path(sys.argv[0], run_name="__main__")

# Without this torch 2.13 aborts some of the ranks at their very end, with and without the guard.
from tests.distributed.ending import hang_up
hang_up()
"""


def launch(command: list[str], script: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true",
        "NANGUARD_MAX_BAD_STEPS": "9",
    }  # fmt: skip
    return subprocess.run(
        [*command, script, str(folder)], capture_output=True, text=True, env=environment, timeout=280, cwd=folder
    )


def check_two_ranks(done: subprocess.CompletedProcess, folder: Path) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    files = {name: folder / name / "nanguard" / "events.jsonl" for name in ("weighted", "rewards")}
    for name, trainer in (("weighted", "Trainer"), ("rewards", "ScaledGRPOTrainer")):
        assert is_sound(folder / name)
        assert {event["signal"] for event in read_jsonl(files[name])} == {
            next(sign for other, _, sign, _ in PLANTED if other == name)
        }
        line = f"nanguard: {trainer} is guarded with nanguard_max_bad_steps=9; events go to {files[name]}"
        assert told_by(done.stderr).count(line) == 1
    [last] = [line for line in told_by(done.stderr) if " event" in line and "guarded" not in line]
    assert all(str(file) in last for file in files.values())


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("distributed")
def test_two_ranks(tmp_path):
    from ..distributed.launch import torchrun

    done = launch([*torchrun(2), "-m", "hf_nanguard.run"], write(tmp_path, BOTH), tmp_path)
    check_two_ranks(done, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("distributed")
def test_the_other_scripts_on_two_ranks(tmp_path):
    from ..distributed.launch import torchrun

    names = ("answers", "transcripts", "adversarial")
    play = f"for name, words in {[(name, [f'{tmp_path}/{name}']) for name in names]}:"
    script = re.sub(r"^for name, words in .*$", lambda _: play, BOTH, flags=re.MULTILINE)
    done = launch([*torchrun(2), "-m", "hf_nanguard.run"], write(tmp_path, script), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, _, sign, row in [planted for planted in PLANTED if planted[0] in names]:
        assert is_sound(tmp_path / name)
        events = list(read_jsonl(tmp_path / name / "nanguard" / "events.jsonl"))
        assert {event["signal"] for event in events} == {sign}
        assert any(row in (event["culprit"]["rows"] or []) for event in events)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("distributed")
@pytest.mark.parametrize("way", ["accelerate -m", "before torchrun", "before accelerate"])
def test_other_ways_to_two_ranks(way, tmp_path):
    from ..distributed.launch import accelerate_launch, torchrun

    before = [sys.executable, "-m", "hf_nanguard.run"]
    command = {
        "accelerate -m": [*accelerate_launch(2), "-m", "hf_nanguard.run"],
        "before torchrun": [*before, *torchrun(2)[1:]],
        "before accelerate": [*before, "--", "accelerate", "launch", *accelerate_launch(2)[3:]],
    }[way]
    done = launch(command, write(tmp_path, BOTH), tmp_path)
    check_two_ranks(done, tmp_path)


def test_a_launcher_is_restarted_as_a_whole(printing, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["run", "--resume", printing]) == 2
    assert "nanguard run --resume torchrun" in capsys.readouterr().err


SAVING = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from transformers import Trainer, TrainerCallback, TrainingArguments
from tests.models import tiny_llama, token_dataset
folder, how = sys.argv[1:]
class Plan(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        mark = os.path.join(folder, "mark")
        if how == "slow":
            print("step", state.global_step, flush=True)
            time.sleep(0.3)
        elif state.global_step == 5 and args.process_index == args.world_size - 1 and (how == "always" or not os.path.exists(mark)):
            open(mark, "w").close()
            if how == "kill":
                os.kill(os.getpid(), 9)
            raise RuntimeError("planted")
args = TrainingArguments(
    folder, max_steps=200 if how == "slow" else 8, save_steps=2, report_to="none", use_cpu=True, per_device_train_batch_size=2,
    disable_tqdm=True,
)
trainer = Trainer(tiny_llama(), args, train_dataset=token_dataset(48), callbacks=[Plan()])
trainer.train()
trainer.save_model(folder)
if args.world_size > 1:
    from tests.distributed.ending import hang_up
    hang_up()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", [False, True])
@pytest.mark.parametrize("how", ["error", "kill"])
def test_a_restarted_run_ends_as_if_nothing_had_happened(how, launcher, tmp_path):
    from ..distributed.launch import torchrun

    before = torchrun(2)[1:] if launcher else []
    folders = [tmp_path / "stock", tmp_path / "run"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "mark").touch()
    script = write(tmp_path, SAVING)
    variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    for folder in folders:
        done = run_command("--resume", *before, script, str(folder), how, env=variables)
        assert done.returncode == 0, done.stderr[-3000:]
    expected, actual = (load_file(folder / "model.safetensors") for folder in folders)
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    [event] = read_jsonl(folders[1] / "nanguard" / "events.jsonl")
    assert (event["signal"], event["values"]["checkpoint"]) == ("run_restarted", str(folders[1] / "checkpoint-4"))
    assert "nanguard: ended by " in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_failure_at_the_same_step_ends_it(tmp_path):
    done = run_command("--resume", write(tmp_path, SAVING), str(tmp_path), "always")
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: planted") == 2
    assert told_by(done.stderr)[-1].endswith("not restarted because the same failure came back at the same step.")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_preempted_run_saves_and_is_continued_by_the_next_job(tmp_path):
    command = [sys.executable, "-m", "hf_nanguard.run", "--resume", write(tmp_path, SAVING), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "slow"], stdout=subprocess.PIPE, text=True, env=environment) as process:
        last = 0
        for line in process.stdout:
            if line == "step 3\n":
                process.send_signal(signal.SIGTERM)
            last = int(line.split()[1]) if line.startswith("step ") else last
    assert process.returncode == 0
    assert last < 200
    assert (tmp_path / f"checkpoint-{last}").is_dir()
    (tmp_path / "mark").touch()
    script = (tmp_path / "script.py").read_text().replace("else 8", f"else {last + 2}")
    (tmp_path / "script.py").write_text(script)
    done = run_command("--resume", str(tmp_path / "script.py"), str(tmp_path), "none")
    assert done.returncode == 0, done.stderr
    assert f"training resumes from {tmp_path / f'checkpoint-{last}'}." in done.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("distributed")
def test_a_command_of_trl(tmp_path):
    from ..models import tiny_llama, tiny_tokenizer

    tiny_llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": f"w{row} w{row + 1} w{row + 2}"} for row in range(8)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "hf_nanguard.run", "trl", "sft", "--model_name_or_path", str(tmp_path / "model")]
    options = {
        "dataset_name": tmp_path / "data", "output_dir": tmp_path / "out", "max_steps": 2, "report_to": "none",
        "bf16": "false", "use_cpu": "true", "save_strategy": "no",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=environment, timeout=280)
    events = tmp_path / "out" / "nanguard" / "events.jsonl"
    assert done.returncode == 0, done.stderr[-3000:]
    assert told_by(done.stderr) == [f"nanguard: SFTTrainer is guarded; events go to {events}"]
