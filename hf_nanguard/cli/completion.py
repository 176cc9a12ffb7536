"""`nanguard completion`: prints what a shell needs to complete commands, options and their values.

The scripts are written out whole, from the parser itself: a completion that starts Python at every key would be slow.
"""

import argparse
from dataclasses import dataclass
from typing import Any

EPILOG = """examples:
  source <(nanguard completion bash)                                         # or in ~/.bashrc
  nanguard completion zsh > ~/.zfunc/_nanguard                               # a folder of your fpath
  nanguard completion fish > ~/.config/fish/completions/nanguard.fish
"""


@dataclass(frozen=True)
class Option:
    """One option of a command: its spellings, its help, whether a value follows, and which values there are."""

    names: list[str]
    help: str
    takes_value: bool
    values: list[str]


@dataclass(frozen=True)
class Command:
    """One command: its name, its help, its options and the words it may be followed by."""

    name: str
    help: str
    options: list[Option]
    words: list[str]


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description="Prints a script that lets a shell complete nanguard's commands and options.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(WRITERS), help="your shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the script of a shell."""
    print(WRITERS[arguments.shell](find_commands(arguments.parser)), end="")
    return 0


def find_commands(parser: argparse.ArgumentParser) -> list[Command]:
    """Returns all commands of a parser, in its order."""
    [subparsers] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    return [_describe(name, helps.get(name, ""), command) for name, command in subparsers.choices.items()]


def _describe(name: str, text: str, parser: argparse.ArgumentParser) -> Command:
    from ..core.settings import CHOICES

    options, words = [], []
    for action in parser._actions:
        values = [str(value) for value in action.choices or CHOICES.get(action.dest.removeprefix("nanguard_"), ())]
        if action.option_strings:
            first = (action.help or "").replace("%%", "%").split(". ")[0].split(" (default")[0]
            options.append(Option(list(action.option_strings), first, action.nargs != 0, values))
        else:
            words += values
    return Command(name, text, options, words)


# ---- shells ----


def write_bash(commands: list[Command]) -> str:
    """Returns the script for bash."""
    cases = []
    for command in commands:
        names = " ".join(name for option in command.options for name in option.names)
        values = [
            f"                {'|'.join(option.names)}) COMPREPLY=($(compgen -W '{' '.join(option.values)}' -- \"$cur\")); return ;;"
            for option in command.options
            if option.values
        ]
        inner = "\n".join(['            case "$before" in', *values, "            esac"]) if values else ""
        words = f"            words='{' '.join(command.words)}'" if command.words else ""
        lines = [f"        {command.name})", inner, f"            options='{names}'", words, "            ;;"]
        cases.append("\n".join(line for line in lines if line))
    top = " ".join([*(command.name for command in commands), "--help", "--version"])
    return f"""# bash completion of nanguard
_nanguard() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} options='' words=''
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{top}' -- "$cur"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{chr(10).join(cases)}
    esac
    case "$cur" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$cur")) ;;
        *) COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur")) ;;
    esac
}}
complete -o filenames -F _nanguard nanguard
"""


def write_zsh(commands: list[Command]) -> str:
    """Returns the script for zsh."""
    cases = []
    for command in commands:
        values = [
            f"        {'|'.join(option.names)}) compadd -- {' '.join(option.values)}; return ;;"
            for option in command.options
            if option.values
        ]
        described = [_zsh_item(name, option.help) for option in command.options for name in option.names]
        inner = ["      case $words[CURRENT-1] in", *values, "      esac"] if values else []
        more = [f"      compadd -- {' '.join(command.words)}"] if command.words else []
        cases += [f"    {command.name})", *inner, f"      options=({' '.join(described)})", *more, "      ;;"]
    top = " ".join(_zsh_item(command.name, command.help) for command in commands)
    return f"""#compdef nanguard
_nanguard() {{
  local -a commands options
  if (( CURRENT == 2 )); then
    commands=({top})
    _describe command commands
    return
  fi
  case $words[2] in
{chr(10).join(cases)}
  esac
  if [[ $words[CURRENT] == -* ]]; then
    _describe -o option options
  else
    _files
  fi
}}
if [[ $funcstack[1] == _nanguard ]]; then
  _nanguard "$@"
else
  compdef _nanguard nanguard
fi
"""


def _zsh_item(name: str, text: str) -> str:
    described = f"{name}:{text.replace(':', chr(92) + ':')}" if text else name
    return "'" + described.replace("'", "'\\''") + "'"


def write_fish(commands: list[Command]) -> str:
    """Returns the script for fish."""
    lines = ["# fish completion of nanguard"]
    for command in commands:
        here = f"complete -c nanguard -n '__fish_seen_subcommand_from {command.name}'"
        lines.append(
            f"complete -c nanguard -n __fish_use_subcommand -f -a {command.name} -d {_fish_text(command.help)}"
        )
        if command.words:
            lines.append(f"{here} -f -a {_fish_text(' '.join(command.words))}")
        for option in command.options:
            names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
            value = (
                f" -x -a {_fish_text(' '.join(option.values))}"
                if option.values
                else " -r"
                if option.takes_value
                else ""
            )
            lines.append(f"{here} {' '.join(names)}{value} -d {_fish_text(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


WRITERS = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}
