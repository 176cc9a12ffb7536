"""Updates that ruin weights: real optimizers are made to do it, and what is left of the step must tell which way."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_nanguard.core.event import Remedy
from hf_nanguard.core.optimizer.bad_update import UpdateFinding, examine_state, examine_update, try_update_remedies
from hf_nanguard.core.vocabulary import Cause


def weights_of(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(6, 3).to(dtype))


def step(optimizer: Any, weights: Tensor, gradient: Tensor | float) -> None:
    weights.grad = torch.as_tensor(gradient, dtype=weights.dtype).expand_as(weights).clone()
    optimizer.step()
    weights.grad = None


def examined(optimizer: Any, weights: Tensor) -> tuple[UpdateFinding, dict[str, Remedy]]:
    """Examines and tries remedies; optimizer and weights must be as they were, NaN included."""
    before = copy.deepcopy(optimizer.state_dict()), weights.detach().clone()
    finding = examine_update(optimizer, [("sound", nn.Parameter(torch.ones(2))), ("table", weights)])
    assert finding is not None
    remedies = try_update_remedies(optimizer, finding, weights)
    torch.testing.assert_close(optimizer.state_dict(), before[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(weights.detach(), before[1], rtol=0, atol=0, equal_nan=True)
    assert weights.grad is None
    assert finding.parameter == "table"
    assert finding.phase == "optimizer"
    return finding, {remedy.name: remedy for remedy in remedies}


def small_rows(*rows: int) -> Tensor:
    """Gradients of 1, and in some rows so small that their square is 0 in float16."""
    gradient = torch.ones(6, 3)
    gradient[list(rows)] = 1e-4
    return gradient


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam])
@pytest.mark.parametrize("foreach", [False, True])
def test_eps_underflow_in_float16(optimizer_class: type, foreach: bool):
    weights = weights_of(torch.float16)
    optimizer = optimizer_class([weights], lr=1e-3, foreach=foreach)
    step(optimizer, weights, small_rows(1, 4))
    assert (~weights.isfinite()).any(1).nonzero().flatten().tolist() == [1, 4]
    finding, remedies = examined(optimizer, weights)
    assert finding.cause is Cause.ADAM_EPS_UNDERFLOW
    assert (finding.num_bad, finding.rows, finding.state) == (6, (1, 4), "exp_avg_sq")
    assert (finding.learning_rate, finding.eps) == (1e-3, 1e-8)
    assert remedies["larger_eps"].works
    assert "eps 0.0001" in remedies["larger_eps"].note
    assert remedies["float32_state"].works
    if optimizer_class is torch.optim.NAdam:
        assert "fused" not in remedies  # it has none
    else:
        assert remedies["fused"].works


@pytest.mark.parametrize("settings", [{"eps": 1e-4}, {"fused": True}])
def test_the_copy_tells_the_size_the_update_would_have_had(settings: dict):
    weights = weights_of(torch.float16)
    optimizer = torch.optim.AdamW([weights], lr=0.02)
    step(optimizer, weights, small_rows(1))
    _, remedies = examined(optimizer, weights)
    other = nn.Parameter(torch.zeros(6, 3).half())
    step(torch.optim.AdamW([other], lr=0.02, **settings), other, small_rows(1))
    note = remedies["fused" if "fused" in settings else "larger_eps"].note
    assert float(note.rsplit(" ", 1)[1]) == pytest.approx(float(other[1].detach().abs().max()), rel=0.02)


def test_eps_underflow_with_amsgrad_and_a_gradient_of_zero():
    """0 / 0 is NaN where a small gradient gives inf."""
    weights = weights_of(torch.float16)
    optimizer = torch.optim.AdamW([weights], amsgrad=True)
    step(optimizer, weights, small_rows(1) * (small_rows(1) == 1))
    assert weights[1].isnan().all()
    finding, _ = examined(optimizer, weights)
    assert (finding.cause, finding.state, finding.rows) == (Cause.ADAM_EPS_UNDERFLOW, "max_exp_avg_sq", (1,))


def test_eps_of_zero_in_float32():
    weights = weights_of()
    optimizer = torch.optim.Adam([weights], eps=0.0)
    step(optimizer, weights, small_rows(2) * (small_rows(2) == 1))
    finding, remedies = examined(optimizer, weights)
    assert (finding.cause, finding.rows) == (Cause.ADAM_EPS_UNDERFLOW, (2,))
    assert {name: remedy.works for name, remedy in remedies.items()} == {"larger_eps": True}


def test_the_fused_kernel_does_not_underflow():
    weights = weights_of(torch.float16)
    optimizer = torch.optim.AdamW([weights], fused=True)
    step(optimizer, weights, small_rows(1, 4))
    assert weights.isfinite().all()
    weights.data[1, 0] = math.nan  # ruined by somebody else
    assert examine_update(optimizer, [("table", weights)]) is None


@pytest.mark.parametrize(("key", "value"), [("exp_avg", math.nan), ("exp_avg", -math.inf), ("exp_avg_sq", math.nan), ("exp_avg_sq", -1.0)])  # fmt: skip
@pytest.mark.parametrize("more_steps", [0, 2])
def test_a_bad_moment_of_a_row_no_batch_uses(key: str, value: float, more_steps: int):
    weights = weights_of()
    optimizer = torch.optim.AdamW([weights])
    step(optimizer, weights, small_rows(3) * (small_rows(3) == 1))
    optimizer.state[weights][key][3] = value
    for _ in range(1 + more_steps):  # finite gradients: the row is not in any batch
        step(optimizer, weights, small_rows(3) * (small_rows(3) == 1))
    assert (~weights.isfinite()).any(1).nonzero().flatten().tolist() == [3]
    finding, remedies = examined(optimizer, weights)
    assert (finding.cause, finding.state, finding.num_bad, finding.rows) == (Cause.OPTIMIZER_STATE, key, 3, (3,))
    assert {name: remedy.works for name, remedy in remedies.items()} == {"reset_state": True}


def test_bad_moments_of_different_rows_are_not_taken_for_a_learning_rate():
    weights = weights_of()
    optimizer = torch.optim.AdamW([weights])
    step(optimizer, weights, 1.0)
    optimizer.state[weights]["exp_avg"][3] = math.nan
    optimizer.state[weights]["exp_avg_sq"][4:] = math.nan
    step(optimizer, weights, 1.0)
    finding, _ = examined(optimizer, weights)
    assert (finding.cause, finding.state, finding.rows) == (Cause.OPTIMIZER_STATE, "exp_avg_sq", (4, 5))


def test_a_weight_at_the_limit_is_pushed_over_it():
    """The copy starts at zero, so it cannot show what a smaller step would do."""
    weights = weights_of(torch.float16)
    optimizer = torch.optim.SGD([weights], lr=100.0, momentum=0.9)
    weights.data[2] = 65504.0
    step(optimizer, weights, -1.0)
    assert weights[2].isinf().all()
    finding, remedies = examined(optimizer, weights)
    assert (finding.cause, finding.rows) == (Cause.LR_TOO_HIGH, (2,))
    assert remedies["smaller_lr"].tried is False


def test_an_infinite_second_moment_moves_nothing_and_is_not_blamed():
    weights = weights_of()
    optimizer = torch.optim.AdamW([weights])
    step(optimizer, weights, 1.0)
    optimizer.state[weights]["exp_avg_sq"][3] = math.inf
    step(optimizer, weights, 1.0)
    assert weights.isfinite().all()
    weights.data[3] = math.nan
    assert examine_update(optimizer, [("table", weights)]) is None


def test_skipped_steps_change_no_evidence():
    weights = weights_of(torch.float16)
    optimizer = torch.optim.AdamW([weights])
    step(optimizer, weights, small_rows(1))
    for _ in range(3):
        optimizer.step()  # no gradient: skipped
    finding, _ = examined(optimizer, weights)
    assert (finding.cause, finding.rows) == (Cause.ADAM_EPS_UNDERFLOW, (1,))


def test_each_entry_is_told_by_its_own_evidence():
    """One bad moment among many entries that underflowed; the update tells both, and the more frequent one is named."""
    weights = weights_of(torch.float16)
    optimizer = torch.optim.AdamW([weights])
    step(optimizer, weights, small_rows(1, 2))
    optimizer.state[weights]["exp_avg"][0, 0] = math.nan
    step(optimizer, weights, small_rows(1, 2))
    assert (~weights.isfinite()).sum() == 7
    finding, remedies = examined(optimizer, weights)
    assert (finding.cause, finding.num_bad, finding.rows) == (Cause.ADAM_EPS_UNDERFLOW, 6, (1, 2))
    assert remedies["larger_eps"].works  # of those entries; no eps helps the other


@pytest.mark.parametrize(
    ("optimizer_class", "settings", "dtype"),
    [
        (torch.optim.AdamW, {"lr": 1e5, "weight_decay": 0.0}, torch.float16),
        (torch.optim.SGD, {"lr": 1e4, "momentum": 0.9}, torch.float16),
        (torch.optim.SGD, {"lr": 1e38, "momentum": 0.5, "dampening": 0.5}, torch.float32),
    ],
)
def test_a_learning_rate_that_is_too_high(optimizer_class: type, settings: dict, dtype: torch.dtype):
    weights = weights_of(dtype)
    optimizer = optimizer_class([weights], **settings)
    step(optimizer, weights, 10.0)
    assert not weights.isfinite().any()
    finding, remedies = examined(optimizer, weights)
    assert (finding.cause, finding.num_bad) == (Cause.LR_TOO_HIGH, 18)
    assert finding.rows == (0, 1, 2, 3, 4, 5)
    assert remedies["smaller_lr"].works
    assert f"learning rate {settings['lr'] / 10:g}" in remedies["smaller_lr"].note


def test_a_tenth_of_the_learning_rate_may_not_do():
    weights = weights_of(torch.float16)
    optimizer = torch.optim.SGD([weights], lr=6e4, momentum=0.9)
    step(optimizer, weights, 1000.0)
    _, remedies = examined(optimizer, weights)
    assert remedies["smaller_lr"].works is False
    assert remedies["float32_state"].works


def test_weights_that_were_bad_before_are_not_explained():
    weights = weights_of()
    weights.data[2, 1] = math.nan
    for optimizer in (torch.optim.AdamW([weights]), torch.optim.SGD([weights], lr=0.1, momentum=0.9)):
        step(optimizer, weights, 1.0)
        assert examine_update(optimizer, [("table", weights)]) is None


def test_strangers_and_sound_parameters_have_no_finding():
    weights = weights_of()
    optimizer = torch.optim.AdamW([weights])
    step(optimizer, weights, 1.0)
    assert examine_update(optimizer, [("table", weights)]) is None
    stranger = nn.Parameter(torch.full((2,), math.nan))
    assert examine_update(optimizer, [("stranger", stranger)]) is None
    optimizer.state.clear()
    weights.data[0] = math.nan
    assert examine_update(optimizer, [("table", weights)]) is None


def test_state_of_another_shape():
    """Adafactor keeps one number for each row."""
    weights = weights_of()
    optimizer = torch.optim.Adafactor([weights])
    step(optimizer, weights, 1.0)
    optimizer.state[weights]["row_var"][4] = math.nan
    step(optimizer, weights, 1.0)
    assert not weights[4].isfinite().any()
    finding, remedies = examined(optimizer, weights)
    assert (finding.cause, finding.state, finding.rows) == (Cause.OPTIMIZER_STATE, "row_var", (4,))
    assert remedies["reset_state"].tried is False  # rows cannot be taken out of it


class Picky(torch.optim.AdamW):
    def __init__(self, params: Any, *, secret: int):
        super().__init__(params)


def test_an_optimizer_that_cannot_be_copied_leaves_remedies_untried():
    weights = weights_of(torch.float16)
    optimizer = Picky([weights], secret=1)
    step(optimizer, weights, small_rows(1))
    finding, remedies = examined(optimizer, weights)
    assert finding.cause is Cause.ADAM_EPS_UNDERFLOW
    assert {remedy.tried for remedy in remedies.values()} == {False}
    assert "larger_eps" in remedies


def test_the_learning_rate_may_be_a_tensor():
    weights = weights_of(torch.float16)
    optimizer = torch.optim.AdamW([weights], lr=torch.tensor(1e-3), foreach=False)
    step(optimizer, weights, small_rows(1))
    finding, remedies = examined(optimizer, weights)
    assert finding.learning_rate == pytest.approx(1e-3)
    assert remedies["larger_eps"].works


@pytest.mark.parametrize(("key", "value"), [("exp_avg", math.nan), ("exp_avg_sq", math.nan), ("exp_avg", math.inf)])
def test_a_bad_state_is_explained_before_it_reaches_the_weight(key: str, value: float):
    weights, other = weights_of(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([other, weights])
    step(optimizer, weights, 1.0)
    optimizer.state[weights][key][3, 1] = value
    assert examine_update(optimizer, [("table", weights)]) is None  # that is about weights
    finding = examine_state(optimizer, [("other", other), ("table", weights)])
    assert finding is not None
    assert (finding.parameter, finding.cause, finding.state) == ("table", Cause.OPTIMIZER_STATE, key)
    assert (finding.num_bad, finding.rows) == (1, (3,))
    assert "next update" in finding.message
    (remedy,) = try_update_remedies(optimizer, finding, weights)
    assert (remedy.name, remedy.works) == ("reset_state", True)
    assert weights.isfinite().all()
    step(optimizer, weights, 1.0)
    assert not weights[3, 1].isfinite()  # so it was true


def test_a_square_that_overflows_freezes_its_entry():
    weights = weights_of(torch.float16)
    optimizer = torch.optim.AdamW([weights], lr=1e-3, weight_decay=0.0)
    gradient = torch.ones(6, 3)
    gradient[2, 0] = 2e4
    step(optimizer, weights, gradient)
    before = weights.detach().clone()
    step(optimizer, weights, 1.0)
    assert weights.isfinite().all()
    assert (weights != before).logical_not().nonzero().tolist() == [[2, 0]]
    finding = examine_state(optimizer, [("table", weights)])
    assert finding is not None
    assert (finding.state, finding.rows, finding.cause) == ("exp_avg_sq", (2,), Cause.OPTIMIZER_STATE)
    assert "square of a finite gradient exceeds the range of float16" in finding.message
    assert "never move again" in finding.message
    remedies = {remedy.name: remedy.tried for remedy in try_update_remedies(optimizer, finding, weights)}
    assert remedies == {"reset_state": False, "float32_state": False}


def test_a_sound_state_has_no_finding():
    weights = weights_of()
    optimizer = torch.optim.AdamW([weights])
    step(optimizer, weights, 1.0)
    assert examine_state(optimizer, [("table", weights)]) is None
    weights.data[0] = math.nan
    optimizer.state[weights]["exp_avg"][0] = math.nan
    assert examine_state(optimizer, [("table", weights)]) is None  # too late: examine_update has it
