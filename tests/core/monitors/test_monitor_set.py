"""The monitors of a run: called in order, never for a step that is not taken, their state kept until they are there."""

import pytest
from torch import nn

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.base import EARLY, Monitor
from hf_nanguard.core.monitors.monitor_set import MonitorSet
from hf_nanguard.core.ranks import Ranks

JOURNAL = Journal(Ranks(alone=True))


def walk(*monitors):
    """A set of these monitors."""
    monitor_set = MonitorSet(JOURNAL)
    monitor_set.begin(monitors)
    return monitor_set


class Diary(Monitor):
    """Writes down what it is asked."""

    def __init__(self, reason=None):
        super().__init__(nn.Module(), JOURNAL, 1)
        self.calls, self.reason, self.state = [], reason, None

    def begin_step(self, step):
        self.calls.append(("begin", step))

    def end_backward(self, step):
        self.calls.append(("backward", step))

    def before_update(self, step):
        self.calls.append(("before", step))

    def after_update(self, step):
        self.calls.append(("after", step))
        return self.reason

    def close(self):
        self.calls.append(("close", None))

    def metrics(self):
        return {"nanguard/pages": float(len(self.calls))}

    def state_dict(self):
        return {"pages": 3}

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(("period", "due"), [(0, []), (1, range(60)), (7, [6, 13, 20, 27, 34, 41, 48, 55])])
def test_when_a_monitor_looks(period, due):
    early = {step - 1 for step in EARLY} if period else set()
    assert [step for step in range(60) if Monitor(nn.Module(), JOURNAL, period).is_due(step)] == sorted({*due, *early})
    assert [step for step in range(60) if Monitor(nn.Module(), JOURNAL, period, early=()).is_due(step)] == list(due)


def test_a_step_in_order():
    diary = Diary()
    monitor_set = walk(diary)
    monitor_set.begin_step(4)
    monitor_set.end_backward()
    monitor_set.before_update()
    assert monitor_set.after_update() is None
    assert monitor_set.after_update() is None  # the end of an epoch asks once more
    assert diary.calls == [("begin", 4), ("backward", 4), ("before", 4), ("after", 4)]


def test_a_step_that_is_skipped_has_no_update():
    diary = Diary("bad")
    monitor_set = walk(diary)
    monitor_set.begin_step(0)
    monitor_set.end_backward()
    assert monitor_set.after_update() is None
    assert diary.calls == [("begin", 0), ("backward", 0)]


def test_every_monitor_is_heard_and_the_first_reason_counts():
    diaries = Diary(), Diary("this"), Diary("that")
    monitor_set = walk(*diaries)
    monitor_set.begin_step(0)
    monitor_set.before_update()
    assert monitor_set.after_update() == "this"
    assert all(diary.calls[-1] == ("after", 0) for diary in diaries)


def test_nothing_is_asked_before_the_first_step():
    diary = Diary()
    monitor_set = walk(diary)
    monitor_set.end_backward()
    monitor_set.before_update()
    assert monitor_set.after_update() is None
    assert diary.calls == []


def test_state_waits_for_the_monitors():
    monitor_set = MonitorSet(JOURNAL)
    monitor_set.load_state_dict({"Diary": {"pages": 3}, "Gone": {}})
    diary = Diary()
    monitor_set.begin((diary,))
    assert diary.state == {"pages": 3}
    assert monitor_set.state_dict() == {"Diary": {"pages": 3}}
    monitor_set.load_state_dict({"Diary": {"pages": 4}})
    assert diary.state == {"pages": 4}
