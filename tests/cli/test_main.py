"""The command line: help at once, bad arguments in one message with exit code 2."""

import os
import re
import subprocess
import sys

import pytest

from hf_nanguard import __version__
from hf_nanguard.cli import main as cli
from hf_nanguard.cli.main import COMMANDS, main
from hf_nanguard.cli.shared.command_parser import needs_trl
from hf_nanguard.errors import ArgumentError
from tests.test_plain_text import HOSTILE, STEERING


def run_help(*arguments: str, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command(capsys):
    text = run_help(capsys=capsys)
    assert all(command.__name__.rsplit(".", 1)[1] in text for command in COMMANDS)


def test_help_has_examples(capsys):
    examples = run_help(capsys=capsys).split("examples:")[1]
    assert examples.count("nanguard ") >= 3


@pytest.mark.parametrize("command", [command.__name__.rsplit(".", 1)[1] for command in COMMANDS])
def test_sentences_of_the_help_fit_a_narrow_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = run_help(command, capsys=capsys).splitlines()
    sentences = [line for line in lines if line and not line.startswith((" ", "usage:"))]
    assert len(sentences) > 3
    assert [line for line in sentences if len(line) > 60] == []


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"nanguard {__version__}\n"


@pytest.mark.parametrize("command", [command.__name__.rsplit(".", 1)[1] for command in COMMANDS])
def test_every_command_has_an_example(command, capsys):
    text = run_help(command, capsys=capsys)
    examples = text[text.index("example") :]
    assert re.search(rf"^  .*nanguard {command}( [\w.-]|$)", examples, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "`nanguard run train.py` guards your script"),
        (["watch"], "watch needs RUN, the output directory of a run. For example: nanguard watch runs/mine"),
        (["scan"], "scan needs PATH"),
        (["replay"], "replay needs BUNDLE"),
    ],
    ids=" ".join,
)
def test_without_its_argument_a_command_says_what_to_give(words, told, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], ["command"]),
        (["dmeo"], ["command must be one of doctor, ", "got 'dmeo'. Did you mean demo? Run `nanguard --help`"]),
        (["demo", "--steps", "x"], ["--steps", "'x'", "6", "nanguard demo --help"]),
        (["demo", "--steps", "2"], ["--steps", "'2'", "6"]),
        (["demo", "--steps"], ["--steps needs a value. Run"]),
        (["demo", "--stepz", "9"], ["nanguard demo does not know --stepz 9. Did you mean --steps?"]),
        (["watch", "--interval", "soon", "."], ["--interval must be a number, got 'soon'. Run"]),
        (["run", "--nanguard_on_spike", "skp", "x.py"], ["--nanguard_on_spike must be one of", "Did you mean skip?"]),
        (["run", "--nanguard_on_spik", "skip", "x.py"], ["Did you mean --nanguard_on_spike?"]),
        (["demo", "--seed", "-1"], ["--seed", "'-1'", "0"]),
        (["demo", "--bogus", "3"], ["--bogus", "nanguard demo --help"]),
        (["run", "--bogus", "train.py"], ["--bogus", "nanguard run --help"]),
        (["run", "--config"], ["--config"]),
        (["run", "--max-restarts", "3", "train.py"], ["--max-restarts 3", "--resume"]),
        (["completion"], ["SHELL", "bash", "zsh"]),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_bad_arguments(arguments, told, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert [part for part in told if part not in output.err] == []


@pytest.mark.parametrize(
    ("missing", "names"), [("trl", "trl datasets"), ("datasets", "trl datasets"), ("mergekit", "mergekit")]
)
def test_a_missing_package_comes_with_the_command_that_installs_it(missing, names):
    with pytest.raises(ArgumentError) as caught, needs_trl("demo"):
        raise ModuleNotFoundError(name=missing)
    assert str(caught.value) == f"nanguard demo needs {missing}. Run pip install {names}."


def test_an_output_folder_that_cannot_be(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert main(["demo", "--output-dir", str(file)]) == 2
    assert f"--output-dir must be a writable folder, got {str(file)!r}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report"], ["watch", "--once"], ["scan"], ["doctor", "--config"]], ids=str)
def test_a_path_that_cannot_be(words, capsys):
    assert main([*words, "x" * 300]) == 2
    shown = capsys.readouterr().err
    assert (shown.count("\n"), len(shown) < 400, "x" * 200 in shown) == (1, True, True)


def test_ctrl_c(monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def add_parser(subparsers):
            def run(arguments):
                raise KeyboardInterrupt

            subparsers.add_parser("wait").set_defaults(run=run)

    monkeypatch.setattr(cli, "COMMANDS", (Interrupted,))
    assert main(["wait"]) == 130
    assert "Ctrl-C" in capsys.readouterr().err


# ---- the standard output ----


def run_shell(command, folder, **variables):
    """Runs a command line of a shell, where `nanguard` is ours, in a folder with a run whose name is not ASCII."""
    run = folder / "lauf-\u00e4" / "nanguard"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    command = command.replace("nanguard", f"{sys.executable} -m hf_nanguard", 1).replace("RUN", str(run.parent))
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, env={**os.environ, **variables}
    )


FULL = "nanguard: the output cannot be written: No space left on device.\n"
OUTPUTS = {  # command line: exit code and error output
    "nanguard report RUN > /dev/full": (1, FULL),
    "PYTHONUNBUFFERED=1 nanguard report RUN > /dev/full": (1, FULL),
    "nanguard watch --once RUN > /dev/full": (1, FULL),
    "nanguard completion bash > /dev/full": (1, FULL),  # longer than the buffer
    "nanguard report RUN > /dev/full 2> /dev/full": (1, ""),
    "nanguard reprot 2> /dev/full": (2, ""),
    "nanguard report --json RUN >&-": (0, ""),
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_that_cannot_be_written_is_one_sentence(command, tmp_path):
    done = run_shell(command, tmp_path, PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr) == OUTPUTS[command]


def test_an_output_whose_encoding_lacks_a_character(tmp_path):
    done = run_shell("nanguard report RUN", tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "lauf-\\xe4: 1 logged steps" in done.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom hf_nanguard.cli.main import main\n"
        "for command in ('demo', 'run', 'doctor'):\n"
        "    try: main([command, '--help'])\n    except SystemExit: pass\n"
        "print('heavy:', [name for name in ('torch', 'transformers', 'trl', 'datasets', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: []\n")


# ---- hostile words ----

EVIL = f"x\nnanguard: all is well {HOSTILE}"
COMMANDS_WITH_WORDS = {
    "unknown command": [EVIL],
    "unknown flag": ["demo", f"--{EVIL}"],
    "bad value": ["demo", "--steps", EVIL],
    "script": ["run", EVIL],
    "setting": ["run", "--nanguard_mode", EVIL, "x.py"],
    "config": ["run", "--config", EVIL, "x.py"],
    "checkpoint": ["scan", EVIL],
    "folder": ["demo", "--output-dir", f"/dev/null/{EVIL}"],
}


@pytest.mark.parametrize("words", COMMANDS_WITH_WORDS.values(), ids=COMMANDS_WITH_WORDS)
def test_an_error_is_one_line_that_cannot_steer_the_terminal(words, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("nanguard: ")
    assert not STEERING & set(line)


def test_an_environment_variable_cannot_steer_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("NANGUARD_MODE", EVIL)
    assert main(["run", "x.py"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "NANGUARD_MODE" in line
    assert not STEERING & set(line)
