"""A run that cannot continue goes back to a snapshot, in place and bit by bit, or halts."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step import rewind_to_snapshot
from hf_nanguard.errors import NonFiniteError
from hf_nanguard.testing import NAN, OperationCounter

from ..loop import OPTIMIZERS, Loop, Net, assert_same, make_groups

EVERY_TWO = Policy(snapshot_steps=2, autopsy=False)


def adafactor(parameters):
    from transformers import Adafactor

    return Adafactor(parameters, lr=0.05, relative_step=False, scale_parameter=False)


class Nested(torch.optim.SGD):
    """An optimizer whose state is nested and contains an object, with a tensor that appears later."""

    class Part:
        def __init__(self, tensor):
            self.mean = torch.zeros_like(tensor)
            self.count = 0

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None:
                    part = state.setdefault("parts", [self.Part(parameter)])[0]
                    part.mean.mul_(0.5).add_(parameter.grad)
                    part.count += 1
                    parameter.grad.copy_(part.mean)
        return super().step(closure)


MORE = {**OPTIMIZERS, "adafactor": adafactor, "nested": lambda p: Nested(p, lr=0.05)}


@pytest.fixture(autouse=True)
def more_optimizers(monkeypatch):
    for name, build in MORE.items():
        monkeypatch.setitem(OPTIMIZERS, name, build)


def poison(loop, what="weight"):
    """Plants NaN into a weight, or into a moment of one."""
    parameter = loop.model.first.weight
    with torch.no_grad():
        target = parameter if what == "weight" else loop.optimizer.state[parameter][what]
        target[0, 0] = NAN


def state_of(loop):
    found = loop.everything()
    parts = [state["parts"][0] for state in loop.optimizer.state.values() if "parts" in state]
    found = {name: value for name, value in found.items() if not name.endswith(".parts")}
    return found | {f"part {i}": value for i, part in enumerate(parts) for value in (part.mean.clone(), part.count)}


@pytest.mark.parametrize("optimizer", MORE)
@pytest.mark.parametrize(("at", "back_to", "period"), [(5, 4, 2), (1, 0, 100)])
def test_a_rewound_run_is_one_that_never_saw_those_batches(optimizer, at, back_to, period):
    groups = make_groups(9, 2)
    loop = Loop(optimizer).guarded(Policy(snapshot_steps=period, autopsy=False))
    loop.run(groups[:at])
    poison(loop)
    loop.run(groups[at:])
    assert loop.told() == [(at, 0, "loss_nonfinite", "skipped"), (at, 1, "loss_nonfinite", "skipped"),
                           (at, None, "param_nonfinite", "rewound")]  # fmt: skip
    assert loop.events[-1]["values"]["snapshot_step"] == back_to
    assert_same(state_of(loop), state_of(Loop(optimizer).run([*groups[:back_to], *groups[at + 1 :]])))


def test_float16_scaler_and_bfloat16_go_back_too():
    groups = make_groups(6, 2)

    def loop():
        made = Loop(model=Net(), scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        return made

    rewound = loop().guarded(EVERY_TWO).run(groups[:3])
    poison(rewound)
    rewound.run(groups[3:])
    assert rewound.told()[-1][2:] == ("param_nonfinite", "rewound")
    assert_same(rewound.everything(), loop().run([*groups[:2], *groups[4:]]).everything())


def test_bad_steps_in_a_row_rewind_before_they_halt():
    bad = {(step, 0): "loss" for step in (5, 6, 7)}
    loop = Loop().guarded(Policy(snapshot_steps=4, max_bad_steps=3, autopsy=False))
    groups = make_groups(10, 1, bad)
    loop.run(groups)
    assert [told[2:] for told in loop.told()] == [("loss_nonfinite", "skipped")] * 3 + [("loss_nonfinite", "rewound")]
    assert_same(loop.everything(), Loop().run([*groups[:4], *groups[8:]]).everything())


def test_a_step_whose_good_half_was_left_does_not_count_either():
    loop = Loop().guarded(Policy(snapshot_steps=4, max_bad_steps=2, autopsy=False))
    groups = make_groups(9, 2, {(5, 0): "loss", (6, 1): "loss"})
    loop.run(groups)
    assert [told[3] for told in loop.told()] == ["dropped", "dropped", "rewound"]
    assert_same(loop.everything(), Loop().run([*groups[:4], *groups[7:]]).everything())


def test_a_state_in_which_the_batches_were_bad_already_is_no_way_back():
    loop = Loop().guarded(Policy(max_bad_steps=3, autopsy=False))
    with pytest.raises(NonFiniteError, match="3 bad steps in a row"):
        loop.run(make_groups(5, 1, {(step, 0): "loss" for step in range(5)}))
    assert loop.told()[-1][2:] == ("loss_nonfinite", "halted")


def test_a_failure_that_returns_goes_further_back_and_then_halts_with_the_last_good_state():
    loop = Loop().guarded(Policy(snapshot_steps=2, max_rewinds=2, autopsy=False))
    groups = make_groups(12, 1)
    loop.run(groups[:5])
    kept = [snapshot.step for snapshot in loop.guard.recovery.snapshots]
    assert kept == [2, 4]
    back_to = []
    for group in groups[5:7]:
        poison(loop)
        loop.step(group)
        back_to.append(loop.events[-1]["values"]["snapshot_step"])
    assert back_to == [4, 2]
    poison(loop)
    with pytest.raises(NonFiniteError, match=r"contains NaN.*rewound 2 times \(nanguard_max_rewinds\)"):
        loop.step(groups[7])
    assert loop.told()[-1][2:] == ("param_nonfinite", "halted")
    assert_same(loop.everything(), Loop().run(groups[:2]).everything())


@pytest.mark.parametrize(
    "policy",
    [Policy(max_rewinds=0), Policy(snapshot_steps=0), Policy(on_param_nonfinite="halt")],
    ids=lambda p: str(p)[:1],
)
def test_what_may_not_be_rewound_halts(policy):
    loop = Loop().guarded(policy)
    groups = make_groups(4, 1)
    loop.run(groups[:2])
    poison(loop)
    with pytest.raises(NonFiniteError, match="contains NaN"):
        loop.step(groups[2])
    assert loop.told()[-1][2:] == ("param_nonfinite", "halted")
    assert loop.model.first.weight.isnan().any()


def test_a_moment_that_is_not_finite_is_found_when_a_snapshot_is_due():
    groups = make_groups(8, 1)
    loop = Loop().guarded(Policy(snapshot_steps=3, weight_check_steps=0, autopsy=False)).run(groups[:3])
    loop.step(groups[3])  # takes a snapshot first
    loop.run(groups[4:6])
    poison(loop, "exp_avg")
    loop.run(groups[6:])
    assert [(e["step"], e["signal"], e["action"]) for e in loop.events] == [(6, "optimizer_nonfinite", "rewound")]
    assert_same(loop.everything(), Loop().run([*groups[:3], *groups[6:]]).everything())


def test_no_snapshot_is_taken_while_the_loss_spikes(monkeypatch):
    loop = Loop().guarded(EVERY_TWO)
    groups = make_groups(6, 1)
    loop.run(groups[:3])
    monkeypatch.setattr(type(loop.guard), "is_suspect", True)
    loop.run(groups[3:5])
    assert [each.step for each in loop.guard.recovery.snapshots] == [0, 2]
    monkeypatch.setattr(type(loop.guard), "is_suspect", False)
    loop.run(groups[5:])
    assert [each.step for each in loop.guard.recovery.snapshots] == [2, 5]


@pytest.mark.parametrize(("free", "kept"), [(None, 0), (0, 0), (15_000, 1), (10**9, 2)])
def test_snapshots_are_on_if_they_fit_into_a_tenth_of_the_free_memory(monkeypatch, caplog, free, kept):
    monkeypatch.setattr(rewind_to_snapshot, "find_free_share", lambda: free)
    loop = Loop().guarded()  # 65 parameters of 4 bytes, and two moments of each: 780 bytes
    with caplog.at_level(logging.INFO, "hf_nanguard"):
        loop.run(make_groups(1, 1))
    assert loop.guard.recovery.num_kept == kept
    assert ("snapshot, taken every 100 steps" if kept else "no snapshots are taken") in caplog.text


def count_reads(policy, num_groups=5):
    """Returns the host reads of each step after the first two."""
    loop = Loop().guarded(policy).run(make_groups(2, 1))
    reads = []
    for group in make_groups(num_groups, 1):
        with OperationCounter() as counter:
            loop.step(group)
        reads.append((counter.num_reads, counter.num_ops))
    return reads


def test_a_step_without_a_snapshot_costs_nothing():
    off = count_reads(Policy(snapshot_steps=0))
    assert count_reads(Policy()) == off
    some = count_reads(Policy(snapshot_steps=3))  # before the second of these steps and the fifth
    assert [one == other for one, other in zip(some, off, strict=True)] == [True, False, True, True, False]


def test_tied_weights_stay_tied():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(8, 8)
            self.third = nn.Linear(8, 8)
            self.third.weight = self.second.weight

        def forward(self, x):
            return self.last(self.third(self.second(torch.relu(self.first(x)))))

    loop = Loop(model=Tied()).guarded(EVERY_TWO)
    groups = make_groups(4, 1)
    loop.run(groups[:3])
    poison(loop)
    loop.run(groups[3:])
    assert loop.told()[-1][2:] == ("param_nonfinite", "rewound")
    assert loop.model.third.weight is loop.model.second.weight
    assert loop.model.third.weight is next(p for p in loop.optimizer.param_groups[0]["params"] if p.shape == (8, 8))


# ---- what is changed, so that the failure does not return ----


def rates(loop):
    return [loop.optimizer.param_groups[0]["lr"], *loop.scheduler.base_lrs, *loop.scheduler.get_last_lr()]


def test_the_rate_is_lower_after_a_rewind_until_the_next_snapshot():
    groups = make_groups(8, 1)
    plain, loop = Loop(), Loop().guarded(Policy(snapshot_steps=2, rewind_lr_factor=0.5, autopsy=False)).run(groups[:3])
    poison(loop)
    loop.step(groups[3])
    plain.run(groups[:2])
    assert rates(loop) == [rate / 2 for rate in rates(plain)]
    loop.run(groups[4:6])
    plain.run(groups[4:6])
    assert rates(loop) == [rate / 2 for rate in rates(plain)]
    loop.step(groups[6])  # after a snapshot
    plain.step(groups[6])
    assert rates(loop) == pytest.approx(rates(plain))


class Exploding(Loop):
    """A loss that is not finite once the weights have grown, whatever the batch."""

    def loss(self, batch):
        return super().loss(batch) + torch.exp(self.model.last.weight.abs().max() * 100)


def test_bad_steps_that_are_finite_with_earlier_weights_lower_the_rate():
    loop = Exploding().guarded(Policy(snapshot_steps=2, max_bad_steps=2, autopsy=False))
    groups = make_groups(7, 2)
    loop.run(groups[:3])
    with torch.no_grad():
        loop.model.last.weight.fill_(50.0)
    loop.run(groups[3:5])
    event = loop.events[-1]
    assert (event["action"], event["values"]["applied"]) == ("rewound", "smaller_lr")
    plain = Exploding().run(groups[:2])
    assert rates(loop) == pytest.approx([rate / 10 for rate in rates(plain)])
    assert_same(loop.everything(), plain.everything())


def explode(loop, groups):
    with torch.no_grad():
        loop.model.last.weight.fill_(50.0)
    loop.run(groups)


def test_a_rate_that_is_still_too_high_is_lowered_further():
    loop = Exploding().guarded(Policy(snapshot_steps=10, max_bad_steps=2, max_rewinds=4, autopsy=False))
    groups = make_groups(7, 2)
    for _ in range(3):
        loop.run(groups[:5])
        explode(loop, groups[5:])
    loop.run(make_groups(12, 2))  # with a snapshot, before which the rate was right
    explode(loop, groups[5:])
    rewinds = [event for event in loop.events if event["action"] == "rewound"]
    assert [event["message"].rpartition("divided by ")[2] for event in rewinds] == ["10.", "100.", "10,000.", "10."]
    assert loop.scheduler.base_lrs == pytest.approx([0.05 * 1e-8])


def test_a_batch_that_threw_the_weights_away_late_in_a_run_says_little_about_the_rate():
    loop = Exploding().guarded(Policy(snapshot_steps=4, max_bad_steps=2, autopsy=False))
    groups = make_groups(8, 2)
    loop.run(groups[:5])
    with torch.no_grad():
        loop.model.last.weight.mul_(1e9)
    loop.run(groups[5:7])
    [event] = [event for event in loop.events if event["action"] == "rewound"]
    assert event["values"]["lost_updates"] == 1
    assert event["message"].endswith("The learning rate was divided by 10.")


@pytest.mark.parametrize("rate", [1e6, 1e12, 1e20])
def test_a_rate_that_is_absurd_needs_one_rewind(rate):
    """The first update throws the weights far away, and every batch is non-finite after it."""
    loop = Exploding("adamw").guarded(Policy(max_bad_steps=2, autopsy=False))
    for group in loop.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = rate
    loop.scheduler.base_lrs = [rate]
    before = loop.optimizer.param_groups[0]["lr"]
    loop.run(make_groups(20, 1))
    [event] = [event for event in loop.events if event["action"] == "rewound"]
    assert event["values"]["applied"] == "smaller_lr"
    assert "The learning rate was divided by" in event["message"]
    assert loop.optimizer.param_groups[0]["lr"] < before / rate


def test_a_rate_that_is_absurd_is_lowered_for_the_end_of_its_warm_up():
    divisors = {}
    for length in (1, 100):
        loop = Exploding("adamw").guarded(Policy(max_bad_steps=2, autopsy=False))
        for group in loop.optimizer.param_groups:
            group["lr"], group["initial_lr"] = 1e9 / length, 1e9
        loop.scheduler.base_lrs = [1e9]
        loop.scheduler.lr_lambdas = [lambda step, length=length: min(1.0, (step + 1) / length)]
        loop.run(make_groups(4, 1))
        assert [event["action"] for event in loop.events].count("rewound") == 1
        divisors[length] = 1e9 / loop.scheduler.base_lrs[0]
    assert divisors[100] == pytest.approx(divisors[1], rel=0.6)


def test_bad_steps_that_stay_bad_do_not():
    loop = Loop().guarded(Policy(snapshot_steps=2, max_bad_steps=2, autopsy=False))
    loop.run(make_groups(7, 1, {(3, 0): "loss", (4, 0): "loss"}))
    assert loop.events[-1]["values"]["applied"] is None
    assert loop.scheduler.base_lrs == [0.05]


def test_an_eps_that_underflows_is_raised_and_stays_so():
    loop = Loop(model=Net(torch.float16)).guarded(Policy(autopsy=False))
    groups = [[replace(batch, x=batch.x.half(), y=batch.y.half()) for batch in group] for group in make_groups(30, 1)]
    loop.run(groups)
    assert [e["values"]["applied"] for e in loop.events if e["action"] == "rewound"] == ["larger_eps"]
    assert loop.optimizer.param_groups[0]["eps"] == 1e-4
    assert not any(parameter.isnan().any() for parameter in loop.model.parameters())


# ---- spikes and divergence ----


def test_a_norm_that_spikes_rewinds_if_the_policy_says_so():
    groups = make_groups(64, 1, {(60, 0): {"fault": "loss", "value": 1e3}})
    loop = Loop("sgd", clip=None).guarded(Policy(on_spike="rewind", snapshot_steps=55)).run(groups)
    assert [(e["step"], e["signal"], e["action"]) for e in loop.events] == [(60, "grad_spike", "rewound")]
    assert loop.events[0]["values"]["applied"] is None
    assert_same(loop.everything(), Loop("sgd", clip=None).run([*groups[:55], *groups[61:]]).everything())


def test_without_a_snapshot_a_spike_is_skipped():
    groups = make_groups(64, 1, {(60, 0): {"fault": "loss", "value": 1e3}})
    loop = Loop("sgd", clip=None).guarded(Policy(on_spike="rewind", snapshot_steps=0)).run(groups)
    assert [(e["step"], e["signal"], e["action"]) for e in loop.events] == [(60, "grad_spike", "skipped")]
    assert_same(loop.everything(), Loop("sgd", clip=None).run([*groups[:60], *groups[61:]]).everything())


class Growing(Loop):
    """A loss that grows with the number of steps while the weights are those of late steps."""

    def loss(self, batch):
        return super().loss(batch) * (1e3 if self.model.last.weight[0, 0] > 5 else 1.0)


def test_a_loss_that_diverges_goes_back_to_before_it_began_at_a_lower_rate():
    groups = make_groups(90, 1)
    loop = Growing("sgd").guarded(Policy(on_spike="rewind", snapshot_steps=20, max_rewinds=1))
    loop.run(groups[:45])
    with torch.no_grad():
        loop.model.last.weight[0, 0] = 100.0  # finite, and far away
    loop.run(groups[45:])
    [event] = [e for e in loop.events if e["action"] == "rewound"]
    assert (event["signal"], event["values"]["snapshot_step"]) == ("loss_diverged", 40)
    assert event["values"]["applied"] == "smaller_lr"
    assert loop.model.last.weight.abs().max() < 5


def test_a_divergence_is_only_observed_by_default():
    groups = make_groups(90, 1)
    loop = Growing("sgd").guarded(Policy(snapshot_steps=20)).run(groups[:45])
    with torch.no_grad():
        loop.model.last.weight[0, 0] = 100.0
    loop.run(groups[45:])
    assert "loss_diverged" in {e["signal"] for e in loop.events}
    assert {e["action"] for e in loop.events} == {"observed"}


def test_a_snapshot_that_cannot_be_taken_is_left_out(monkeypatch):
    """The one it would have been written into is gone; the run goes on and takes the next one when it is due."""
    groups, tries = make_groups(9, 2), []
    take = rewind_to_snapshot.Snapshot.take

    def failing(step, *args):
        tries.append(step)
        if step == 4:
            raise MemoryError("planted")
        return take(step, *args)

    monkeypatch.setattr(rewind_to_snapshot.Snapshot, "take", failing)
    loop = Loop("adamw").guarded(EVERY_TWO)
    loop.run(groups[:5])
    poison(loop)
    loop.run(groups[5:])
    assert tries == [0, 2, 4, 8]  # a period after the rewind
    signals = [(event["signal"], event["action"]) for event in loop.events]
    assert signals[0] == ("guard_failed", "observed")
    assert signals[-1] == ("param_nonfinite", "rewound")
    assert loop.events[-1]["values"]["snapshot_step"] == 2
