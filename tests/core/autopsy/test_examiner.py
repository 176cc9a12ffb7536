"""The examination as a whole, through the guard of a hand-written loop: order, budget, bounds, and that it costs no run."""

import json
import logging
from inspect import getsourcelines

import pytest
import torch
from torch import nn

from hf_nanguard.core.autopsy import examiner as module
from hf_nanguard.core.autopsy.examiner import Budget
from hf_nanguard.core.rerun.runner import LoopRunner
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.guard import Guard
from hf_nanguard.testing import NAN

POISON = 9.0


class Net(nn.Module):
    """Takes the logarithm of zero for a sample that begins with `POISON`, and for no other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        bad = (x[..., :1] == POISON).float()
        hidden = self.drop(self.first(x))
        return self.last(hidden + torch.log(1.0 - bad))


LINE = next(i for i, line in enumerate(getsourcelines(Net)[0]) if "torch.log" in line) + getsourcelines(Net)[1]


class Loop:
    """Six steps of two micro-batches; `faults` maps a step to the samples of its second micro-batch that are bad."""

    def __init__(self, faults=None, policy=None, folder=None, loss=None, steps=6):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.events = []
        self.runs = 0
        self.loss = loss or self.plain_loss
        self.guard = Guard(self.model, self.optimizer, policy, on_event=self.events.append, folder=folder)
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            batches = [torch.randn(4, 4, generator=generator) for _ in range(2)]
            for sample in (faults or {}).get(step, ()):
                batches[1][sample, 0] = POISON
            self.guard.step(lambda batch: self.count(batch), batches)

    def count(self, batch):
        self.runs += 1
        return self.loss(self.model, batch)

    @staticmethod
    def plain_loss(model, batch):
        return model(batch).square().mean()

    @property
    def state(self):
        named = [*self.model.state_dict().items()]
        named += [(f"{i}.{k}", v) for i, s in enumerate(self.optimizer.state.values()) for k, v in s.items()]
        return {**dict(named), "rng": torch.get_rng_state()}

    def blocks(self, caplog):
        return [record.message for record in caplog.records if "---- autopsy" in record.message]


def _assert_same(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_the_event_names_sample_operator_line_and_cause_and_the_run_has_no_trace(caplog):
    loop = Loop({2: [3]})
    [event] = loop.events
    assert event["action"] == "dropped"
    assert event["cause"] == "log_of_zero"
    culprit = event["culprit"]
    assert (culprit["op"], culprit["module"], culprit["phase"]) == ("aten.log.default", "", "forward")
    assert culprit["source"] == f"test_examiner.py:{LINE}"
    assert culprit["samples"] == [3]
    assert event["values"]["autopsy"]["scope"] == "samples"
    assert event["values"]["autopsy"]["reproducible"] is True
    assert {"drop_rows"} <= {remedy["name"] for remedy in event["remedies"] if remedy["works"]}
    assert all(remedy["tried"] for remedy in event["remedies"])
    [block] = loop.blocks(caplog)
    assert len(block.splitlines()) <= 15
    _assert_same(loop.state, Loop({2: [3]}, Policy(autopsy=False)).state)


def test_without_autopsies_nothing_more_is_run():
    loop = Loop({2: [3]}, Policy(autopsy=False))
    assert loop.runs == 12 + 2 + 1  # each alone, then the good one
    [event] = loop.events
    assert (event["cause"], event["remedies"], event["bundle"]) == (None, [], None)
    assert "autopsy" not in event["values"]


def test_a_healthy_run_runs_nothing_again():
    assert Loop().runs == 12


@pytest.mark.parametrize("on_nonfinite", ["skip", "repair", "floor"])
def test_every_policy_gets_an_explanation(on_nonfinite):
    policy = Policy(on_nonfinite=on_nonfinite)
    loop = Loop({2: [3]}, policy)
    [event] = loop.events
    assert (event["cause"], event["culprit"]["samples"]) == ("log_of_zero", [3])
    _assert_same(loop.state, Loop({2: [3]}, Policy(on_nonfinite=on_nonfinite, autopsy=False)).state)


def test_observing_explains_and_changes_nothing():
    loop = Loop({5: [3]}, Policy(mode="observe"))
    [event] = loop.events
    assert (event["action"], event["cause"], event["culprit"]["samples"]) == ("observed", "log_of_zero", [3])
    plain = Loop({5: [3]}, Policy(mode="off"))
    for name, value in plain.state.items():
        assert torch.equal(value.nan_to_num(7.0), loop.state[name].nan_to_num(7.0)), name


def test_a_bad_loss_with_finite_gradients_is_explained():
    def loss(model, batch):
        clean = torch.where(batch == POISON, 0.0, batch)
        return model(clean).square().mean() + (1.0 - (batch == POISON).float()).log().sum().detach()

    loop = Loop({2: [1]}, loss=loss)
    [event] = loop.events
    assert (event["action"], event["cause"]) == ("dropped", "log_of_zero")
    assert (event["culprit"]["phase"], event["culprit"]["samples"]) == ("loss", [1])
    _assert_same(loop.state, Loop({2: [1]}, Policy(autopsy=False), loss=loss).state)


def test_one_fault_is_examined_once_and_located_ever_after(caplog, tmp_path):
    loop = Loop({1: [3], 3: [0], 4: [2]}, folder=tmp_path)
    assert [event["culprit"]["op"] for event in loop.events] == ["aten.log.default"] * 3
    assert [event["bundle"] for event in loop.events] == ["autopsy/step-1"] * 3
    assert [event["values"]["autopsy"]["scope"] for event in loop.events] == ["samples", "untried", "untried"]
    assert [event["culprit"]["samples"] for event in loop.events] == [[3], [0], [2]]  # seen there
    assert len(loop.blocks(caplog)) == 1
    assert [path.name for path in (tmp_path / "autopsy").iterdir()] == ["step-1"]


def test_the_number_of_autopsies_is_bounded(caplog, tmp_path):
    lines = [lambda x: x.log(), lambda x: x.log10(), lambda x: x.log2()]
    step = -1

    def loss(model, batch):
        out = model(torch.where(batch == POISON, 0.0, batch)).square().mean()
        found = (batch == POISON).any(0).nonzero()
        return out + (lines[int(found[0])](out * 0.0) if len(found) else 0.0)

    class Many(Loop):
        def count(self, batch):
            nonlocal step
            if not self.guard.replaying and (step := step + 1) % 2:
                batch[0, (step // 2) % 3] = POISON
            return super().count(batch)

    loop = Many(policy=Policy(max_autopsies=2), folder=tmp_path, loss=loss)
    assert len(loop.events) == 6
    assert len(loop.blocks(caplog)) == 2
    assert len(list((tmp_path / "autopsy").iterdir())) == 2
    ops = [event["culprit"]["op"] for event in loop.events]
    assert ops[:3] == ["aten.log.default", "aten.log10.default", "aten.log2.default"]  # the third is still located
    loop = Many(policy=Policy(max_autopsies=1, max_bad_steps=100), loss=loss, steps=8)
    assert [event["culprit"]["op"] is not None for event in loop.events] == [True] * 4 + [False] * 4


def test_what_the_budget_does_not_reach_is_marked_untried(monkeypatch):
    monkeypatch.setattr(Budget, "allowed", lambda self: False)
    [event] = Loop({2: [3]}).events
    assert (event["culprit"]["op"], event["culprit"]["samples"]) == ("aten.log.default", [3])
    assert event["values"]["autopsy"]["scope"] == "untried"
    assert event["values"]["autopsy"]["reproducible"] is None
    assert event["remedies"]
    assert all((remedy["tried"], remedy["works"]) == (False, None) for remedy in event["remedies"])


def test_a_long_examination_says_what_it_is_doing(monkeypatch, caplog):
    clock = iter(range(0, 100_000, 3))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    Loop({2: [3]}, Policy(autopsy_seconds=1000.0))
    told = [record.message for record in caplog.records if "autopsy of step 2:" in record.message]
    assert any("samples" in line for line in told)
    assert any("remedies" in line for line in told)
    assert all("(" in line for line in told)


def test_a_long_trace_says_so_too(monkeypatch, caplog):
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    find = module.SuspectBatch.find_origin

    def slow(self, *args):
        module.time.sleep(0.2)
        return find(self, *args)

    monkeypatch.setattr(module.SuspectBatch, "find_origin", slow)
    Loop({2: [3]})
    assert any("autopsy of step 2: looking for the origin" in record.message for record in caplog.records)


def test_a_fault_that_comes_only_now_and_then_is_transient():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        out = model(torch.where(batch == POISON, 0.0, batch)).square().mean()
        if (batch == POISON).any():
            calls += 1
            return out * NAN if calls <= 2 else out  # in the step and alone, then never again
        return out

    [event] = Loop({2: [3]}, loss=loss).events
    assert (event["action"], event["cause"]) == ("dropped", "transient")


# ---- what goes wrong in here costs the explanation, never the run ----


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), KeyError("x")]
)
def test_a_failing_replay_is_an_event(error, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(module.SuspectBatch, "find_origin", fail)
    loop = Loop({2: [3]})
    failed, event = loop.events
    assert (failed["signal"], failed["action"], failed["step"]) == ("guard_failed", "observed", 2)
    assert type(error).__name__ in failed["message"] or "out of memory" in failed["message"]
    assert (event["action"], event["cause"]) == ("dropped", None)
    monkeypatch.undo()
    _assert_same(loop.state, Loop({2: [3]}, Policy(autopsy=False)).state)


def test_a_bundle_that_cannot_be_written_is_an_event(tmp_path):
    (tmp_path / "autopsy").write_text("a file in the way")
    loop = Loop({2: [3]}, folder=tmp_path)
    failed, event = loop.events
    assert failed["signal"] == "guard_failed"
    assert failed["message"].startswith("bundle failed at ")
    assert (event["cause"], event["bundle"]) == ("log_of_zero", None)
    _assert_same(loop.state, Loop({2: [3]}, Policy(autopsy=False)).state)


def test_ctrl_c_in_an_autopsy_leaves_the_event(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.SuspectBatch, "find_origin", interrupt)
    events = []
    torch.manual_seed(0)
    model = Net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), on_event=events.append)
    bad = torch.full((4, 4), POISON)
    with pytest.raises(KeyboardInterrupt):
        guard.step(lambda batch: model(batch).sum(), [bad])
    assert [event["signal"] for event in events] == ["loss_nonfinite"]
    assert not guard.replaying


def test_an_update_that_ruined_a_weight_is_named():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    events = []
    guard = Guard(model, optimizer, Policy(on_halt="stop", max_rewinds=0), on_event=events.append)
    batch = torch.randn(4, 4)
    guard.step(lambda x: model(x).square().mean(), [batch])
    optimizer.state[model.last.weight]["exp_avg"][0, 1] = NAN
    guard.step(lambda x: model(x).square().mean(), [batch])  # finite loss, finite gradients, and the weight is gone
    assert events == []
    outcome = guard.step(lambda x: model(x).square().mean(), [batch])
    assert outcome.halt is not None
    skipped, halted = events
    assert (skipped["cause"], skipped["culprit"]["parameter"]) == ("optimizer_state", "last.weight")
    assert (halted["signal"], halted["cause"]) == ("param_nonfinite", "optimizer_state")
    assert halted["culprit"]["phase"] == "optimizer"
    assert "exp_avg" in halted["message"]


def test_events_stay_strict_json(tmp_path):
    [event] = Loop({2: [3]}, folder=tmp_path).events
    assert event["values"]["loss"] == "nan"
    assert json.loads(json.dumps(event, allow_nan=False)) == event


@pytest.fixture(autouse=True)
def _warnings_only(caplog):
    caplog.set_level(logging.WARNING)


def test_a_tokenizer_that_fails_costs_the_text_and_nothing_else(monkeypatch):
    def decode(self, micro, sample):
        raise OverflowError("out of range integral type conversion attempted")

    monkeypatch.setattr(LoopRunner, "decode", decode)
    [event] = Loop({2: [3]}).events
    assert event["culprit"]["op"] == "aten.log.default"
    assert event["culprit"]["samples"] == [3]


def test_what_is_bad_only_as_compiled_is_neither_transient_nor_told_every_time(caplog):
    def backend(graph, inputs):
        return lambda *args: tuple(out * NAN if args[-1].sum() > 500 else out for out in graph(*args))

    def loss(model, batch):
        return torch.compile(lambda x: model.last(x).square().mean(), backend=backend)(batch)

    loop = Loop(loss=lambda model, batch: loss(model, batch), steps=0)
    bad = torch.full((4, 4), 100.0)
    for _ in range(3):
        loop.guard.step(lambda batch: loop.count(batch), [torch.ones(4, 4), bad])
    assert [event["cause"] for event in loop.events] == ["unknown"] * 3
    assert len(loop.blocks(caplog)) == 1
    assert "torch.compile" in loop.blocks(caplog)[0]


def test_a_bad_buffer_that_is_put_back_is_named_itself():
    """A NaN is not equal to itself, so it would be put back, and the guard's own copy be blamed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval().running_mean[2] = NAN
    events = []
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), on_event=events.append)
    for _ in range(2):
        guard.step(lambda batch: model(batch).square().mean(), [torch.randn(4, 4)])
    for event in events:
        assert (event["culprit"]["phase"], event["culprit"]["parameter"]) == ("parameter", "1.running_mean")
        assert event["cause"] == "param_nonfinite"
    assert len(events) == 2
