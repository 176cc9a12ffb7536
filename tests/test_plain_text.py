import pytest

from hf_nanguard.plain_text import first_line, format_error, format_value, printable


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
    assert printable("abcdef", max_length=3) == "abc..."
    assert printable("abc", max_length=3) == "abc"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("\n  first\nsecond", "first"),
        ("", "no message"),
        (" \n", "no message"),
        ("a\x1b[2Jb\rc", "a [2Jb"),
        ("x" * 900, "x" * 300),
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
