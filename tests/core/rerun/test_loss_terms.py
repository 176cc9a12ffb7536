"""Terms of a loss: logged, blamed and dropped by name; a healthy step is what it was."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hf_nanguard import ArgumentError, NonFiniteError
from hf_nanguard.core.rerun.loss_terms import cut_term
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.counters import Counter
from hf_nanguard.core.step.guard import Guard
from hf_nanguard.testing import INF, NAN, OperationCounter, add_bad_gradient
from tests.core.loop import Batch, Loop, assert_same, make_batch

QUIET = Policy(autopsy=False)

# What goes wrong in the term "aux", given the model's output: a value with a NaN derivative, one with a finite
# derivative, and a finite value with a derivative of 0 * inf.
FAULTS: dict[str, Callable] = {
    "value": lambda out: out.square().mean() * NAN,
    "shift": lambda out: out.square().mean() + INF,
    "slope": lambda out: (out * 0).square().sum(-1).sqrt().mean(),
}


class Terms(Loop):
    """A loop whose loss is `main + 0.5 * aux`; a batch with the fault `"absent"` has no aux."""

    on_nonfinite = "keep"

    def loss(self, batch: Batch):
        out = self.model(batch.x)
        term = self.weigh if self.guard is None else self.guard.term
        if batch.fault == "model":
            out = add_bad_gradient(out, self.model.first.weight)
        loss = term("main", nn.functional.mse_loss(out, batch.y), 1.0)
        if batch.fault != "absent":
            aux = FAULTS.get(str(batch.fault), lambda out: out.square().mean())(out)
            loss = loss + term("aux", aux, 0.5, self.on_nonfinite)
        return loss

    def weigh(self, name, value, weight=1.0, on_nonfinite="keep"):
        return value if weight == 1.0 else weight * value


def groups_of(*faults, size=2, num_groups=3):
    """Groups of batches, with faults given as (group, index, kind); the kind `None` means that the batch never came."""
    planted = {(group, index): kind for group, index, kind in faults}
    return [
        [make_batch(100 * g + i, planted.get((g, i), "")) for i in range(size) if planted.get((g, i), "") is not None]
        for g in range(num_groups)
    ]


def run(groups, on_nonfinite="keep", policy=QUIET, guarded=True, **kwargs):
    loop = Terms(**{key: kwargs.pop(key) for key in ("optimizer_name", "scaler", "clip") if key in kwargs})
    loop.on_nonfinite = on_nonfinite
    return (loop.guarded(policy, **kwargs) if guarded else loop).run(groups)


# ---- healthy ----


@pytest.mark.parametrize("on_nonfinite", ["keep", "drop"])
def test_a_healthy_run_is_bit_identical_and_logged(on_nonfinite):
    plain = run(groups_of(), guarded=False)
    loop = run(groups_of(), on_nonfinite)
    assert_same(loop.everything(), plain.everything())
    assert loop.events == []
    metrics = loop.guard.counter.as_metrics()
    assert {name for name in metrics if "term" in name} == {"nanguard/term/main", "nanguard/term/aux"}
    assert not any("term" in name for name in loop.guard.counter.as_metrics()), "a new row begins anew"


def test_the_logged_value_is_the_mean_without_weight():
    loop = Terms(clip=None)
    loop.on_nonfinite = "drop"
    loop.guarded(QUIET)
    for parameter in loop.model.parameters():
        parameter.data.zero_()
    loop.model.last.bias.data.fill_(3.0)
    batches = [make_batch(1), make_batch(2)]
    loop.guard.step(loop.loss, batches)
    metrics = loop.guard.counter.as_metrics()
    assert metrics["nanguard/term/aux"] == pytest.approx(9.0)
    errors = [(3.0 - batch.y).square().mean().item() for batch in batches]
    assert metrics["nanguard/term/main"] == pytest.approx(sum(errors) / 2)


@pytest.mark.parametrize(("on_nonfinite", "ops"), [("keep", 3), ("drop", 8)])
def test_a_healthy_term_costs_few_operations_and_no_read(on_nonfinite, ops):
    counts = {}
    for named in (False, True):
        loop = Terms("sgd")
        loop.on_nonfinite = on_nonfinite
        loop.guarded(QUIET)
        if not named:
            loop.guard.term = loop.weigh
        loop.step(groups_of()[0])
        with OperationCounter() as counts[named]:
            loop.step(groups_of()[1])
    assert counts[True].reads == counts[False].reads
    extra = len(counts[True].ops) - len(counts[False].ops)
    assert extra <= ops * 4  # two terms in two micro-batches


def test_terms_of_one_name_add_up_and_any_weight_will_do():
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), QUIET)
    weight = torch.tensor(0.25)

    def loss_fn(x):
        first, second = model(x).square().mean(), (model(x) - 1).square().mean()
        loss = guard.term("layer", first, weight) + guard.term("layer", second.view(1), 2)
        assert loss.item() == pytest.approx(0.25 * first.item() + 2 * second.item())
        seen.append(first.item() + second.item())
        return loss.sum()

    seen: list[float] = []
    guard.step(loss_fn, [torch.randn(3, 2)])
    assert guard.counter.as_metrics()["nanguard/term/layer"] == pytest.approx(seen[0])


def test_an_evaluation_is_not_noted():
    loop = Terms()
    loop.on_nonfinite = "drop"
    loop.guarded(QUIET)
    with torch.no_grad():
        loss = loop.loss(make_batch(1, "value"))
    assert loss.isnan(), "nothing is dropped in an evaluation"
    assert loop.guard.group.terms == []


# ---- blame ----


@pytest.mark.parametrize(("fault", "signal"), [("value", "loss_nonfinite"), ("slope", "grad_nonfinite")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_bad_term_is_blamed_by_name(fault, signal, place):
    loop = run(groups_of((1, place, fault)))
    assert_same(loop.everything(), run(groups_of((1, place, None)), guarded=False).everything())
    assert loop.told() == [(1, place, signal, "dropped")]
    [event] = loop.events
    assert event["culprit"]["term"] == "aux"
    assert event["values"]["terms"].keys() == {"main", "aux"}
    assert math.isfinite(event["values"]["terms"]["main"])
    assert event["values"]["terms"]["aux"] == ("nan" if fault == "value" else 0.0)
    assert "aux" in event["message"]
    json.dumps(event, allow_nan=False)


def test_a_loss_that_is_bad_with_good_gradients_names_its_term():
    loop = run(groups_of((1, 1, "shift")))
    assert loop.told() == [(1, 1, "loss_nonfinite", "dropped")]
    assert loop.events[0]["culprit"]["term"] == "aux"
    assert loop.events[0]["values"]["terms"]["aux"] == "inf"


def test_a_fault_outside_the_terms_names_none():
    groups = groups_of()
    groups[1][0] = make_batch(100, "gradient")
    loop = Terms().guarded(QUIET)
    plain = loop.loss
    loop.loss = lambda batch: (
        add_bad_gradient(plain(batch), loop.model.first.weight) if batch.fault == "gradient" else plain(batch)
    )
    loop.run(groups)
    assert loop.told() == [(1, 0, "grad_nonfinite", "dropped")]
    assert loop.events[0]["culprit"]["term"] is None
    assert loop.events[0]["values"]["terms"].keys() == {"main", "aux"}


@pytest.mark.parametrize("policy", [{"on_nonfinite": "skip"}, {"on_nonfinite": "halt"}, {"on_nonfinite": "repair"}])
@pytest.mark.parametrize("on_nonfinite", ["keep", "drop"])
def test_every_policy_names_the_term(policy, on_nonfinite):
    action = {"skip": "skipped", "halt": "halted", "repair": "skipped"}[policy["on_nonfinite"]]
    loop = Terms()
    loop.on_nonfinite = on_nonfinite
    loop.guarded(Policy(**policy, autopsy=False))
    try:
        loop.run(groups_of((1, 1, "value")))
    except NonFiniteError:
        assert action == "halted"
    [event] = loop.events
    assert (event["signal"], event["action"]) == ("loss_nonfinite", action)
    assert event["values"]["terms"]["aux"] == "nan"
    assert event["culprit"]["term"] == "aux"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", ["observe", "off"])
def test_observing_drops_nothing(fault, mode):
    plain = run(groups_of((1, 1, fault)), guarded=False).everything()
    loop = run(groups_of((1, 1, fault)), "drop", Policy(mode=mode, autopsy=False))
    for name, value in loop.everything().items():
        assert torch.equal(torch.as_tensor(value).nan_to_num(7), torch.as_tensor(plain[name]).nan_to_num(7)), name
    assert {event["action"] for event in loop.events} == (set() if mode == "off" else {"observed"})
    if mode == "observe" and fault != "slope":
        assert loop.events[0]["culprit"]["term"] == "aux"


def test_an_autopsy_looks_inside_the_term():
    loop = run(groups_of((1, 1, "slope")), "drop", Policy())
    [event] = loop.events
    assert event["action"] == "dropped"
    assert event["culprit"]["term"] == "aux"
    assert event["cause"] == "norm_at_zero"
    loop = run(groups_of((1, 1, "value")), "drop", Policy())
    [event] = loop.events
    assert event["culprit"]["source"].startswith("test_loss_terms.py")
    assert event["cause"] != "where_unselected_branch", "the guard's own selection is not the fault"


# ---- dropped ----


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_dropped_term_costs_that_term(fault, place, name):
    expected = run(groups_of((1, place, "absent")), guarded=False, optimizer_name=name).everything()
    loop = run(groups_of((1, place, fault)), "drop", optimizer_name=name)
    assert_same(loop.everything(), expected)
    signal = "grad_nonfinite" if fault == "slope" else "loss_nonfinite"
    assert loop.told() == [(1, place, signal, "dropped")]
    assert loop.events[0]["culprit"]["term"] == "aux"
    metrics = loop.guard.counter.as_metrics()
    assert metrics["nanguard/dropped_terms/aux"] == 1
    assert metrics["nanguard/dropped_microbatches"] == metrics["nanguard/skipped_steps"] == 0
    assert math.isfinite(metrics["nanguard/term/aux"])


def test_a_bad_term_and_a_bad_micro_batch_in_one_group():
    faults = [(1, 0, "slope"), (1, 2, "model")]
    loop = run(groups_of(*faults, size=3), "drop")
    assert_same(loop.everything(), run(groups_of((1, 0, "absent"), (1, 2, None), size=3), guarded=False).everything())
    assert sorted(loop.told()) == [(1, 0, "grad_nonfinite", "dropped"), (1, 2, "grad_nonfinite", "dropped")]
    terms = {event["micro_step"]: event["culprit"]["term"] for event in loop.events}
    assert terms == {0: "aux", 2: None}, "what both terms share is no term's fault"


@pytest.mark.parametrize("fault", ["shift", "slope"])
def test_a_term_that_always_fails_does_not_end_the_run(fault):
    faults = [(g, i, fault) for g in range(6) for i in range(2)]
    loop = run(groups_of(*faults, num_groups=6), "drop", Policy(max_bad_steps=3, autopsy=False))
    assert len(loop.events) == 12, "every one is told"
    metrics = loop.guard.counter.as_metrics()
    assert metrics["nanguard/dropped_terms/aux"] == 12
    assert "nanguard/term/aux" not in metrics, "never shown as 0"
    assert metrics["nanguard/success_rate"] == 1.0


def test_a_term_alone_cannot_be_dropped_from_its_loss():
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), QUIET, on_event=(events := []).append)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    outcome = guard.step(lambda x: guard.term("aux", FAULTS["slope"](model(x)), 1.0, "drop"), [torch.randn(3, 2)])
    assert not outcome.stepped
    assert all(map(torch.equal, before, model.parameters()))
    assert [event["action"] for event in events] == ["skipped"]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_weight_costs_its_term(bad):
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), QUIET, on_event=(events := []).append)

    def loss_fn(batch):
        x, weight = batch
        out = model(x)
        aux = guard.term("aux", out.abs().mean(), torch.tensor(weight), "drop")
        return guard.term("main", out.square().mean()) + aux

    outcome = guard.step(loss_fn, [(torch.randn(3, 2), 1.0), (torch.randn(3, 2), bad)])
    assert outcome.stepped
    assert len(outcome.redone) == 2, "what is left of the loss is logged"
    assert [(event["action"], event["culprit"]["term"]) for event in events] == [("dropped", "aux")]


def test_one_bad_value_does_not_hide_another_bad_gradient():
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), QUIET, on_event=(events := []).append)

    def loss_fn(x):
        out = model(x)
        first, second = guard.term("a", FAULTS["value"](out), 1.0, "drop"), FAULTS["slope"](out)
        return guard.term("main", out.square().mean()) + first + guard.term("b", second, 1.0, "drop")

    assert guard.step(loss_fn, [torch.randn(3, 2)]).stepped
    metrics = guard.counter.as_metrics()
    assert (metrics["nanguard/dropped_terms/a"], metrics["nanguard/dropped_terms/b"]) == (1, 1)
    assert metrics["nanguard/dropped_microbatches"] == 0
    [event] = events
    assert event["message"].endswith("only the term was dropped: a, b"), "all that was left out is told"


def test_of_one_name_the_bad_part_is_told_as_dropped():
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), QUIET, on_event=(events := []).append)

    def loss_fn(x):
        out = model(x)
        return guard.term("aux", out.square().mean()) + guard.term("aux", FAULTS["shift"](out), 1.0, "drop")

    guard.step(loss_fn, [torch.randn(3, 2)])
    assert [event["action"] for event in events] == ["dropped"]
    assert guard.counter.as_metrics()["nanguard/dropped_terms/aux"] == 1


def test_a_scaler_is_not_asked_to_bear_it():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = run(groups_of((1, 1, "value")), "drop", scaler=scaler)
    assert loop.told() == [(1, 1, "loss_nonfinite", "dropped")]
    plain = run(groups_of((1, 1, "absent")), guarded=False, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    assert_same(loop.everything(), plain.everything())


# ---- the parts ----


def test_a_cut_term_reaches_every_parameter_with_zeros_and_nothing_else():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3))
    nothing = cut_term(FAULTS["slope"](first), [first, second])
    (second.sum() + 0.1 * nothing).backward()
    assert first.grad.tolist() == [0.0, 0.0]
    assert second.grad.tolist() == [1.0, 1.0, 1.0]
    assert not cut_term(first.sum(), []).requires_grad


def test_counts_survive_a_checkpoint():
    loop = run(groups_of((1, 1, "slope")), "drop")
    state = json.loads(json.dumps(loop.guard.counter.state_dict()))
    counter = Counter()
    counter.load_state_dict(state)
    assert counter.as_metrics() == loop.guard.counter.as_metrics()


@pytest.mark.parametrize(("arguments", "words"), [
    (("aux", torch.zeros(3)), "must be a scalar"),
    (("aux", 0.0), "must be a tensor"),
    (("aux", torch.zeros(()), 1.0, "ignore"), "must be one of keep, drop"),
])  # fmt: skip
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        Guard().term(*arguments)
