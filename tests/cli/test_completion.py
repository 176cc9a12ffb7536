"""The completion scripts contain every command, option and value; the one for bash is run."""

import argparse
import re
import subprocess

import pytest
import shtab

from hf_nanguard.cli.completion import PATHS
from hf_nanguard.cli.main import build_parser, main
from hf_nanguard.core.settings import SETTINGS

[SUBPARSERS] = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
COMMANDS = SUBPARSERS.choices


@pytest.fixture
def complete(tmp_path, capsys):
    """Returns what bash offers for the last word, in a folder with one file and one folder."""
    (tmp_path / "train.py").touch()
    (tmp_path / "trained").mkdir()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def run(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in words)
        tried = (
            f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_nanguard; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        command = ["bash", "-c", f"{script}\n{tried}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stderr == ""
        return done.stdout.split()

    return run


def test_bash_offers_commands(complete):
    assert complete("nanguard", "") == list(COMMANDS)
    assert complete("nanguard", "ru") == ["run"]
    assert complete("nanguard", "--v") == ["--version"]


def test_bash_offers_options_and_their_values(complete):
    assert complete("nanguard", "run", "--nanguard_on_spi") == ["--nanguard_on_spike"]
    assert complete("nanguard", "run", "--nanguard_on_spike", "") == list(SETTINGS["on_spike"].choices)
    assert complete("nanguard", "sft", "--preset", "b") == ["balanced"]
    assert complete("nanguard", "grpo", "--num_gen") == ["--num_generations"]
    assert complete("nanguard", "completion", "z") == ["zsh"]
    assert "--steps" in complete("nanguard", "demo", "-")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["run", "tr"], ["train.py", "trained"]),
        (["run", "--nanguard_on_spike", "skip", "tr"], ["train.py", "trained"]),
        (["run", "train.py", "--data", "tr"], ["train.py", "trained"]),
        (["sft", "--config", "tr"], ["train.py", "trained"]),
        (["sft", "--model_name_or_path", "tr"], ["trained"]),
        (["replay", "tr"], ["trained"]),
    ],
    ids=" ".join,
)
def test_bash_offers_files_and_folders(complete, words, offered):
    assert sorted(complete("nanguard", *words)) == offered


def test_paths_are_arguments_of_commands():
    assert PATHS.keys() <= {action.dest for command in COMMANDS.values() for action in command._actions}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_there(shell, capsys):
    assert shell in shtab.SUPPORTED_SHELLS
    assert main(["completion", shell]) == 0
    words = set(re.split(r"[\s*:'\"()\[\]{},]+", capsys.readouterr().out))
    for name, command in COMMANDS.items():
        assert name in words
        options = [option for action in command._actions for option in action.option_strings]
        assert [option for option in options if (option.lstrip("-") if shell == "fish" else option) not in words] == []


def test_an_unknown_shell(capsys):
    assert main(["completion", "csh"]) == 2
    assert "'csh'" in capsys.readouterr().err
