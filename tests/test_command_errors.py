"""Messages of argparse in the form of our own, whatever Python's version says."""

import argparse

import pytest

from hf_nanguard.command_errors import reword, suggest


@pytest.mark.parametrize(
    ("message", "told"),
    [
        # Python 3.11, 3.12 and 3.15
        ("argument --mode: invalid choice: 'atc' (choose from 'act', 'off')", "--mode must be one of act, off, got 'atc'"),
        ("argument --mode: invalid choice: 'atc' (choose from act, off)", "--mode must be one of act, off, got 'atc'"),
        ("argument --mode: invalid choice: 'atc', maybe you meant 'act'? (choose from act, off)",
         "--mode must be one of act, off, got 'atc'. Did you mean act?"),
        ("argument --n/--number: invalid int value: 'three'", "--n must be an integer, got 'three'"),
        ("argument -n/--number: expected one argument", "-n needs a value"),
        ("argument --n: must be an integer from 0 to 9, got '10'", "--n must be an integer from 0 to 9, got '10'"),
        ("not allowed with argument --x", "not allowed with argument --x"),
    ],
)  # fmt: skip
def test_messages(message, told):
    assert reword(message).startswith(told)


def test_the_messages_of_this_python_are_known():
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--mode", choices=["act", "off"])
    parser.add_argument("--number", type=int)
    found = []
    for words in (["--mode", "atc"], ["--number", "x"]):
        with pytest.raises(argparse.ArgumentError) as error:
            parser.parse_args(words)
        found.append(reword(str(error.value)))
    assert found == [
        "--mode must be one of act, off, got 'atc'. Did you mean act?",
        "--number must be an integer, got 'x'",
    ]


def test_nothing_is_suggested_that_is_not_alike():
    assert suggest("--steps=3", ["--steps", "--json"]) == ". Did you mean --steps?"
    assert suggest("xyz", ["--steps"]) == ""
