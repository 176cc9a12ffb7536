"""What is bad before the first step is named before it."""

import pytest
import torch
from torch import nn

from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.bad_start import find_bad_start
from hf_nanguard.errors import NonFiniteError
from hf_nanguard.testing import INF, NAN, OperationCounter

from ..loop import Loop, assert_same, make_groups


def begin(policy=None, **fields):
    loop = Loop(**fields)
    with torch.no_grad():
        loop.model.first.weight[3, 1] = NAN
    return loop.guarded(policy)


def test_a_nan_weight_is_named_before_anything_runs():
    loop = begin()
    with pytest.raises(
        NonFiniteError, match=r"first\.weight contains NaN in 1 of 32 entries \(row 3\).*before the first step"
    ):
        loop.step(make_groups(1, 1)[0])
    assert loop.told() == [(0, None, "param_nonfinite", "halted")]
    assert loop.model.calls == 0


def test_observe_reports_it_once_and_takes_no_snapshot():
    loop = begin(Policy(on_bad_start="observe", max_bad_steps=100, weight_check_steps=1, autopsy=False))
    with pytest.raises(NonFiniteError, match="Dropping batches cannot fix this"):
        loop.run(make_groups(3, 1))
    assert loop.told()[0] == (0, None, "param_nonfinite", "observed")
    assert loop.told()[-1] == (0, None, "param_nonfinite", "halted")
    assert loop.guard.recovery.snapshots == []


def test_a_nan_moment_of_a_loaded_optimizer_is_named():
    first = Loop().run(make_groups(2, 1))
    first.optimizer.state[first.model.last.weight]["exp_avg"][0, 5] = NAN
    first.guarded()
    with pytest.raises(NonFiniteError, match=r"exp_avg of last\.weight contains NaN.*before the first step"):
        first.step(make_groups(1, 1)[0])


@pytest.mark.parametrize("value", [INF, -INF])
def test_inf_in_a_weight_is_the_baseline(value):
    class Masked(type(Loop().model)):
        def __init__(self):
            super().__init__()
            self.mask = nn.Parameter(torch.tensor([0.0, value]))

    loop = Loop(model=Masked()).guarded(Policy(weight_check_steps=1, snapshot_steps=1)).run(make_groups(3, 1))
    assert loop.events == []
    assert [each.step for each in loop.guard.recovery.snapshots] == [1, 2]


def test_a_healthy_start_is_silent_and_changes_nothing():
    groups = make_groups(3, 2)
    loop = Loop().guarded().run(groups)
    assert loop.events == []
    assert_same(loop.everything(), Loop().run(groups).everything())


class Table(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.table = nn.Embedding(50, 8, padding_idx=0, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("garbage", [1e-40, 3e30])
def test_rows_of_arbitrary_memory_are_named(dtype, garbage):
    model = Table(dtype)
    with torch.no_grad():
        model.table.weight[[7, 41]] = garbage
    with OperationCounter() as counter:
        [event] = find_bad_start(model, None, 0)
    assert (event.cause, event.action, event.culprit.parameter) == ("uninitialised_weight", "observed", "table.weight")
    assert event.values["rows"] == [7, 41]
    assert len(counter.reads) == 3  # one, and two for the rows
    with OperationCounter() as counter:
        assert not list(find_bad_start(Table(dtype), None, 0))
    assert len(counter.reads) == 1


@pytest.mark.parametrize(
    ("dtype", "settings", "is_zero"),
    [
        (torch.float16, {}, True), (torch.float16, {"fused": True}, False), (torch.float16, {"eps": 1e-4}, False),
        (torch.bfloat16, {}, False), (torch.float32, {}, False),
    ],
)  # fmt: skip
def test_an_eps_that_is_zero_in_the_dtype_of_the_weights(dtype, settings, is_zero):
    model = nn.Linear(3, 3, dtype=dtype)
    found = list(find_bad_start(model, torch.optim.AdamW(model.parameters(), **settings), 5))
    assert [(event.step, event.signal, event.cause) for event in found] == (
        [(5, "optimizer_nonfinite", "adam_eps_underflow")] if is_zero else []
    )


def test_optimizers_without_eps_are_not_judged():
    model = nn.Linear(3, 3, dtype=torch.float16)
    assert not list(find_bad_start(model, torch.optim.SGD(model.parameters(), lr=0.1), 0))
