"""Bundles come back as they were, also in another process, and hostile ones are refused in one sentence."""

import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
from collections import UserDict

import numpy as np
import pytest
import torch

from hf_nanguard.core.autopsy.bundle.content import MAX_FACTS
from hf_nanguard.core.autopsy.bundle.reader import read_bundle
from hf_nanguard.core.autopsy.bundle.tensor_file import load_tensors, save_tensors
from hf_nanguard.core.autopsy.bundle.writer import write_bundle
from hf_nanguard.core.autopsy.evidence.verdict import Verdict
from hf_nanguard.core.rng import RngState
from hf_nanguard.errors import ArgumentError
from tests.core.autopsy.suspects import make_inputs, make_specimen, make_verdict


@pytest.fixture
def path(tmp_path):
    suspect = make_specimen(make_inputs())
    return write_bundle(tmp_path / "step-5", suspect, make_verdict("frozen.weight"), {"a": [1]}, weights="trainable")


def test_a_bundle_comes_back(tmp_path):
    inputs = UserDict(
        ids=torch.arange(6).view(3, 2),
        pixels=(torch.randn(3, 2, dtype=torch.bfloat16), [torch.tensor(True), None, float("-inf")]),
        name="text",
    )
    path = write_bundle(
        tmp_path / "step-9", make_specimen(inputs), make_verdict(samples=[1]), {"loss": "nan", "a": [1]}
    )
    bundle = read_bundle(str(path))
    assert bundle.path == path
    assert bundle.facts == {"loss": "nan", "a": [1]}
    assert bundle.verdict == make_verdict(samples=[1]).as_dict()
    assert (bundle.step, bundle.micro_step, bundle.inputs_are, bundle.weights_are) == (9, 1, "all", "none")
    assert list(bundle.inputs) == ["ids", "pixels", "name"]
    assert torch.equal(bundle.inputs["ids"], inputs["ids"])
    pixels, rest = bundle.inputs["pixels"]
    assert torch.equal(pixels, inputs["pixels"][0])
    assert rest[0].dtype == torch.bool
    assert rest[1:] == [None, float("-inf")]
    assert bundle.left_out == {}
    assert bundle.read_weights() == {}


@pytest.mark.parametrize("inputs", [torch.ones(2), [torch.ones(2)], {}, None, "text"], ids=str)
def test_inputs_need_not_be_a_dictionary(tmp_path, inputs):
    found = read_bundle(write_bundle(tmp_path / "s", make_specimen(inputs), make_verdict(), {})).inputs
    assert str(found) == str(inputs)


def test_a_verdict_without_an_origin(tmp_path):
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs()), Verdict(None), {})
    assert read_bundle(path).verdict["cause"] == "transient"


REPLAY = """
    import json, random, sys
    import numpy, torch
    from hf_nanguard.core.autopsy.bundle.reader import read_bundle
    bundle = read_bundle(sys.argv[1])
    torch.rand(7), random.random(), numpy.random.rand()
    bundle.rng.restore()
    print(json.dumps([torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.randn(3).tolist()]))
"""


def run(code, *args):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_random_state_is_the_same_in_another_process(tmp_path):
    random.gauss(0, 1), np.random.randn()
    rng = RngState.capture()
    drawn = [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.randn(3).tolist()]
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs(), rng=rng), make_verdict(), {})
    assert run(REPLAY, path) == drawn


WITHOUT_NUMPY = """
    import json, sys
    import torch
    def absent(self, *args, **kwargs):
        raise RuntimeError("Numpy is not available")
    torch.Tensor.numpy = absent
    from hf_nanguard.core.autopsy.bundle.reader import read_bundle
    bundle = read_bundle(sys.argv[1])
    del sys.modules["numpy"]
    bundle.rng.restore()
    print(json.dumps([bundle.rng.numpy, bundle.left_out, torch.rand(2).tolist()]))
"""


def test_a_reader_without_numpy(tmp_path):
    rng = RngState.capture()
    first = torch.rand(2).tolist()
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs(), rng=rng), make_verdict(), {})
    numpy, left_out, drawn = run(WITHOUT_NUMPY, path)
    assert numpy is None
    assert left_out == {"rng.numpy": "NumPy is not installed here"}
    assert drawn == first


# ---- hostile ----


def change(path, **changes):
    facts = json.loads((path / "facts.json").read_text())
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        place = facts
        for parent in parents:
            place = place[parent]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    (path / "facts.json").write_text(json.dumps(facts))


def refuse(path, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        read_bundle(path).read_weights()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_the_bundle_that_is_spoilt_below_can_be_read(path):
    change(path)
    assert {"frozen.weight", "embed.weight", "head.weight"} <= read_bundle(path).read_weights().keys()


def test_what_is_not_a_folder(tmp_path):
    refuse(tmp_path / "none", "must be a folder")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", "must be a folder")


@pytest.mark.parametrize("name", ["facts.json", "inputs.safetensors", "weights.safetensors"])
@pytest.mark.parametrize("how", ["missing", "link_out", "link_loop", "folder", "pipe", "cut", "huge"])
def test_files_that_are_not_what_they_should_be(path, tmp_path, name, how):
    file = path / name
    kept = file.read_bytes()
    file.unlink()
    message = "missing"
    if how == "link_out":
        (tmp_path / "outside").write_bytes(kept)
        file.symlink_to(tmp_path / "outside")
        message = "leads out of the folder"
    elif how == "link_loop":
        file.symlink_to(file)
    elif how == "folder":
        file.mkdir()
        message = "not a regular file"
    elif how == "pipe":
        os.mkfifo(file)
        message = "not a regular file"
    elif how == "cut":
        file.write_bytes(kept[: len(kept) // 2])
        message = "not strict JSON" if name == "facts.json" else "damaged or cut short"
    elif how == "huge":
        with file.open("wb") as hollow:
            hollow.truncate(2**40)
        message = "more than the allowed"
    refuse(path, message)


def test_a_link_within_the_folder_is_fine(path):
    (path / "facts.json").rename(path / "other.json")
    (path / "facts.json").symlink_to("other.json")
    assert read_bundle(path).step == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not strict JSON"),
        (b"\xff\xfe\x00", "not strict JSON"),
        (b"[]", "not an object"),
        (b'{"schema": NaN}', "the number NaN"),
        (b'{"schema": ' + b"1" * 5000 + b"}", "not strict JSON"),
        (b'{"schema": 1, "a": ' + b"[" * 500 + b"]" * 500 + b"}", "too deep"),
        (b'{"schema": 1, "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "too deep"),
        (b'{"a":' * 200_000, "too deep"),
        (b" " * (MAX_FACTS + 1), "more than the allowed 16.0 MiB"),
        (b"{}", "schema must be 1, got 'None'"),
        (b'{"schema": 2}', "schema must be 1, got '2'"),
        (b'{"schema": true}', "schema must be 1, got 'True'"),
        (b'{"schema": 1}', "no valid"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else value,
)
def test_facts_that_are_not_facts(path, content, message):
    (path / "facts.json").write_bytes(content)
    refuse(path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"facts": []}, "no valid 'facts'"),
        ({"facts": ...}, "no valid 'facts'"),
        ({"verdict": "x"}, "no valid 'verdict'"),
        ({"step": True}, "no valid 'step'"),
        ({"micro_step": "1"}, "no valid 'micro_step'"),
        ({"versions": {"torch": 2}}, "no valid 'versions'"),
        ({"left_out": {"a": ["b"]}}, "no valid 'left_out'"),
        ({"rng": None}, "no valid 'rng'"),
        ({"inputs__are": "some"}, "unknown kind"),
        ({"weights": {}}, "no valid 'are'"),
        ({"weights__are": "../all"}, "unknown kind"),
        ({"weights__saved": 1}, "no valid 'saved'"),
        ({"weights__aliases": {"a": "not.there"}}, "contradicts weights.safetensors"),
        ({"weights__aliases": {"embed.weight": "norm.weight"}}, "contradicts weights.safetensors"),
        ({"weights__aliases": {"a": "b", "b": "a"}}, "contradicts weights.safetensors"),
        ({"weights__aliases": {"a": 3}}, "no valid 'aliases'"),
        ({"tree": {"tensor": "inputs.none"}}, "which does not exist"),
        ({"tree": [1, 2]}, "unknown kind"),
        ({"tree": {"dict": {"a": {"object": "os.system"}}}}, "invalid part of kind 'object'"),
        ({"rng__python": [3, [1, 2], None]}, "random state of Python"),
        ({"rng__numpy": ["MT19937", -1, 0, 0.0]}, "random state of NumPy"),
        ({"rng__device_type": "os.path"}, "device type"),
    ],
    ids=str,
)
def test_facts_that_say_what_cannot_be(path, changes, message):
    change(path, **changes)
    refuse(path, message)


@pytest.mark.parametrize("tensor", [None, torch.zeros(3), torch.zeros(5056, dtype=torch.uint8)])
def test_a_random_state_of_the_wrong_kind(path, tensor):
    tensors = {**load_tensors(path / "inputs.safetensors"), "rng.cpu": tensor}
    save_tensors(path / "inputs.safetensors", {name: t for name, t in tensors.items() if t is not None})
    refuse(path, "random state of the CPU")


def test_a_bound_on_what_is_loaded(path, monkeypatch):
    monkeypatch.setattr("hf_nanguard.core.autopsy.bundle.reader.MAX_READ_BYTES", 1024)
    with pytest.raises(ArgumentError, match=r"more than the allowed 1\.0 KiB"):
        read_bundle(path)


class Bomb:
    def __reduce__(self):
        return os.abort, ()


def test_other_files_are_never_opened(path):
    others = ["inputs.pkl", "pytorch_model.bin", "evil.py", "facts.json.pt"]
    for name in others:
        (path / name).write_bytes(pickle.dumps(Bomb()))
    opened, listening = [], [True]  # a hook cannot be taken back
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" and listening else None)
    try:
        assert read_bundle(path).read_weights()
    finally:
        listening.clear()
    assert any(file.endswith("facts.json") for file in opened)
    assert not any(file.endswith(name) for file in opened for name in others)


def test_pickles_under_the_right_name_are_refused(path):
    (path / "inputs.safetensors").write_bytes(pickle.dumps(Bomb()))
    refuse(path, "header of more than|damaged")
    (path / "facts.json").write_bytes(pickle.dumps(Bomb()))
    refuse(path, "not strict JSON")


def test_extra_weights_are_not_read(path):
    change(path, weights__are="none", weights__saved=False, weights__aliases={})
    (path / "weights.safetensors").write_bytes(b"junk")
    assert read_bundle(path).read_weights() == {}


def test_nothing_in_a_bundle_is_spoilt_by_chance(path):
    """A byte changed at a random place: read or refused, never anything else."""
    whole = (path / "facts.json").read_bytes()
    choose = random.Random(0)
    refused = 0
    for _ in range(300):
        spoilt = bytearray(whole)
        spoilt[choose.randrange(len(whole))] = choose.randrange(256)
        (path / "facts.json").write_bytes(spoilt)
        try:
            read_bundle(path).read_weights()
        except ArgumentError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("name", ["inputs.safetensors", "weights.safetensors"])
def test_nothing_in_a_tensor_file_is_spoilt_by_chance(path, name):
    """The same in the header, where names, shapes and places are."""
    whole = (path / name).read_bytes()
    choose = random.Random(0)
    refused = 0
    for _ in range(300):
        spoilt = bytearray(whole)
        spoilt[choose.randrange(300)] = choose.randrange(256)
        (path / name).write_bytes(spoilt)
        try:
            read_bundle(path).read_weights()
        except ArgumentError:
            refused += 1
    assert refused > 50
