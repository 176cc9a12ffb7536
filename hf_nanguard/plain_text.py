"""Text from errors, datasets and files: what may be shown, and how it is made safe to print.

Sources mark what is not ours with [`quote`]. Who writes it down decides: [`show`] keeps the text or leaves it out. What reaches a
terminal or a log passes [`printable`], at that place and nowhere before: for the log it is [`make_record_printable`].
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

MAX_LINE = 300
SHOWN_ROWS = 8
REDACTED = "[redacted]"
# Marks around quoted text: two code points that Unicode reserves for use inside a process.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_QUOTED = re.compile(f"{_BEGIN}[^{_END}]*{_END}?")
_METRIC = re.compile(r"[\w./:@-]+")
_MARKS = str.maketrans("", "", _BEGIN + _END)


def quote(text: str) -> str:
    """Marks text of the data, or from code of the user's that may contain some, until [`show`] decides about it."""
    return f"{_BEGIN}{text.translate(_MARKS)}{_END}"


def quote_metric(name: str) -> str:
    """Returns the name of a metric, quoted unless it is one word: the name of an evaluation dataset is the user's, too."""
    return name if _METRIC.fullmatch(name) else quote(name)


def show(value: object, text: bool = True) -> Any:
    """Returns plain values, nested or not, with quoted text as it is, or, without `text`, with `[redacted]` in its place."""
    if isinstance(value, str):
        return (value if text else _QUOTED.sub(REDACTED, value)).translate(_MARKS)
    if isinstance(value, dict):
        return {show(key, text): show(item, text) for key, item in value.items()}
    return [show(item, text) for item in value] if isinstance(value, (list, tuple)) else value


def cut(text: str, max_length: int) -> str:
    """Returns at most that many characters of a text, with `...` behind them if there are more."""
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def printable(text: str, max_length: int | None = None, keep_newlines: bool = False) -> str:
    """Returns a text that cannot move a cursor, change colors or reorder what is shown.

    Every control character, escape character, carriage return, bidirectional override and other invisible character
    becomes a space; a line feed too, unless `keep_newlines` says that the text has several lines. A text longer than `max_length`
    is cut.
    """
    shown = text.translate(_MARKS) if max_length is None else cut(text.translate(_MARKS), max_length)
    return "".join(char if char.isprintable() or (keep_newlines and char == "\n") else " " for char in shown)


def make_record_printable(record: logging.LogRecord) -> bool:
    """A filter of the guard's logger: whoever handles a record gets printable text.

    Line feeds of the message itself are ours and stay; those of its arguments and of nothing else could fake a line.
    """
    record.msg = printable(text_of(record.msg), keep_newlines=True)
    if isinstance(record.args, tuple):
        record.args = tuple(arg if isinstance(arg, (int, float)) else printable(text_of(arg)) for arg in record.args)
    if record.exc_info and not record.exc_text:
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info), keep_newlines=True)
    return True


def text_of(value: object) -> str:
    """Returns a value as text; that of a class whose own text fails is its name."""
    try:
        return str(value)
    except Exception:  # the text of a class of the user's is made by code of the user's
        return type(value).__name__


def first_line(error: BaseException, max_length: int = MAX_LINE) -> str:
    """Returns the first line of an error's message, cut to a length; `"no message"` if there is none."""
    lines = text_of(error).strip().splitlines()
    return cut(lines[0], max_length) if lines else "no message"


def format_error(error: BaseException, max_length: int = MAX_LINE) -> str:
    """Returns the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error, max_length)}"


def quote_error(error: BaseException, max_length: int = MAX_LINE) -> str:
    """Returns the same for an event, with the message quoted: code of the user's may put data into it."""
    return f"{type(error).__name__}: {quote(first_line(error, max_length))}"


def format_rows(rows: Sequence[int] | None) -> str:
    """Returns the first rows of a dataset in brackets, empty if none is known."""
    if not rows:
        return ""
    shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", ..." if len(rows) > SHOWN_ROWS else "")
    return f" (dataset {'row' if len(rows) == 1 else 'rows'} {shown})"


def format_count(number: int, noun: str) -> str:
    """Returns a number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_value(value: object, max_length: int = 200) -> str:
    """Returns a value as it is written in Python, cut to a length that fits into a sentence."""
    if isinstance(value, int) and value.bit_length() > max_length:  # Python refuses to write very long integers
        return f"an integer of {value.bit_length()} bits"
    return cut(repr(value), max_length)
