"""The completion scripts name every command, option and value; bash's is tried out."""

import re
import subprocess

import pytest

from hf_nanguard.cli.completion import WRITERS, find_commands
from hf_nanguard.cli.main import build_parser, main
from hf_nanguard.core.settings import CHOICES

COMMANDS = find_commands(build_parser())


def complete(*words: str, folder: str = ".") -> list[str]:
    """Returns what bash offers for the last word."""
    script = WRITERS["bash"](COMMANDS)
    typed = " ".join(f"'{word}'" for word in words)
    script += f'COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _nanguard; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_offers_commands():
    assert set(complete("nanguard", "")) == {*(command.name for command in COMMANDS), "--help", "--version"}
    assert complete("nanguard", "ru") == ["run"]


def test_bash_offers_options_values_and_files(tmp_path):
    (tmp_path / "train.py").touch()
    assert complete("nanguard", "run", "--nanguard_on_spi") == ["--nanguard_on_spike"]
    assert complete("nanguard", "run", "--nanguard_on_spike", "") == list(CHOICES["on_spike"])
    assert complete("nanguard", "completion", "z", folder=str(tmp_path)) == ["zsh"]
    assert complete("nanguard", "run", "tr", folder=str(tmp_path)) == ["train.py"]
    assert "--steps" in complete("nanguard", "demo", "-")


@pytest.mark.parametrize("shell", sorted(WRITERS))
def test_every_command_and_option_is_there(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    words = set(re.split(r"[\s:'()]+", text))
    for command in COMMANDS:
        assert command.name in words
        names = [name for option in command.options for name in option.names]
        assert [n for n in names if (n.lstrip("-") if shell == "fish" else n) not in words] == []


def test_an_unknown_shell(capsys):
    assert main(["completion", "csh"]) == 2
    assert "'csh'" in capsys.readouterr().err
