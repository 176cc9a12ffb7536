"""Messages of argparse about a bad command line, in the form of our own: what must be, what was given, what was probably meant."""

import difflib
import re
from collections.abc import Iterable

CHOICE = re.compile(
    r"argument (?P<name>.+?): invalid choice: '?(?P<value>.*?)'?(?:, maybe .*)? \(choose from (?P<known>.+)\)"
)
KIND = re.compile(r"argument (?P<name>.+?): invalid (?P<kind>int|float) value: (?P<value>.+)", re.DOTALL)
NO_VALUE = re.compile(r"argument (?P<name>.+?): expected (?:one|at least one) argument")
OWN = re.compile(r"argument (?P<name>\S+?): (?P<rest>must .+)", re.DOTALL)  # of a type of ours
KINDS = {"int": "an integer", "float": "a number"}


def reword(message: str) -> str:
    """Returns a message of argparse in our form; one of another kind as it is. It has no full stop at its end."""
    if match := CHOICE.fullmatch(message):
        known = [name.strip(" '") for name in match["known"].split(",")]
        return (
            f"{_name(match)} must be one of {', '.join(known)}, got {match['value']!r}{suggest(match['value'], known)}"
        )
    if match := KIND.fullmatch(message):
        return f"{_name(match)} must be {KINDS[match['kind']]}, got {match['value']}"
    if match := NO_VALUE.fullmatch(message):
        return f"{_name(match)} needs a value"
    if match := OWN.fullmatch(message):
        return f"{_name(match)} {match['rest']}"
    return message


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns the question whether a known word was meant, to be put behind a message; "" if none is like it."""
    near = difflib.get_close_matches(word.split("=")[0], [*known], 1)
    return f". Did you mean {near[0]}?" if near else ""


def _name(match: re.Match[str]) -> str:
    return match["name"].split("/")[0]  # of several spellings of a flag the first
