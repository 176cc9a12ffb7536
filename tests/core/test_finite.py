"""Finite checks: exact in every dtype, one host read."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_nanguard.core.finite import find_nonfinite, local, magnitudes, read_host
from hf_nanguard.testing import INF, NAN, OperationCounter

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("planted", "kind"), [([NAN], "nan"), ([INF], "inf"), ([-INF], "inf"), ([INF, NAN], "nan"), ([NAN, -INF], "nan")]
)
def test_the_planted_tensor_and_no_other_is_named(dtype, planted, kind):
    tensors = {name: torch.randn(5, 7).to(dtype) for name in ("first", "second", "third")}
    for index, value in enumerate(planted):
        tensors["second"].view(-1)[11 * index + 3] = value
    assert find_nonfinite(tensors.items()) == {"second": kind}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_finite_values_are_finite(dtype):
    edge = torch.finfo(dtype)
    tensors = {"max": torch.full((64,), edge.max, dtype=dtype), "min": torch.full((64,), edge.min, dtype=dtype)}
    assert find_nonfinite(tensors.items()) == {}


def test_float16_values_whose_norm_overflows_are_finite():
    tensor = torch.full((2000,), 3e3, dtype=torch.float16)
    assert not torch.linalg.vector_norm(tensor).isfinite(), "the 2-norm must overflow, or this shows nothing"
    assert find_nonfinite([("big", tensor)]) == {}


def test_names_come_in_the_given_order():
    tensors = [(name, torch.tensor([value])) for name, value in (("z", NAN), ("b", 1.0), ("a", INF), ("m", NAN))]
    assert list(find_nonfinite(tensors).items()) == [("z", "nan"), ("a", "inf"), ("m", "nan")]


def test_empty_tensors_and_empty_lists_are_finite():
    assert find_nonfinite([]) == {}
    assert magnitudes([]) == []
    assert read_host([]) == []
    named = [("none", torch.empty(0)), ("bad", torch.tensor([NAN])), ("also none", torch.empty(3, 0))]
    assert find_nonfinite(named) == {"bad": "nan"}


def test_integers_and_flags_are_passed_by():
    named = [("count", torch.ones(3, dtype=torch.long)), ("flag", torch.tensor([True])), ("bad", torch.tensor(INF))]
    assert find_nonfinite(named) == {"bad": "inf"}


def test_complex_parts_are_looked_at():
    named = [("good", torch.tensor([1 + 2j])), ("bad", torch.tensor([complex(1, INF)]))]
    assert find_nonfinite(named) == {"bad": "inf"}


@pytest.mark.parametrize(("value", "found"), [(1.0, {}), (NAN, {"table": "nan"}), (INF, {"table": "inf"})])
def test_sparse_gradients(value, found):
    dense = torch.zeros(6, 3)
    dense[4] = value
    assert find_nonfinite([("table", dense.to_sparse())]) == found


def test_a_real_sparse_gradient():
    table = torch.nn.Embedding(5, 3, sparse=True)
    (table(torch.tensor([1, 1, 2])).sum() * NAN).backward()
    assert table.weight.grad.is_sparse
    assert find_nonfinite([("table", table.weight.grad)]) == {"table": "nan"}


def test_local_leaves_a_plain_tensor_alone():
    tensor = torch.ones(3)
    assert local(tensor) is tensor


def test_magnitudes_stay_on_the_device_as_the_largest_entry():
    largest = magnitudes([torch.tensor([1.0, -3.0]), torch.tensor([[2.0]]), torch.empty(0)])
    assert [value.ndim for value in largest] == [0, 0, 0]
    assert read_host(largest) == [3.0, 2.0, 0.0]


def test_read_host_mixes_dtypes_and_shapes():
    values = [torch.tensor(1.5), torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor(3), torch.tensor(NAN)]
    *read, last = read_host(values)
    assert read == [1.5, 2.0, 3.0]
    assert math.isnan(last)


def test_a_float64_loss_is_read_as_it_is():
    assert read_host([torch.tensor(1e300, dtype=torch.float64)]) == [1e300]


@pytest.mark.parametrize("num_tensors", [1, 3, 40])
def test_exactly_one_host_read(num_tensors):
    named = [(str(index), torch.randn(4)) for index in range(num_tensors)]
    with OperationCounter() as counted:
        find_nonfinite(named)
    assert len(counted.reads) == 1


def test_measuring_reads_nothing():
    tensors = [torch.randn(4), torch.randn(2, 2).half()]
    with OperationCounter() as counted:
        magnitudes(tensors)
    assert counted.reads == []


def test_measuring_leaves_no_graph():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert not magnitudes([parameter * 2])[0].requires_grad


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(width=16, allow_nan=True, allow_infinity=True), max_size=6), min_size=1, max_size=5),
    st.sampled_from(FLOATS),
)
def test_it_agrees_with_isfinite(lists, dtype):
    named = [(str(index), torch.tensor(values, dtype=dtype)) for index, values in enumerate(lists)]
    expected = {}
    for name, tensor in named:
        if not tensor.isfinite().all():
            expected[name] = "nan" if tensor.isnan().any() else "inf"
    assert find_nonfinite(named) == expected
