"""Inputs of any shape and random states come apart and together again."""

import math
import random
from collections import OrderedDict, UserDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_nanguard.core.autopsy.bundle.packing import (
    MAX_DEPTH,
    MAX_VALUES,
    pack_inputs,
    pack_rng,
    unpack_inputs,
    unpack_rng,
)
from hf_nanguard.core.autopsy.bundle.tensor_file import load_tensors, save_tensors
from hf_nanguard.core.rng import RngState
from hf_nanguard.plain_text import REDACTED

Pair = namedtuple("Pair", "first second")


def same(one, other):
    """Whether two nested values are the same to the bit, mappings read as dictionaries."""
    if isinstance(one, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t.new_empty(0) for t in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    if isinstance(one, (dict, UserDict)):
        return type(other) is dict and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        kind = tuple if isinstance(one, tuple) else list
        return type(other) is kind and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return type(other) is float and ((math.isnan(one) and math.isnan(other)) or one.hex() == other.hex())
    return type(one) is type(other) and one == other


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.tensor(draw(st.lists(st.integers(0, 255), min_size=27, max_size=27)))[: math.prod(shape)].view(shape)
    tensor = tensor.to(draw(st.sampled_from(DTYPES)))
    if tensor.ndim and tensor.shape[0] and draw(st.booleans()):
        return tensor.t() if tensor.ndim == 2 else tensor[:1].expand(3, *tensor.shape[1:])
    return tensor


values = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | tensors()
nested = st.recursive(
    values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(UserDict)
    ),
    max_leaves=8,
)


@given(inputs=nested)
@settings(max_examples=150, deadline=None)
def test_nested_inputs_come_back_as_they_were(tmp_path_factory, inputs):
    path = tmp_path_factory.getbasetemp() / "inputs.safetensors"
    packed = pack_inputs(inputs)
    assert packed.left_out == {}
    save_tensors(path, packed.tensors)
    assert same(inputs, unpack_inputs(packed.tree, load_tensors(path)))


def test_the_comparison_can_tell_things_apart():
    pairs = [(1, True), (0.0, -0.0), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    pairs += [(torch.ones(2), torch.ones(2).half()), (torch.ones(2, 1), torch.ones(2)), ("nan", float("nan"))]
    assert not any(same(*pair) for pair in pairs)


def test_names_do_not_collide():
    inputs = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "": {"": torch.tensor(3)}, "%": torch.tensor(4)}}
    inputs |= {"a.b'": torch.tensor(5), "": torch.tensor(6), "\ud800": torch.tensor(7), "\\ud800": torch.tensor(8)}
    packed = pack_inputs(inputs)
    assert len(packed.tensors) == 8
    assert all(name.isprintable() for name in packed.tensors)
    assert same(inputs, unpack_inputs(packed.tree, packed.tensors))
    assert "inputs.a.b" in packed.tensors


def test_one_tensor_in_two_places_is_kept_once_and_stays_one():
    ids = torch.arange(3)
    packed = pack_inputs({"input_ids": ids, "labels": ids})
    assert len(packed.tensors) == 1
    found = unpack_inputs(packed.tree, packed.tensors)
    assert found["labels"] is found["input_ids"]


def test_other_mappings_and_sequences_become_plain():
    found = unpack_inputs(pack_inputs(OrderedDict(a=Pair(1, [2]), b=torch.Size([3]))).tree, {})
    assert found == {"a": (1, [2]), "b": (3,)}
    assert type(found) is dict
    assert type(found["a"]) is tuple


def test_what_cannot_be_kept_is_noted():
    inputs = {"image": object(), "many": [b"x", 1], 3: "odd", "meta": torch.empty(1, device="meta"), "big": 2**5000}
    packed = pack_inputs(inputs)
    assert unpack_inputs(packed.tree, {}) == {"many": [None, 1]}
    assert packed.left_out.keys() == {"inputs.image", "inputs.many.0", "inputs.3", "inputs.meta", "inputs.big"}
    assert "object" in packed.left_out["inputs.image"]
    assert "key" in packed.left_out["inputs.3"]


def test_too_deep_or_too_many_is_left_out():
    deep = [1]
    for _ in range(MAX_DEPTH):
        deep = [deep]
    packed = pack_inputs({"deep": deep, "many": [0] * (MAX_VALUES + 1), "ids": torch.ones(1)})
    assert len(packed.left_out) == 2
    found = unpack_inputs(packed.tree, packed.tensors)
    assert "many" not in found
    assert found["ids"] is packed.tensors["inputs.ids"]


def test_a_tree_as_deep_as_may_be_written_can_be_read():
    deep = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    packed = pack_inputs(deep)
    assert packed.left_out == {}
    assert unpack_inputs(packed.tree, {}) == deep


def test_without_text_no_string_and_no_key_of_the_data_is_kept():
    inputs = {"prompts": ["secret", {"role": "secret", "secret": torch.ones(2)}], "bias": 3, ("secret",): 1}
    packed = pack_inputs(inputs, text=False, names={"prompts", "role"})
    assert "secret" not in f"{packed.tree}{list(packed.tensors)}{packed.left_out}"
    back = unpack_inputs(packed.tree, packed.tensors)
    assert back["prompts"][0] == back["prompts"][1]["role"] == REDACTED
    assert torch.equal(back["prompts"][1]["key_1"], torch.ones(2))
    assert back["key_1"] == 3


@pytest.mark.parametrize(
    "tree",
    [
        [],
        {},
        {"tensor": "inputs.missing"},
        {"tensor": 3},
        {"tensor": ["inputs.x"]},
        {"pickle": "x"},
        {"list": {"a": 1}},
        {"dict": [1]},
        {"dict": {"a": [1]}},
        {"float": "1e5"},
        {"float": ["nan"]},
        {"list": [], "tuple": []},
    ],
)
def test_trees_that_nobody_wrote_are_refused(tree):
    with pytest.raises(ValueError, match="its inputs"):
        unpack_inputs(tree, {"inputs.x": torch.ones(1)})


def test_a_deep_tree_is_refused():
    tree = 1
    for _ in range(MAX_DEPTH + 2):
        tree = {"list": [tree]}
    with pytest.raises(ValueError, match="deeper"):
        unpack_inputs(tree, {})


def draw():
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn()


def test_a_random_state_goes_on_where_it_was():
    random.gauss(0, 1), np.random.randn()  # each leaves a second number behind for the next call
    packed = pack_rng(RngState.capture())
    first = draw()
    state, left_out = unpack_rng(packed.tree, packed.tensors)
    assert left_out == {}
    state.restore()
    assert draw() == first


def test_a_random_state_without_numpy():
    state = RngState(torch.get_rng_state(), None, "cpu", random.getstate(), None)
    packed = pack_rng(state)
    assert "rng.numpy" not in packed.tensors
    found, _ = unpack_rng(packed.tree, packed.tensors)
    assert found.numpy is None
    before = np.random.get_state()[1].tolist()
    found.restore()
    assert np.random.get_state()[1].tolist() == before


def test_a_device_this_machine_does_not_have_is_noted():
    state = RngState(torch.get_rng_state(), torch.zeros(16, dtype=torch.uint8), "hpu", random.getstate(), None)
    packed = pack_rng(state)
    assert torch.equal(packed.tensors["rng.device"], state.device)
    found, left_out = unpack_rng(packed.tree, packed.tensors)
    assert found.device is None
    assert "hpu" in left_out["rng.device"]
    found.restore()


def test_a_generator_of_another_kind_is_noted():
    state = RngState(torch.get_rng_state(), None, "cpu", random.getstate(), {"bit_generator": "PCG64"})
    assert list(pack_rng(state).left_out) == ["rng.numpy"]


WORDS = [1] * 624


@pytest.mark.parametrize(
    ("tree", "changed"),
    [
        ({}, {"rng.cpu": None}),
        ({}, {"rng.cpu": torch.zeros(5056, dtype=torch.uint8)}),
        ({}, {"rng.cpu": torch.zeros(10, dtype=torch.uint8)}),
        ({}, {"rng.cpu": torch.zeros(5056)}),
        ({}, {"rng.device": torch.zeros(100_000, dtype=torch.uint8)}),
        ({}, {"rng.device": torch.zeros(16)}),
        ({"device_type": "../x"}, {}),
        ({"device_type": 3}, {}),
        ({"python": None}, {}),
        ({"python": [3, WORDS, None]}, {}),
        ({"python": [3, [*WORDS, 1000], None]}, {}),
        ({"python": [3, [*WORDS, -1], None]}, {}),
        ({"python": [3, ["a"] * 625, None]}, {}),
        ({"python": [3, [*WORDS, 2**5000], None]}, {}),
        ({"python": [3, [*WORDS, 1], "x"]}, {}),
        ({"python": [9, [*WORDS, 1], None]}, {}),
        ({"numpy": ["PCG64", 0, 0, 0.0]}, {}),
        ({"numpy": ["MT19937", 700, 0, 0.0]}, {}),
        ({"numpy": ["MT19937", 0, 0]}, {}),
        ({"numpy": "MT19937"}, {}),
        ({}, {"rng.numpy": None}),
        ({}, {"rng.numpy": torch.zeros(623, dtype=torch.uint32)}),
        ({}, {"rng.numpy": torch.zeros(624)}),
    ],
)
def test_random_states_that_no_generator_takes_are_refused(tree, changed):
    packed = pack_rng(RngState.capture())
    held = {name: tensor for name, tensor in (packed.tensors | changed).items() if tensor is not None}
    with pytest.raises(ValueError, match=r"random state .*(valid|wrong size)"):
        unpack_rng(packed.tree | tree, held)
