"""A monitor that fails says so and ends nobody's run."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.base import Hook, Monitor
from hf_nanguard.core.monitors.monitor_set import MonitorSet
from hf_nanguard.core.ranks import FAILED, Ranks

CALLS = ("begin_step", "end_backward", "before_update", "after_update", "metrics", "state_dict")


class Broken(Monitor):
    """Raises in one of its calls."""

    def __init__(self, call, journal):
        super().__init__(nn.Module(), journal, 1)
        self.is_closed = False
        setattr(self, call, self.fail)

    def fail(self, *args):
        raise RuntimeError("no kernel for that")

    def close(self):
        self.is_closed = True


class Sound(Monitor):
    def after_update(self, step):
        return "a reason"

    def metrics(self):
        return {"nanguard/sound": 1.0}


def _walk(monitor_set):
    """Takes monitors through a step; returns its reason to halt, its metrics and its state."""
    monitor_set.begin_step(3)
    monitor_set.end_backward()
    monitor_set.before_update()
    return monitor_set.after_update(), monitor_set.metrics(), monitor_set.state_dict()


@pytest.mark.parametrize("call", CALLS)
def test_a_monitor_that_fails_is_off_and_the_others_go_on(call):
    events = []
    journal = Journal(Ranks(), events.append)
    broken = Broken(call, journal)
    monitor_set = MonitorSet(journal)
    monitor_set.begin((broken, Sound(nn.Module(), journal, 1)))
    broken.is_closed = False
    _walk(monitor_set)  # here it fails
    assert _walk(monitor_set) == ("a reason", {"nanguard/sound": 1.0}, {"Sound": {}})
    [event] = events
    assert (event["signal"], event["action"]) == ("guard_failed", "observed")
    assert "Broken failed" in event["message"]
    assert "no kernel for that" in event["message"]
    assert broken.is_closed


class Exchanging(Broken):
    """Exchanges something at the end of every step."""

    def end_backward(self, step):
        self.ranks.agree()

    def fail_exchange(self, stage, step):
        if stage == "end_backward":
            self.ranks.fail()


class SeveralRanks(Ranks):
    """Notes what is exchanged, with nobody."""

    def __init__(self):
        super().__init__()
        self.size, self.sent = 2, []

    def _reduce(self, number):
        self.num_exchanges += 1
        self.sent.append(number)
        return number


@pytest.mark.parametrize("call", ["begin_step", "end_backward", "after_update"])
def test_among_several_ranks_the_next_exchange_fails(call):
    """The others wait for the message of this rank, and turn the monitor off when it comes."""
    journal = Journal(SeveralRanks())
    monitor_set = MonitorSet(journal)
    monitor_set.begin((Exchanging(call, journal),))
    _walk(monitor_set)
    assert journal.ranks.sent == ([0] if call == "after_update" else [FAILED])
    _walk(monitor_set)
    assert journal.ranks.sent[1:] == ([FAILED] if call == "after_update" else [])
    assert monitor_set.monitors == monitor_set.failed == ()


def test_a_monitor_that_failed_on_another_rank_is_turned_off():
    journal = Journal(SeveralRanks())

    def fail(number):
        journal.ranks.num_exchanges += 1
        return FAILED

    journal.ranks._reduce = fail
    monitor_set = MonitorSet(journal)
    monitor_set.begin((Exchanging("state_dict", journal),))
    _walk(monitor_set)
    assert monitor_set.monitors == monitor_set.failed == ()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_monitor_that_cannot_be_closed_leaves_no_hook(error):
    class Unclosable(Monitor):
        def close(self):
            raise error

    module = nn.Linear(2, 2)
    monitor_set = MonitorSet(Journal(Ranks()))
    monitor = Unclosable(module, monitor_set.journal, 1)
    monitor_set.begin((monitor,))
    monitor.hooks.enter_context(module.register_forward_hook(Hook(lambda *args: None)))
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
        monitor_set.close()
    assert not module._forward_hooks


def test_a_state_of_another_version_starts_anew(caplog):
    class Strict(Monitor):
        def load_state_dict(self, state):
            state["count"]

    monitor_set = MonitorSet(Journal(Ranks()))
    monitor_set.load_state_dict({"Strict": {}})
    monitor_set.begin((Strict(nn.Module(), monitor_set.journal, 1),))
    assert "the state of Strict is not readable" in caplog.text
    assert len(monitor_set.monitors) == 1


def test_copies_of_a_watched_module_are_not_watched():
    seen = []
    module = nn.Linear(2, 2)
    handle = module.register_forward_hook(Hook(lambda *args: seen.append(args)))
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    handle.remove()
    for each in copies:
        each(torch.ones(1, 2))
    assert seen == []
