"""Text that is not ours: quoted where it comes from, shown or left out where it is written, printable where it is read."""

import logging

import pytest

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.errors import ArgumentError, LossMissingError, NonFiniteError
from hf_nanguard.plain_text import (
    cut,
    first_line,
    format_error,
    format_value,
    printable,
    quote,
    quote_error,
    show,
)

HOSTILE = "\x1b[31mred\x1b]0;title\x07 over\rwritten \u202egnp.exe [bold]loud[/bold]"
STEERING = set("\x1b\x07\r\u202e\u2066\x9b")
logger = logging.getLogger("hf_nanguard")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with ümlauts and 漢字", "plain, with ümlauts and 漢字"),
        ("\x1b[31mred\x1b[0m", " [31mred [0m"),
        ("\x9b2J", " 2J"),
        ("over\rwritten\b\b", "over written  "),
        ("user\u202egnp.exe", "user gnp.exe"),
        ("zero\u200bwidth\u2066isolate\u2069", "zero width isolate "),
        ("two\nlines\u2028three", "two lines three"),
        ("\x00\x7f", "  "),
    ],
)
def test_nothing_that_steers_a_terminal_is_left(text, shown):
    assert printable(text) == shown


def test_only_line_feeds_stay_where_newlines_are_kept():
    assert printable("a\r\nb\x1b\x85c", keep_newlines=True) == "a \nb  c"


def test_a_long_text_is_cut_and_says_so():
    assert cut("abcdef", 3) == "abc..."
    assert cut("abc", 3) == "abc"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("\n  first\nsecond", "first"),
        ("", "no message"),
        (" \n", "no message"),
        ("x" * 900, f"{'x' * 300}..."),
    ],
)
def test_the_first_line_of_an_error(message, line):
    assert first_line(RuntimeError(message)) == line


def test_an_error_is_named_with_its_first_line():
    assert format_error(KeyError("missing\nmore"), 200) == "KeyError: 'missing\\nmore'"
    assert format_error(ValueError("one\ntwo")) == "ValueError: one"


def test_a_value_fits_into_a_sentence():
    assert [format_value(value) for value in ("a", 7, True, [1])] == ["'a'", "7", "True", "[1]"]
    assert format_value("x" * 500) == f"'{'x' * 199}..."
    assert format_value(10**5000) == "an integer of 16610 bits"  # which Python refuses to write


# ---- quoted text ----


def test_quoted_text_is_shown_or_left_out():
    message = f"ValueError inside the loss: {quote('Jane Roe')} at step 3"
    event = {"message": message, "values": {quote("Jane"): [quote("Roe"), 3, None]}}
    assert show(event) == {
        "message": "ValueError inside the loss: Jane Roe at step 3",
        "values": {"Jane": ["Roe", 3, None]},
    }
    assert show(event, text=False) == {
        "message": "ValueError inside the loss: [redacted] at step 3",
        "values": {"[redacted]": ["[redacted]", 3, None]},
    }


def test_quoted_text_that_was_cut_or_holds_marks_is_left_out_whole():
    assert show(cut(quote("Jane Roe"), 4), text=False) == "[redacted]"
    assert show(quote(f"Jane {quote('Roe')} junior"), text=False) == "[redacted]"
    assert printable(quote("Jane")) == "Jane"


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_the_text_of_an_error_is_quoted_but_not_its_class():
    assert show(quote_error(ValueError("Jane Roe")), text=False) == "ValueError: [redacted]"
    assert format_error(MuteError()) == "MuteError: MuteError"


# ---- the sinks ----


@pytest.mark.parametrize("arguments", [("%s happened", HOSTILE), ("%s: %s", ValueError(HOSTILE), HOSTILE), (HOSTILE,)])
def test_nothing_that_steers_a_terminal_reaches_the_log(arguments, caplog):
    logger.warning(*arguments)
    [record] = caplog.records
    assert "gnp.exe [bold]loud[/bold]" in record.getMessage()
    assert not STEERING & set(record.getMessage())


def test_an_argument_cannot_fake_a_second_line(caplog):
    logger.warning("hf_nanguard: %s,\n  as %d of %.1f", "x\n[WARNING] all is lost\u2028now", 2, 3.0)
    assert caplog.records[0].getMessage() == "hf_nanguard: x [WARNING] all is lost now,\n  as 2 of 3.0"


def test_a_traceback_in_the_log_is_printable(caplog):
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        logger.warning("failed", exc_info=error)
    assert "Traceback (most recent call last):\n" in caplog.text
    assert not STEERING & set(caplog.text)


def test_an_argument_without_text_is_named_by_its_class(caplog):
    logger.warning("it failed with %s", MuteError())
    assert caplog.records[0].getMessage() == "it failed with MuteError"


@pytest.mark.parametrize("kind", [ArgumentError, NonFiniteError, LossMissingError])
def test_our_errors_are_printable(kind):
    error = kind(f"learning_rate must be a number,\ngot {HOSTILE}")
    assert str(error).startswith("learning_rate must be a number,\ngot ")
    assert not STEERING & set(str(error))
    assert str(kind()) == ""


@pytest.mark.parametrize("text", [True, False])
def test_a_journal_decides_about_blocks_of_lines_too(text, caplog):
    Journal(Ranks(alone=True), text=text).log(f"---- autopsy ----\n  text: {quote('Jane Roe')}")
    assert ("Jane Roe" in caplog.text) == text
    assert "---- autopsy ----\n  text: " in caplog.text
