"""Causes are inferred from what an operator was given, never from a zero or an infinity that has nothing to do with it."""

import pytest
import torch
from torch.nn import functional as F

from hf_nanguard.core.autopsy.trace.cause import infer_cause, infer_leaf_cause
from hf_nanguard.core.autopsy.trace.op_record import Extent, Place, Record
from hf_nanguard.core.vocabulary import Cause

from ..matrix import INF, NAN
from .test_trace import Net, find

HALF, SINGLE = torch.float16, torch.float32
CASES: list = []


def case(cause: Cause, dtype: torch.dtype = SINGLE):
    def register(middle):
        CASES.append(pytest.param(middle, cause, dtype, id=middle.__name__))
        return middle

    return register


def zero_elsewhere(h):
    """One, with a zero in a place of no consequence."""
    ones = torch.ones_like(h)
    ones[0, 0] = 0
    return ones


@case(Cause.FP16_OVERFLOW, HALF)
def division_that_overflows_beside_a_zero_dividend(h):
    return zero_elsewhere(h) * 6e4 / 0.1


@case(Cause.FP32_OVERFLOW)
def division_that_overflows_in_float32(h):
    return (h + 1e38) / 1e-10


@case(Cause.FP32_OVERFLOW)
def activations_that_are_too_large_for_a_norm(h):
    return h * (h * 1e25).pow(2).mean(-1, keepdim=True)


@case(Cause.FP32_OVERFLOW)
def scores_of_activations_that_have_grown(h):
    return ((h + 1e20) @ (h + 1e20).T).softmax(-1) @ h


@case(Cause.UNKNOWN)
def a_pole_at_one_in_float32(h):
    return torch.erfinv(h * 0 + 1)


@case(Cause.DIV_BY_ZERO)
def division_by_an_integer(h):
    return h / torch.zeros(4, dtype=torch.long)


@case(Cause.DIV_BY_ZERO, HALF)
def division_by_a_number(h):
    return h / 0


@case(Cause.DIV_BY_ZERO)
def zero_to_a_negative_power(h):
    return (h * 0) ** -1.5


@case(Cause.DIV_BY_ZERO)
def group_norm_without_eps(h):
    return F.group_norm(h * 0, 2, eps=0.0)


@case(Cause.FP16_OVERFLOW, HALF)
def sum_in_half(h):
    return h + (h * 0 + 6e4).sum(dtype=torch.float16)


@case(Cause.LOG_OF_ZERO)
def log1p(h):
    return torch.log1p(h * 0 - 1)


@case(Cause.LOG_OF_ZERO)
def logit(h):
    return torch.logit(h * 0)


@case(Cause.UNKNOWN, HALF)
def log_of_a_negative_number(h):
    return torch.log(h * 0 - 1)


@case(Cause.UNKNOWN, HALF)
def root_of_a_negative_number(h):
    return torch.sqrt(h * 0 - 1)


@case(Cause.UNKNOWN, HALF)
def mask_times_zero(h):
    return h + torch.zeros(4).half() * torch.full((4,), -INF).half()


@case(Cause.MASKED_ROW_SOFTMAX)
def softmax_by_hand_of_a_masked_row(h):
    scores = torch.cat([h[:2], h[2:].detach() * 0 - INF])
    return h + (scores - scores.amax(-1, keepdim=True)).exp()


@case(Cause.MASKED_ROW_SOFTMAX)
def mask_from_a_logarithm(h):
    return h * (h + torch.tensor([[1.0], [1.0], [0.0]]).log()).softmax(-1)


@case(Cause.MASKED_ROW_SOFTMAX, HALF)
def sum_of_masked_log_probabilities(h):
    scores = h.clone()
    scores[:, 0] = -INF
    return h + scores.log_softmax(-1).sum(-1, keepdim=True)


@case(Cause.MASKED_ROW_SOFTMAX)
def zero_times_a_masked_log_probability(h):
    masked = torch.tensor([True, False, False, False])
    return h + h.masked_fill(masked, -INF).log_softmax(-1) * (h * 0).detach()


@case(Cause.FP32_OVERFLOW)
def infinity_of_the_model_behind_a_softmax(h):
    return h + (h * 1e38 * 1e38).log_softmax(-1)


@case(Cause.EXP_OVERFLOW)
def expm1(h):
    return torch.expm1(h + 1000)


@case(Cause.EXP_OVERFLOW)
def in_place_exponential(h):
    return (h + 1000).exp_()


@case(Cause.SQRT_AT_ZERO)
def root_in_place_on_a_view(h):
    h = h.abs() * torch.tensor([0.0, 1.0, 1.0, 1.0])
    h[:, 0].sqrt_()
    return h


@case(Cause.NORM_AT_ZERO)
def norm_by_hand_clamped(h):
    return h + (h * 0).pow(2).sum(-1, keepdim=True).clamp(min=-1).sqrt()  # at the bound torch 2.15 passes no gradient


@case(Cause.NORM_AT_ZERO)
def root_mean_square(h):
    return h + ((h * 0).pow(2).mean(-1, keepdim=True) + 0.0) ** 0.5


@case(Cause.SQRT_AT_ZERO)
def root_beside_a_selection(h):
    chosen = torch.where(h > 100, 1.0, h)
    return chosen + (h * 0).abs().sqrt()


@case(Cause.SQRT_AT_ZERO)
def selected_everywhere_but_of_no_weight(h):
    return h + torch.where(h < 1e9, (h * 0).abs().sqrt(), 0.0) * 0.0


@case(Cause.WHERE_UNSELECTED_BRANCH)
def second_branch_of_where(h):
    x = h.abs() * torch.tensor([0.0, 1.0, 1.0, 1.0])
    return torch.where(x == 0, 0.0, x.sqrt())


@case(Cause.WHERE_UNSELECTED_BRANCH)
def branch_never_selected(h):
    return torch.where(h > 1e9, (h * 0).abs().sqrt(), h)


@case(Cause.UNKNOWN)
def not_a_number_filled_in(h):
    return torch.full_like(h, NAN) * h


@pytest.mark.parametrize(("middle", "cause", "dtype"), CASES)
def test_cause(middle, cause, dtype):
    origin = find(Net(middle).to(dtype), torch.ones(3, 4, dtype=dtype))
    assert origin.cause is cause, origin


def test_unwritten_memory_of_an_accelerator_may_have_been_written_by_a_foreign_kernel():
    record = Record(1, "aten.empty.memory_format", Extent(NAN, NAN), SINGLE, (3,), Place(), uninitialised=True)
    assert infer_cause(record, "", unselected=False) is Cause.UNINITIALISED_WEIGHT
    record.device = "cuda"
    assert infer_cause(record, "", unselected=False) is Cause.UNKNOWN


def test_ratio_and_kl_are_told_by_their_line():
    model, x = Net(), torch.ones(3, 4)
    ratios = {
        Cause.RATIO_OVERFLOW: lambda: (ratio := torch.exp(model(x) + 1000)).mean(),  # noqa: F841
        Cause.KL_OVERFLOW: lambda: (kl := torch.exp(model(x) + 1000)).mean(),  # noqa: F841
        Cause.EXP_OVERFLOW: lambda: (power := torch.exp(model(x) + 1000)).mean(),  # noqa: F841
    }
    for cause, loss in ratios.items():
        assert find(model, x, loss).cause is cause


def test_whole_rows_of_a_table_were_never_initialised_single_entries_were_ruined():
    bad = torch.zeros(5, 3, dtype=torch.bool)
    bad[2] = True
    assert infer_leaf_cause(bad) is Cause.UNINITIALISED_WEIGHT
    bad[3, 1] = True
    assert infer_leaf_cause(bad) is Cause.PARAM_NONFINITE
    assert infer_leaf_cause(torch.ones(5, 3, dtype=torch.bool)) is Cause.PARAM_NONFINITE
    assert infer_leaf_cause(torch.ones(5, dtype=torch.bool)) is Cause.PARAM_NONFINITE
