"""What is measured of outputs is what plain arithmetic says, in every dtype, and NaN and inf survive."""

import math
from dataclasses import dataclass

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from hf_nanguard.core.monitors.module_outputs import find_tensor, measure, read_table, tabulate

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def _activation(*tensors, near=True):
    """What comes out for one module that put these tensors out, one a forward."""
    table = tabulate([measure("a", tensor, near) for tensor in tensors], ["a"], CPU)
    return read_table(table, ["a"])["a"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_numbers_are_those_of_plain_arithmetic(dtype):
    limit = torch.finfo(dtype).max
    tensor = (torch.randn(3, 5, 20) * 50).to(dtype)
    tensor[0, :2] = 0.0
    tensor[1, 0, :6] = -limit / 10
    seen = _activation(tensor)
    wide = tensor.double()
    assert (seen.lowest, seen.highest) == (wide.min().item(), wide.max().item())
    assert seen.largest == -seen.lowest
    assert seen.zeros == pytest.approx(40 / 300)
    assert seen.near_limit == pytest.approx(6 / 300)
    assert seen.limit == limit
    assert seen.is_finite
    assert not seen.is_masked
    quiet = _activation(tensor[2], near=False)
    assert quiet.near_limit is None
    assert quiet.rms == pytest.approx(wide[2].square().mean().sqrt().item(), rel=1e-4)


def test_an_rms_of_float16_does_not_overflow():
    tensor = torch.full((2000, 1000), 300.0, dtype=torch.float16)
    assert torch.linalg.vector_norm(tensor).isinf()
    assert _activation(tensor).rms == pytest.approx(300, rel=1e-3)


def test_zeros_of_large_outputs_are_counted_exactly():
    tensor = torch.ones(2**25, dtype=torch.float16)
    tensor[: 2**23] = 0
    assert _activation(tensor).zeros == 0.25


@pytest.mark.parametrize(
    ("values", "finite", "masked"),
    [
        ([1.0, NAN], False, False), ([1.0, INF], False, False), ([-INF, 1.0], False, True), ([-INF, INF], False, False),
        ([-INF, NAN], False, False), ([-65504.0, 3.0], True, True), ([65504.0, 3.0], True, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("also", [None, 1.0])
def test_what_is_not_finite_survives_beside_a_healthy_forward(values, finite, masked, also):
    tensors = [torch.tensor(values, dtype=torch.float16)]
    if also is not None:
        tensors.append(torch.tensor([also], dtype=torch.float16))
    for order in (tensors, tensors[::-1]):
        seen = _activation(*order)
        assert (seen.is_finite, seen.is_masked) == (finite, masked)
        assert math.isnan(seen.largest) == any(map(math.isnan, values))


def test_forwards_and_dtypes_are_put_together_by_module():
    small, large = torch.tensor([0.0, -3.0]), torch.tensor([2.0, 2.0])
    half = torch.tensor([7.0], dtype=torch.float16)
    measures = [measure("c", small, False), measure("a", half, False), measure("c", large, True)]
    table = tabulate(measures, "abc", CPU).tolist()
    assert table[1] == [-INF] * 7  # it did not run
    assert table[0][:5] == [-7.0, 7.0, 0.0, 7.0, 0.0]
    assert table[0][6] == -65504.0
    assert table[2][:3] == [3.0, 2.0, 0.0]
    assert table[2][3] == pytest.approx(math.sqrt(4.5))  # the larger of the two
    assert table[2][4:6] == [0.5, 0.0]


def test_nothing_that_is_measured_holds_a_graph():
    tensor = torch.randn(4, requires_grad=True) * 2
    measured = measure("a", tensor, True)
    assert not any(value.requires_grad for value in (measured.lowest, measured.highest, measured.norm))


@dataclass
class _Pair:
    ids: torch.Tensor
    states: torch.Tensor


HIDDEN = torch.randn(2, 3)


@pytest.mark.parametrize(
    "output",
    [
        HIDDEN, (HIDDEN, torch.zeros(2)), [None, HIDDEN], {"ids": torch.arange(3), "states": HIDDEN}, (("x", HIDDEN),),
        CausalLMOutput(loss=torch.tensor(1.0), logits=HIDDEN), _Pair(torch.arange(2), HIDDEN),
    ],
    ids=["tensor", "tuple", "list", "dict", "nested", "ModelOutput", "dataclass"],
)  # fmt: skip
def test_the_first_float_tensor_is_found(output):
    found = find_tensor(output)
    assert found is not None
    assert found.data_ptr() == HIDDEN.data_ptr()


@pytest.mark.parametrize("output", [None, 3, torch.arange(3), torch.tensor(1.0), torch.zeros(0, 4), (), _Pair])
def test_there_may_be_nothing_to_measure(output):
    assert find_tensor(output) is None
