"""Forged and damaged bundles: `replay()` returns a verdict or raises `ArgumentError`, whatever is in the files."""

import json
import random
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

from hf_nanguard import ArgumentError, replay
from hf_nanguard.core.autopsy.evidence.verdict import Verdict

from .bundles import bad_weight, write

VALUES = [
    None, True, 0, -1, 7, 2**31, 10**30, 1.5, "nan", "inf", "", "x", "a\x1bb", "../../etc", "(a+)+$", "cuda:99", "x" * 10**4,
    [], [[]], [1], ["x"], [None], {}, {"a": 1}, {"": {}},
]  # fmt: skip
FILES = ("facts.json", "inputs.safetensors", "weights.safetensors")


@pytest.fixture(scope="module", params=["plain", "sft"])
def forged(request, tmp_path_factory) -> tuple[Path, dict]:
    """A bundle, with an adapter if of SFT, and the content of its facts.json."""
    path, _ = write(tmp_path_factory.mktemp("bundle"), request.param, bad_weight, lora=request.param == "sft")
    return path, json.loads((path / "facts.json").read_text())


def find_places(value: object, place: tuple = ()) -> Iterator[tuple]:
    """Yields the keys that lead to each value of a JSON document."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from find_places(item, (*place, key))


def put(document: dict, place: tuple, value: object) -> object:
    if not place:
        return value
    document = deepcopy(document)
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return document


def is_refused(path: Path) -> bool:
    try:
        assert isinstance(replay(path), Verdict)
    except ArgumentError as error:
        refusal = str(error)
    else:
        return False
    assert "\n" not in refusal
    return True


@pytest.mark.parametrize("num_cases", [20, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_any_value_in_any_place(forged, num_cases):
    path, document = forged
    # The places of random states are thousands of numbers; all others are tried more often.
    places = [place for place in find_places(document) if len(place) < 2 or place[0] != "rng"]
    chosen = random.Random(num_cases)
    refused = 0
    for _ in range(num_cases):
        forged_document = put(document, chosen.choice(places), chosen.choice(VALUES))
        (path / "facts.json").write_text(json.dumps(forged_document))
        refused += is_refused(path)
    (path / "facts.json").write_text(json.dumps(document))
    assert 0 < refused < num_cases
    assert not is_refused(path)


@pytest.mark.parametrize("name", FILES)
def test_any_part_of_a_file(forged, name, tmp_path):
    path = shutil.copytree(forged[0], tmp_path / "step-7")
    content = (path / name).read_bytes()
    chosen = random.Random(0)
    for length in [0, 1, 7, 8, 9, len(content) - 1, *(chosen.randrange(len(content)) for _ in range(10))]:
        (path / name).write_bytes(content[:length])
        assert is_refused(path)
    header = min(len(content), 400)
    for position in [chosen.randrange(header) for _ in range(12)]:
        changed = bytearray(content)
        changed[position] ^= 1 << chosen.randrange(8)
        (path / name).write_bytes(changed)
        is_refused(path)  # a verdict or an `ArgumentError`
    (path / name).unlink()
    assert is_refused(path)


@pytest.mark.parametrize("path", ["", "a\0b", "/dev/null", "missing", None, 7, b"bytes", ["list"]])
def test_what_is_no_path_of_a_bundle(path):
    with pytest.raises(ArgumentError):
        replay(path)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": 7}, {"checkpoint": [None]}, {"checkpoint": "missing"}, {"checkpoint": "a\0b"}, {"factory": 7},
        {"factory": ""}, {"factory": "missing:build"}, {"factory": "os:getcwd"}, {"factory": "json:loads"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_checkpoint_or_factory(forged, options):
    with pytest.raises(ArgumentError):
        replay(forged[0], **options)
