"""The guard in hand-written loops: identity, no trace, least loss, every policy."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_nanguard import ArgumentError, NonFiniteError
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.guard import Guard
from hf_nanguard.testing import INF, NAN, OperationCounter
from tests.core.loop import OPTIMIZERS, Loop, Net, assert_same, make_batch, make_groups

KINDS = ("loss", "gradient", "input")


def without(num_groups, size, places):
    """The groups as they would be had the bad micro-batches never come."""
    groups = make_groups(num_groups, size)
    return [[batch for i, batch in enumerate(group) if (g, i) not in places] for g, group in enumerate(groups)]


# ---- L1, L2, L3 ----


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_healthy_run_is_bit_identical_to_the_plain_loop(name, size, clip):
    plain = Loop(name, clip).run(make_groups(5, size)).everything()
    loop = Loop(name, clip).guarded().run(make_groups(5, size))
    assert_same(loop.everything(), plain)
    assert loop.events == []


@pytest.mark.parametrize("mode", ["observe", "off"])
@pytest.mark.parametrize("fault", [None, *KINDS])
def test_observe_and_off_change_nothing_whatever_happens(mode, fault):
    faults = {} if fault is None else {(1, 1): fault}
    plain = Loop().run(make_groups(3, 2, faults))
    loop = Loop().guarded(Policy(mode=mode)).run(make_groups(3, 2, faults))
    for name, value in plain.everything().items():
        same = torch.as_tensor(loop.everything()[name])
        assert torch.equal(torch.as_tensor(value).nan_to_num(7.0), same.nan_to_num(7.0)), name
    assert bool(loop.events) == (mode == "observe" and fault is not None)
    assert {event["action"] for event in loop.events} <= {"observed"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_micro_batch_costs_that_micro_batch(kind, value, place):
    expected = Loop().run(without(4, 3, {(1, place)})).everything()
    loop = Loop().guarded().run(make_groups(4, 3, {(1, place): {"fault": kind, "value": value}}))
    assert_same(loop.everything(), expected)
    signal = "grad_nonfinite" if kind == "gradient" else "loss_nonfinite"
    assert loop.told() == [(1, place, signal, "dropped")]
    culprit = loop.events[0]["culprit"]
    assert culprit["parameter"] == ("first.weight" if kind == "gradient" else culprit["parameter"])
    assert culprit["phase"] == {"gradient": "backward", "loss": "loss", "input": "input"}[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [0, 2])
def test_a_group_with_nothing_left_leaves_no_trace(kind, group):
    places = {(group, 0), (group, 1)}
    expected = Loop().run(without(4, 2, places)).everything()
    loop = Loop().guarded().run(make_groups(4, 2, dict.fromkeys(places, kind)))
    assert_same(loop.everything(), expected)
    assert [(step, micro, action) for step, micro, _, action in loop.told()] == [
        (group, 0, "skipped"),
        (group, 1, "skipped"),
    ]


places = st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 2)), st.sampled_from(KINDS), max_size=6)


@settings(max_examples=25, deadline=None)
@given(places, st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from([None, 0.5]))
def test_wherever_the_faults_are_the_run_is_the_one_without_them(faults, name, clip):
    expected = Loop(name, clip).run(without(4, 3, faults)).everything()
    loop = Loop(name, clip).guarded().run(make_groups(4, 3, faults))
    assert_same(loop.everything(), expected)
    assert {(step, micro) for step, micro, *_ in loop.told()} == faults.keys()


def test_a_gradient_fault_names_its_parameter_and_its_healthy_neighbours():
    faults = {(1, 0): {"fault": "gradient", "parameter": "norm.weight", "value": INF}}
    loop = Loop().guarded().run(make_groups(2, 2, faults))
    [event] = loop.events
    assert event["culprit"]["parameter"] == "norm.weight"
    assert event["values"]["bad_parameters"] == {"norm.weight": "inf"}
    assert event["values"]["good_neighbours"] == ["first.bias", "norm.bias"]
    assert event["values"]["num_good_parameters"] == 5
    assert math.isfinite(event["values"]["loss"])


def test_numbers_of_the_outcome():
    loop = Loop().guarded()
    settled = [loop.step(group) for group in make_groups(3, 2, {(1, 0): "loss", (2, 0): "loss", (2, 1): "input"})]
    assert [s.stepped for s in settled] == [True, True, False]
    assert [s.num_dropped for s in settled] == [0, 1, 2]
    assert [s.halt for s in settled] == [None] * 3
    assert settled[0].redone is None
    assert len(settled[1].redone) == 1
    assert settled[2].redone == []
    assert loop.guard.counter.as_metrics() == {
        "nanguard/skipped_steps": 1,
        "nanguard/dropped_microbatches": 3,
        "nanguard/success_rate": 0.5,
        "nanguard/success_rate_recent": 0.5,
        "nanguard/grad_norm_max": max(float(settled[0].norm), float(settled[1].norm)),
    }


def test_a_healthy_step_reads_the_host_once_and_runs_each_batch_once():
    loop = Loop("fused").guarded()
    groups = make_groups(3, 3)
    loop.run(groups[:2])
    with OperationCounter() as counted:
        loop.run(groups[2:])
    assert len(counted.reads) == 1
    assert [batch.runs for group in groups for batch in group] == [1] * 9


def test_float64_models_are_not_taken_for_overflowing():
    model = nn.Linear(2, 1, dtype=torch.float64)
    events = []
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-45), on_event=events.append)
    before = model.weight.detach().clone()
    assert guard.step(lambda x: (model(x) * 1e45).sum(), [torch.ones(3, 2, dtype=torch.float64)]).stepped
    assert not torch.equal(model.weight, before)
    assert events == []


def test_float64_runs_are_bit_identical_too():
    def data(group):
        for batch in group:
            batch.x, batch.y = batch.x.double(), batch.y.double()
        return group

    plain = Loop(model=Net(torch.float64)).run(map(data, make_groups(3, 2))).everything()
    assert_same(Loop(model=Net(torch.float64)).guarded().run(map(data, make_groups(3, 2))).everything(), plain)


# ---- what the policy says ----


@pytest.mark.parametrize("kind", KINDS)
def test_skip_leaves_the_whole_group_out(kind):
    expected = Loop().run(without(3, 2, {(1, 0), (1, 1)})).everything()
    loop = Loop().guarded(Policy(on_nonfinite="skip")).run(make_groups(3, 2, {(1, 1): kind}))
    assert_same(loop.everything(), expected)
    [(step, _, _, action)] = loop.told()
    assert (step, action) == (1, "skipped")


def test_floor_trains_as_drop_does():
    expected = Loop().run(without(3, 2, {(1, 0)})).everything()
    loop = Loop().guarded(Policy(on_nonfinite="floor")).run(make_groups(3, 2, {(1, 0): "loss"}))
    assert_same(loop.everything(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_halt_raises_with_the_weights_of_the_last_good_step(kind):
    expected = Loop().run(make_groups(1, 2)).everything()
    loop = Loop().guarded(Policy(on_nonfinite="halt"))
    with pytest.raises(NonFiniteError, match="halted at step 1"):
        loop.run(make_groups(3, 2, {(1, 1): kind}))
    assert_same(loop.everything(), expected)
    assert [(step, action) for step, _, _, action in loop.told()] == [(1, "halted")]


def test_repair_zeroes_the_bad_entries_and_lets_the_rest_step():
    faults = {(1, 0): {"fault": "gradient", "parameter": "last.weight"}}
    loop = Loop("sgd", clip=None).guarded(Policy(on_nonfinite="repair")).run(make_groups(2, 1, faults))
    plain = Loop("sgd", clip=None).run(make_groups(2, 1))
    weight, healthy = loop.model.last.weight, plain.model.last.weight
    assert torch.equal(loop.model.first.weight, plain.model.first.weight)
    assert torch.equal(weight[0, 1:], healthy[0, 1:])
    assert weight[0, 0] != healthy[0, 0]
    assert weight.isfinite().all()
    assert loop.told() == [(1, 0, "grad_nonfinite", "repaired")]


def test_repair_with_nothing_left_skips_without_a_trace():
    expected = Loop().run(without(3, 1, {(1, 0)})).everything()
    loop = Loop().guarded(Policy(on_nonfinite="repair")).run(make_groups(3, 1, {(1, 0): "loss"}))
    assert_same(loop.everything(), expected)
    assert [(step, action) for step, _, _, action in loop.told()] == [(1, "skipped")]


def test_a_nan_loss_has_nothing_to_repair_also_under_a_scaler():
    kwargs = {"init_scale": 8.0}
    expected = Loop("sgd", None, scaler(**kwargs)).run(without(3, 1, {(1, 0)})).everything()
    loop = Loop("sgd", None, scaler(**kwargs)).guarded(Policy(on_nonfinite="repair"))
    loop.run(make_groups(3, 1, {(1, 0): "loss"}))
    assert_same(loop.everything(), expected)
    assert [(step, action) for step, _, _, action in loop.told()] == [(1, "skipped")]


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_bad_steps_in_a_row_halt_with_good_weights(kind):
    bad = {(g, 0): kind for g in (1, 3, 4, 5)}
    expected = Loop().run(without(3, 1, {(1, 0)})).everything()
    loop = Loop().guarded(Policy(max_bad_steps=3, max_rewinds=0))
    with pytest.raises(NonFiniteError, match=r"3 bad steps in a row.*last good step.*max_bad_steps"):
        loop.run(make_groups(9, 1, bad))
    assert_same(loop.everything(), expected)
    assert [(step, action) for step, _, _, action in loop.told()] == [
        (1, "skipped"), (3, "skipped"), (4, "skipped"), (5, "skipped"), (5, "halted"),
    ]  # fmt: skip


def test_dropped_micro_batches_count_as_bad_steps_too():
    loop = Loop().guarded(Policy(max_bad_steps=2, max_rewinds=0))
    with pytest.raises(NonFiniteError):
        loop.run(make_groups(3, 2, {(0, 0): "loss", (1, 1): "loss"}))
    assert loop.guard.steps_done == 2


def test_stop_ends_cleanly_and_says_so():
    loop = Loop().guarded(Policy(max_bad_steps=1, on_halt="stop"))
    outcome = loop.step(make_groups(1, 1, {(0, 0): "loss"})[0])
    assert not outcome.stepped
    assert "1 bad steps in a row" in outcome.halt


# ---- norms ----


def norms_of(groups, **kwargs):
    loop = Loop(**kwargs).guarded()
    return [float(loop.step(group).norm) for group in groups]


def test_a_norm_above_the_fixed_threshold_is_skipped_without_a_trace():
    first = norms_of(make_groups(1, 1))[0]
    expected = Loop().run(without(2, 1, {(0, 0)})).everything()
    spike, healthy = make_groups(2, 1, {(0, 0): {"fault": "loss", "value": 100.0}})
    loop = Loop().guarded(Policy(skip_grad_norm=first * 99))
    outcome = loop.step(spike)
    assert not outcome.stepped
    assert loop.told() == [(0, None, "grad_spike", "skipped")]
    assert loop.events[0]["values"] == {"grad_norm": pytest.approx(first * 100), "threshold": first * 99}
    loop.step(healthy)
    assert_same(loop.everything(), expected)


def test_a_norm_at_the_threshold_is_not():
    first = norms_of(make_groups(1, 1))[0]
    loop = Loop().guarded(Policy(skip_grad_norm=first * 1.01)).run(make_groups(1, 1))
    assert loop.events == []


def spiked(on_spike):
    """60 healthy steps, then a batch whose loss is a thousand times too large."""
    groups = make_groups(61, 1, {(60, 0): {"fault": "loss", "value": 1e3}})
    loop = Loop("sgd", clip=None).guarded(Policy(on_spike=on_spike)).run(groups[:-1])
    assert loop.events == [], "healthy noise must not alarm"
    before = loop.everything()
    threshold = loop.guard.norms.threshold()
    return loop, before, threshold, loop.step(groups[-1])


def test_a_spike_is_observed_and_the_step_goes_on():
    loop, _, threshold, outcome = spiked("observe")
    plain = Loop("sgd", clip=None).run(make_groups(61, 1, {(60, 0): {"fault": "loss", "value": 1e3}}))
    assert outcome.stepped
    assert loop.told() == [(60, None, "loss_spike", "observed"), (60, None, "grad_spike", "observed")]
    assert_same(loop.everything(), plain.everything())
    assert max(loop.guard.norms.values) <= threshold, "the spike must not move the yardstick"


def test_a_spike_is_clipped_to_the_threshold():
    loop, _, threshold, outcome = spiked("clip")
    assert loop.told() == [(60, None, "loss_spike", "observed"), (60, None, "grad_spike", "clipped")]
    assert outcome.clip_to == threshold
    plain = Loop("sgd", clip=None).run(make_groups(60, 1))
    plain.clip = threshold
    plain.run(make_groups(61, 1, {(60, 0): {"fault": "loss", "value": 1e3}})[60:])
    assert_same(loop.everything(), plain.everything())


def test_a_spike_is_skipped_without_a_trace():
    loop, before, _, outcome = spiked("skip")
    assert not outcome.stepped
    assert loop.told() == [(60, None, "grad_spike", "skipped")]
    assert_same(loop.everything(), before)


def test_an_observed_step_starts_the_ladder_again_as_a_clipped_one_does():
    for on_spike in ("observe", "clip"):
        loop, *_ = spiked(on_spike)
        loop.guard.escalation.bad_in_a_row = 9
        loop.step([make_batch(7000, "loss", 1e3)])
        assert loop.guard.escalation.bad_in_a_row == 0, "the step went through"


def test_a_lasting_change_of_level_is_learned():
    """Norms that have moved for good must stop being spikes, whatever is done about them meanwhile."""
    for on_spike in ("observe", "clip"):
        loop = Loop("sgd", clip=1e-9).guarded(Policy(on_spike=on_spike)).run(make_groups(60, 1))
        late = [[make_batch(9000 + i, "loss", 1e3)] for i in range(160)]
        loop.run(late)
        assert loop.told(), on_spike
        assert loop.told()[-1][0] < 200, f"{on_spike}: still alarmed"


@pytest.mark.parametrize("mode", ["act", "observe"])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 3e3), (torch.float32, 1e25), (torch.bfloat16, 1e30)])
def test_finite_gradients_whose_norm_overflows_are_clipped_by_the_true_norm(dtype, value, mode):
    """The true norm is `value * sqrt(2000)`, so clipping leaves 1 / sqrt(2000) of every entry."""
    model = nn.Linear(2000, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    events = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, Policy(mode=mode), on_event=events.append, max_grad_norm=1.0)
    batch = torch.full((1, 2000), value, dtype=dtype)
    for _ in range(2):
        assert guard.step(lambda x: (model.weight * x).sum() * 1.0, [batch]).stepped
    torch.testing.assert_close(model.weight, torch.full_like(model.weight, -0.2 / 2000**0.5), rtol=2e-2, atol=0.0)
    [event] = events
    assert (event["signal"], event["action"], event["cause"]) == ("grad_nonfinite", "observed", "norm_overflow")
    assert event["culprit"]["parameter"] is None
    assert event["values"]["num_bad_parameters"] == 0
    assert event["values"]["true_norm"] == pytest.approx(value * 2000**0.5, rel=1e-2)


def test_without_clipping_a_step_whose_norm_overflows_goes_on_as_without_a_guard():
    """An optimizer that does not care about scale trains on such gradients."""

    def train(guard_it):
        model = nn.Linear(50, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.Rprop(model.parameters())
        guard = Guard(model, optimizer, Policy(mode="act" if guard_it else "off", max_bad_steps=2))
        for seed in range(5):
            x = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed))
            guard.step(lambda x: (model.weight * x).sum() * 1e25, [x])
        return model.weight.detach()

    assert torch.equal(train(True), train(False))


def test_a_fixed_threshold_holds_for_a_norm_that_overflows():
    model = nn.Linear(50, 1, bias=False)
    before = model.weight.detach().clone()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1.0), Policy(skip_grad_norm=10.0))
    assert not guard.step(lambda x: (model.weight * x).sum() * 1e25, [torch.ones(1, 50)]).stepped
    assert torch.equal(model.weight, before)


def test_a_fault_that_does_not_come_back_costs_nothing():
    faults = {(1, 0): {"fault": "loss", "once": True}}
    expected = Loop().run(make_groups(3, 2)).everything()
    loop = Loop().guarded().run(make_groups(3, 2, faults))
    assert_same(loop.everything(), expected)
    [event] = loop.events
    assert (event["step"], event["cause"], event["action"]) == (1, "transient", "repaired")


def test_a_sum_that_overflows_blames_no_micro_batch():
    loop = Loop(clip=None).guarded()
    big = {"fault": "gradient", "value": 3e38, "parameter": "last.bias"}
    before = loop.everything()
    loop.step(make_groups(1, 2, {(0, 0): big, (0, 1): big})[0])
    assert all(action == "skipped" for *_, action in loop.told())
    assert_same(loop.everything(), before)


# ---- weights, watch ----


@pytest.mark.parametrize(("value", "word"), [(NAN, "NaN"), (INF, "inf")])
def test_a_bad_weight_is_named_and_ends_the_run(value, word):
    loop = Loop().guarded(Policy(max_rewinds=0)).run(make_groups(1, 2))
    with torch.no_grad():
        loop.model.norm.weight[3] = value
    with pytest.raises(NonFiniteError, match=rf"parameter norm\.weight contains {word}.*earlier checkpoint"):
        loop.step(make_groups(2, 2)[1])
    named = [event for event in loop.events if event["signal"] == "param_nonfinite"]
    assert len(named) == 1
    assert named[0]["culprit"]["parameter"] == "norm.weight"
    assert (named[0]["cause"], named[0]["action"]) == ("param_nonfinite", "halted")


@pytest.mark.parametrize(
    ("planted", "bound", "seen"),
    [(0.5, None, False), (0.5, 1.0, False), (2.0, 1.0, True), (NAN, None, True), (INF, 9.0, True)],
)
def test_a_watched_tensor_is_reported_and_nothing_else_changes(planted, bound, seen):
    plain = Loop().run(make_groups(1, 1)).everything()
    loop = Loop().guarded()
    encoded = torch.tensor([0.1, planted])

    def loss(batch):
        assert loop.guard.watch("encoder", encoded, bound) is encoded
        return loop.loss(batch)

    loop.guard.step(loss, make_groups(1, 1)[0])
    assert_same(loop.everything(), plain)
    assert loop.told() == ([(0, None, "prediction_nonfinite", "observed")] if seen else [])
    if seen:
        assert loop.events[0]["culprit"]["term"] == "encoder"
        assert loop.events[0]["values"]["bound"] == bound


def test_watching_shares_the_one_read():
    loop = Loop("fused").guarded().run(make_groups(2, 1))

    def loss(batch):
        loop.guard.watch("encoder", batch.x)
        return loop.loss(batch)

    with OperationCounter() as counted:
        loop.guard.step(loss, make_groups(1, 2)[0])
    assert len(counted.reads) == 1


def test_a_replayed_batch_is_not_watched_again():
    loop = Loop().guarded()

    def loss(batch):
        loop.guard.watch("x", batch.x)
        return loop.loss(batch)

    loop.guard.step(loss, make_groups(1, 2, {(0, 0): "input"})[0])
    assert [signal for _, _, signal, _ in loop.told()].count("prediction_nonfinite") == 1


def test_zero_loss_and_gradient_are_news_once():
    model = nn.Linear(2, 1)
    events = []
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), on_event=events.append)
    for factor in (0.0, 0.0, 1.0, 0.0):
        guard.step(lambda x, factor=factor: (model(x) * factor).sum(), [torch.ones(1, 2)])
    assert [(e["step"], e["signal"], e["action"]) for e in events] == [(0, "loss_zero", "observed")]


def shift_loss(loop, groups, *places, value=INF):
    """Makes the loss of some batches bad and leaves their gradients as they are."""
    bad, plain = [groups[step][micro] for step, micro in places], loop.loss
    loop.loss = lambda batch: plain(batch) + value if any(batch is other for other in bad) else plain(batch)
    return loop


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_bad_loss_with_good_gradients_never_reaches_the_optimizer(value):
    groups = make_groups(3, 3)
    loop = shift_loss(Loop().guarded(), groups, (1, 1), value=value).run(groups)
    without = make_groups(3, 3)
    del without[1][1]
    assert_same(loop.everything(), Loop().run(without).everything())
    assert loop.told() == [(1, 1, "loss_nonfinite", "dropped")]
    assert "its gradients are finite" in loop.events[0]["message"]
    assert loop.events[0]["values"]["loss"] == str(value)


@pytest.mark.parametrize("policy", ["drop", "skip", "repair", "floor"])
def test_a_step_of_nothing_but_a_bad_loss_is_skipped(policy):
    groups = make_groups(3, 1)
    loop = shift_loss(Loop().guarded(Policy(on_nonfinite=policy)), groups, (1, 0)).run(groups)
    without = make_groups(3, 1)
    del without[1]
    assert_same(loop.everything(), Loop().run(without).everything())
    assert loop.told() == [(1, 0, "loss_nonfinite", "skipped")]


def test_a_bad_loss_with_good_gradients_is_observed_if_the_guard_only_observes():
    groups = make_groups(3, 2)
    loop = shift_loss(Loop().guarded(Policy(mode="observe")), groups, (1, 1)).run(groups)
    assert_same(loop.everything(), Loop().run(make_groups(3, 2)).everything())
    assert loop.told() == [(1, 1, "loss_nonfinite", "observed")]


# ---- loss scaler ----


def scaler(**kwargs):
    return torch.amp.GradScaler("cpu", **kwargs)


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_a_scaler_that_finds_its_scale_is_left_alone(mode):
    kwargs = {"init_scale": 3e38, "growth_interval": 3}
    plain = Loop("sgd", 1.0, scaler(**kwargs)).run(make_groups(8, 2))
    loop = Loop("sgd", 1.0, scaler(**kwargs)).guarded(Policy(mode=mode)).run(make_groups(8, 2))
    assert_same(loop.everything(), plain.everything())
    assert loop.events == []
    assert loop.guard.counter.scaler_skips >= 1, "the scale must overflow at first, or this shows nothing"
    assert plain.scheduler.last_epoch == 8 - loop.guard.counter.scaler_skips


@pytest.mark.parametrize("kind", ["loss", "input"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_nan_loss_under_a_scaler_is_contained(kind, size):
    kwargs = {"init_scale": 8.0, "growth_interval": 3}
    expected = Loop("adamw", 1.0, scaler(**kwargs)).run(without(5, size, {(2, 0)}))
    loop = Loop("adamw", 1.0, scaler(**kwargs)).guarded().run(make_groups(5, size, {(2, 0): kind}))
    assert_same(loop.everything(), expected.everything())
    assert loop.told() == [(2, 0, "loss_nonfinite", "skipped" if size == 1 else "dropped")]
    assert loop.scaler.get_scale() == 16.0


def test_a_gradient_that_overflows_at_any_scale_is_said():
    loop = Loop("sgd", None, scaler(init_scale=2.0)).guarded()
    loop.run(make_groups(4, 1, {(g, 0): "gradient" for g in range(4)}))
    assert loop.events
    assert "loss scale has fallen" in loop.events[0]["message"]


# ---- use ----


def test_a_guard_without_a_model_says_what_it_needs():
    with pytest.raises(ArgumentError, match=r"Guard\(model, optimizer\)"):
        Guard().step(lambda batch: batch, [1])


def test_a_step_without_batches_says_so():
    with pytest.raises(ArgumentError, match="at least one batch"):
        Loop().guarded().step([])


def test_an_error_in_the_loss_comes_through_and_leaves_no_gradients():
    expected = Loop().run(make_groups(2, 2)[1:]).everything()
    loop = Loop().guarded()
    before = loop.everything()
    group = make_groups(1, 2)[0]

    def fails(batch):
        if batch is group[1]:
            raise ValueError("planted")
        return loop.loss(batch)

    with pytest.raises(ValueError, match="planted"):
        loop.guard.step(fails, group)
    assert {n: v for n, v in before.items() if n.startswith("optimizer")} == {}
    loop.model.load_state_dict({n.removeprefix("model."): v for n, v in before.items() if n.startswith("model.")})
    torch.set_rng_state(before["rng"])
    loop.run(make_groups(2, 2)[1:])
    assert_same(loop.everything(), expected)


def test_parameters_without_gradients_and_frozen_ones_are_left_alone():
    loop = Loop().guarded()
    loop.model.extra = nn.Parameter(torch.ones(2))
    loop.model.first.weight.requires_grad_(False)
    guard = Guard(loop.model, loop.optimizer, on_event=loop.events.append)
    guard.step(loop.loss, make_groups(1, 2, {(0, 1): "loss"})[0])
    assert loop.told() == [(0, 1, "loss_nonfinite", "dropped")]
    assert torch.equal(loop.model.extra, torch.ones(2))


def test_state_makes_the_round_trip():
    faults = {(1, 0): "loss", (2, 0): "gradient"}
    loop = Loop().guarded().run(make_groups(3, 1, faults))
    state = json.loads(json.dumps(loop.guard.state_dict(), allow_nan=False))
    again = Loop().guarded().guard
    again.load_state_dict(state)
    assert again.state_dict() == loop.guard.state_dict()
    assert again.escalation.bad_in_a_row == 0, "a run starts with a full budget"
    assert again.counter.skipped_steps == 2
    assert list(again.norms.values) == list(loop.guard.norms.values)
    assert len(again.norms.values) == 1


def test_statistics_never_take_a_bad_norm_in():
    loop = Loop().guarded(Policy(max_bad_steps=100)).run(make_groups(9, 1, {(g, 0): "loss" for g in range(1, 8)}))
    assert all(math.isfinite(value) for value in loop.guard.norms.values)
    assert len(loop.guard.norms.values) == 2


# ---- why the usual fixes fail, and this does not ----


def ruined(loop):
    return not all(parameter.isfinite().all() for parameter in loop.model.parameters())


def guarded_is_unharmed(kind):
    expected = Loop().run(without(3, 1, {(1, 0)})).everything()
    assert_same(Loop().guarded().run(make_groups(3, 1, {(1, 0): kind})).everything(), expected)


def test_replacing_the_loss_by_a_constant_has_no_graph_or_still_moves_the_weights():
    loop = Loop().run(make_groups(1, 1))
    before = loop.model.first.weight.detach().clone()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.tensor(1e-6).backward()
    (sum(p.sum() for p in loop.model.parameters()) * 0 + 1e-6).backward()
    loop.optimizer.step()
    assert not torch.equal(loop.model.first.weight, before), "momentum and decay"
    guarded_is_unharmed("loss")


def test_nan_to_num_of_the_loss_still_has_nan_gradients():
    loop = Loop()
    torch.nan_to_num(loop.loss(make_batch(0, "input"))).backward()
    assert loop.model.first.weight.grad.isnan().any()
    loop.optimizer.step()
    assert ruined(loop)
    guarded_is_unharmed("input")


def test_multiplying_the_update_by_zero_ruins_parameters():
    loop = Loop("sgd")
    loop.loss(make_batch(0, "loss")).backward()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter -= 0.0 * parameter.grad
    assert ruined(loop)
    guarded_is_unharmed("loss")


def test_clipping_spreads_one_bad_gradient_over_all():
    loop = Loop()
    loop.loss(make_batch(0, "gradient")).backward()
    assert sum(bool(p.grad.isnan().any()) for p in loop.model.parameters()) == 1
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    assert all(p.grad.isnan().any() for p in loop.model.parameters())
    guarded_is_unharmed("gradient")


def test_clamping_the_loss_stops_hard_batches_from_teaching():
    loop = Loop()
    hard = loop.loss(make_batch(0, "loss", 1e3))
    hard.clamp(max=6.0).backward()
    assert not loop.model.first.weight.grad.any()
    guarded = Loop().guarded()
    before = guarded.model.first.weight.detach().clone()
    assert guarded.step([make_batch(0, "loss", 1e3)]).stepped
    assert not torch.equal(guarded.model.first.weight, before)


def test_a_mean_that_took_the_nan_in_is_blind_or_skips_for_ever():
    mean = 1.0
    for norm in (1.0, NAN, 1.0, 1.0):
        mean = 0.9 * mean + 0.1 * norm
    assert math.isnan(mean)
    loop = Loop().guarded().run(make_groups(60, 1, {(30, 0): "loss"}))
    assert loop.guard.norms.threshold() is not None
    assert [step for step, *_ in loop.told()] == [30]


def test_a_check_after_the_step_comes_too_late():
    loop = Loop().run(make_groups(1, 1, {(0, 0): "loss"}))
    assert ruined(loop)
    guarded_is_unharmed("loss")


def test_isnan_of_the_norm_alone_misses_inf():
    loop = Loop("sgd", clip=None)
    loop.loss(make_batch(0, "gradient", INF)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in loop.model.parameters()])
    assert not norm.isnan()
    loop.optimizer.step()
    assert ruined(loop)
    expected = Loop().run(without(2, 1, {(0, 0)})).everything()
    faults = {(0, 0): {"fault": "gradient", "value": INF}}
    assert_same(Loop().guarded().run(make_groups(2, 1, faults)).everything(), expected)


@pytest.mark.parametrize("size", [1, 3])
def test_a_bad_number_that_the_loss_draws_itself_does_not_come_for_ever(size):
    """A skipped step restores the random state; from there the same draw would follow, step after step."""
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    guard = Guard(network, torch.optim.SGD(network.parameters(), lr=0.1), Policy(max_bad_steps=20, autopsy=False))

    def loss_fn(batch):
        level = torch.rand(())
        weight = torch.where(level < 0.3, INF, 1.0)  # a signal-to-noise ratio at one end
        return (network(batch).square() * weight).mean()

    outcomes = [guard.step(loss_fn, [torch.ones(4, 2)] * size) for _ in range(60)]
    assert any(not outcome.stepped or outcome.num_dropped for outcome in outcomes)
    assert all(torch.isfinite(parameter).all() for parameter in network.parameters())


def test_skipped_steps_leave_the_random_state_until_half_of_those_allowed_have_come():
    network = nn.Linear(2, 1)
    policy = Policy(autopsy=False, max_bad_steps=4, on_halt="stop")
    guard = Guard(network, torch.optim.SGD(network.parameters(), lr=0.1), policy)
    draws = []

    def loss_fn(batch):
        draws.append(float(torch.rand(())))
        return (network(batch) * NAN).mean()

    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    first = []
    for _ in range(4):
        del draws[:]
        guard.step(loss_fn, [torch.ones(4, 2)])
        first.append(draws[0])
    assert first == [expected[0], expected[0], expected[0], expected[1]]
    assert float(torch.rand(())) == expected[0]  # it has come to a halt, with everything as before the first of them


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_an_update_with_a_setting_that_is_not_finite_is_skipped(name, value):
    loop = Loop().guarded()
    loop.run(make_groups(2, 2))
    before = {key: torch.as_tensor(entry).clone() for key, entry in loop.everything().items()}
    good = loop.optimizer.param_groups[0][name]
    loop.optimizer.param_groups[0][name] = value
    outcome = loop.step(make_groups(1, 2)[0])
    assert (outcome.stepped, outcome.halt) == (False, None)
    loop.optimizer.param_groups[0][name] = good
    after = loop.everything()
    changed = {key for key, entry in before.items() if not torch.equal(torch.as_tensor(after[key]), entry)}
    assert changed == {"schedule"}  # which may have made it, so it goes on
    assert [(event["signal"], event["action"]) for event in loop.events] == [("optimizer_nonfinite", "skipped")]
    assert ("learning rate" if name == "lr" else name) in loop.events[0]["message"]


def test_a_run_whose_rate_stays_nan_ends_without_a_rewind():
    loop = Loop().guarded(Policy(max_bad_steps=3, on_halt="stop"))
    loop.run(make_groups(2, 2))
    loop.scheduler.lr_lambdas = [lambda step: NAN]
    loop.scheduler.step()
    outcomes = [loop.step(group) for group in make_groups(3, 2)]
    assert [outcome.halt is not None for outcome in outcomes] == [False, False, True]
    assert "learning rate of the optimizer is nan" in outcomes[-1].halt
    assert {event["action"] for event in loop.events} == {"skipped"}
    assert all(bool(parameter.isfinite().all()) for parameter in loop.model.parameters())
