"""`nanguard run` on scripts that know nothing of us: what ruins them stock is survived, and all else is as without us."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_nanguard.cli.main import main
from hf_nanguard.report.run_files import read_jsonl

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


def is_sound(folder: Path) -> bool:
    return all(tensor.isfinite().all() for tensor in load_file(folder / "model.safetensors").values())


def told_by(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("nanguard: ")]


@pytest.mark.parametrize(("name", "trainer", "sign", "row"), PLANTED, ids=[name for name, *_ in PLANTED])
def test_what_ruins_a_script_is_survived(name, trainer, sign, row, tmp_path, monkeypatch, capsys):
    stock, guarded = tmp_path / "stock", tmp_path / "guarded"
    if name == "rewards":
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            run_stock(arguments_of(name, stock), monkeypatch)
    else:
        run_stock(arguments_of(name, stock), monkeypatch)
        assert not is_sound(stock)
    capsys.readouterr()
    assert main(["run", *arguments_of(name, guarded)]) == 0
    assert is_sound(guarded)
    file = guarded / "nanguard" / "events.jsonl"
    [event] = read_jsonl(file)
    assert (event["signal"], row in event["culprit"]["rows"]) == (sign, True)
    assert told_by(capsys.readouterr().err) == [
        f"nanguard: {trainer} is guarded; events go to {file}",
        f"nanguard: 1 event in {file}.",
    ]


def test_a_healthy_script_ends_bit_identical(tmp_path, monkeypatch, capsys):
    stock, guarded = tmp_path / "stock", tmp_path / "guarded"
    run_stock([*arguments_of("weighted", stock), "--rows", "12"], monkeypatch)
    torch.manual_seed(4321)
    assert main(["run", *arguments_of("weighted", guarded), "--rows", "12"]) == 0
    expected, actual = (load_file(folder / "model.safetensors") for folder in (stock, guarded))
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    assert (
        told_by(capsys.readouterr().err)[-1]
        == f"nanguard: no events, so there is no {guarded / 'nanguard' / 'events.jsonl'}."
    )


# ---- settings ----


@pytest.fixture
def printing(tmp_path) -> str:
    """A script that tells what it was given, and stops there."""
    file = tmp_path / "printing.py"
    file.write_text("import sys\nprint(*sys.argv[1:])\n")
    return str(file)


def test_settings_reach_the_trainer(tmp_path, monkeypatch, capsys):
    config = tmp_path / "guard.yaml"
    config.write_text("nanguard_max_bad_steps: 7\nnanguard_on_spike: clip\n")
    monkeypatch.setenv("NANGUARD_AUTOPSY", "no")
    monkeypatch.setenv("NANGUARD_ON_SPIKE", "observe")
    words = ["run", "--config", str(config), "--nanguard_on_spike=skip", "--", *arguments_of("transcripts", tmp_path)]
    assert main(words) == 0
    output = capsys.readouterr()
    settings = "nanguard_on_spike=skip, nanguard_max_bad_steps=7, nanguard_autopsy=False"
    assert f"Seq2SeqTrainer is guarded with {settings};" in output.err
    assert "autopsy of" not in output.err
    assert not (tmp_path / "nanguard" / "autopsy").exists()
    assert os.environ["NANGUARD_ON_SPIKE"] == "observe"


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
def test_what_follows_the_script_is_its_own(words, seen, printing, monkeypatch, capsys):
    monkeypatch.chdir(Path(printing).parent)
    monkeypatch.setattr(sys, "path", ["before", *sys.path[1:]])
    assert main(["run", *words]) == 0
    output = capsys.readouterr()
    assert output.out == f"{seen}\n"
    assert output.err == "nanguard: no Trainer was built, so nothing was guarded.\n"


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


@pytest.mark.parametrize(("code", "seen"), [("3", 3), ("None", None), ("'gone'", "gone"), ("0", 0)])
def test_the_exit_code_is_the_scripts(code, seen, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", write(tmp_path, f"raise SystemExit({code})")])
    assert stop.value.code == seen
    assert bool(told_by(capsys.readouterr().err)) == (not seen)


FAILING = """
def inner():
    raise KeyError("gone")
try:
    inner()
except KeyError as error:
    raise RuntimeError("failed") from error
"""


def test_a_traceback_is_the_scripts(tmp_path, capsys):
    script = write(tmp_path, FAILING)
    assert main(["run", script]) == 1
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1
    assert capsys.readouterr().err == done.stderr


def test_a_syntax_error_is_shown_as_python_does(tmp_path, capsys):
    script = write(tmp_path, "x = (\n")
    assert main(["run", script]) == 1
    assert capsys.readouterr().err == subprocess.run([sys.executable, script], capture_output=True, text=True).stderr


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


@pytest.mark.parametrize("full", [False, True])
def test_frames_of_the_guard_are_left_out_and_that_is_said(full, tmp_path, capsys):
    words = [write(tmp_path, RAISING), "--output_dir", str(tmp_path / "run")]
    before = list(sys.path)
    assert main(["run", *(["--full-traceback"] if full else []), *words]) == 1
    assert sys.path == before
    sys.modules.pop("weighted")
    error = capsys.readouterr().err
    assert "ZeroDivisionError: in the loss" in error
    assert (os.path.join("hf_nanguard", "hf", "trainer", "mixin.py") in error) == full
    assert ("frames of the guard hidden above" in error) == (not full)
    assert told_by(error)[-1].startswith("nanguard: 1 event in ")


def test_the_environment_is_as_before(tmp_path, capsys):
    before = dict(os.environ)
    assert main(["run", "--nanguard_mode", "observe", write(tmp_path, "pass")]) == 0
    assert dict(os.environ) == before


# ---- processes ----


def test_a_script_that_forks_and_ends_both(tmp_path, capfd):
    script = write(
        tmp_path,
        """
import os, sys
child = os.fork()
if child == 0:
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(0)
""",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hf_nanguard.run", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, "5\n")
    assert told_by(done.stderr) == ["nanguard: no Trainer was built, so nothing was guarded."]


def test_a_child_needs_no_settings_file(tmp_path, monkeypatch, capfd):
    """What the file says is handed on as it is: a child may start in another folder."""
    (tmp_path / "guard.yaml").write_text("nanguard_mode: observe\n")
    monkeypatch.setenv("NANGUARD_CONFIG", "guard.yaml")
    monkeypatch.chdir(tmp_path)
    child = "import os, sys; print(type(sys.meta_path[0]).__name__, os.environ['NANGUARD_MODE'])"
    script = write(
        tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True, cwd='/')"
    )
    assert main(["run", script]) == 0
    assert capfd.readouterr().out == "ImportHook observe\n"
    assert os.environ["NANGUARD_CONFIG"] == "guard.yaml"


def test_processes_that_a_script_starts_are_guarded_too(tmp_path, capfd):
    """What a child will do is seen without importing transformers: it waits for it."""
    hidden = tmp_path / "machine"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.of_the_machine = True\n")
    child = """import os, sys
print(type(sys.meta_path[0]).__name__, sys.of_the_machine, sys.path[0] == '', os.environ["NANGUARD_MODE"])"""
    script = write(
        tmp_path,
        f"""
import os, subprocess, sys
os.environ["PYTHONPATH"] += os.pathsep + {str(hidden)!r}
subprocess.run([sys.executable, "-c", {child!r}], check=True)
""",
    )
    assert main(["run", "--nanguard_mode", "observe", script]) == 0
    assert capfd.readouterr().out == "ImportHook True True observe\n"


FREE = f"""
import os, sys
assert "transformers" not in sys.modules and "torch" not in sys.modules
os.environ["HF_HUB_OFFLINE"] = "1"
sys.argv = [{str(SCRIPTS / "weighted.py")!r}, "--output_dir", sys.argv[1], "--rows", "4"]
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
    """A script is free to set its environment before it imports anything; Ctrl-C ends it with 130, events whole."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NANGUARD_ON_SPIKE": "skip"}
    environment.pop("HF_HUB_OFFLINE")
    command = [sys.executable, "-m", "hf_nanguard.run", write(tmp_path, FREE), str(tmp_path / "run")]
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
    assert process.returncode == 130, error
    events = tmp_path / "run" / "nanguard" / "events.jsonl"
    assert told_by(error) == [
        f"nanguard: Trainer is guarded with nanguard_on_spike=skip; events go to {events}",
        f"nanguard: no events, so there is no {events}.",
        "nanguard: stopped by Ctrl-C; all files written so far are complete.",
    ]
    assert "Traceback" not in error


# ---- ranks ----

BOTH = f"""
import runpy, sys
folder = sys.argv[1]
for name, words in (("weighted", ["--output_dir", folder + "/weighted"]), ("rewards", [folder + "/rewards"])):
    sys.argv = [f"{SCRIPTS}/{{name}}.py", *words]
    runpy.run_path(sys.argv[0], run_name="__main__")

# Without this torch 2.13 aborts some of the ranks at their very end, with and without the guard ("terminate called without
# an active exception"): threads of gloo are still running when the process ends.
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
    assert told_by(done.stderr) == [
        f"nanguard: SFTTrainer is guarded; events go to {events}",
        f"nanguard: no events, so there is no {events}.",
    ]
