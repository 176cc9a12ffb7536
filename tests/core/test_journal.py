"""The journal: every event reaches the sink, the first of a kind is loud, a halt always is, rank 0 hears of all."""

import json
import logging
import threading

import pytest

from hf_nanguard.core.event import Culprit, Event
from hf_nanguard.core.journal import Journal
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.core.vocabulary import Action, Signal
from hf_nanguard.testing import NAN


def _event(signal=Signal.GRAD_NONFINITE, action=Action.DROPPED, message="a gradient went bad", step=3, **fields):
    return Event(step, signal, action, message, **fields)


def _written(journal, *events):
    for event in events:
        journal.write(event)


def _levels(caplog):
    return [record.levelno for record in caplog.records]


@pytest.fixture(autouse=True)
def everything_is_captured(caplog):
    caplog.set_level(logging.DEBUG, "hf_nanguard")


def test_every_event_reaches_the_sink_as_the_public_schema_has_it():
    told = []
    first = _event(micro_step=1, values={"loss": NAN}, culprit=Culprit(phase="loss", rows=[4, 5]))
    second = _event()
    _written(Journal(Ranks(alone=True), told.append), first, second)
    assert told == [{**first.as_dict(), "rank": 0}, {**second.as_dict(), "rank": 0}]
    assert json.loads(json.dumps(told[0], allow_nan=False)) == told[0]


def test_an_event_has_the_rank_of_its_journal_unless_it_names_another():
    ranks, told = Ranks(alone=True), []
    ranks.rank = 2
    _written(Journal(ranks, told.append), _event(), _event(rank=1))
    assert [event["rank"] for event in told] == [2, 1]


def test_the_first_of_a_signal_is_a_warning_and_later_ones_are_not(caplog):
    journal = Journal(Ranks(alone=True))
    _written(journal, _event(), _event(), _event(Signal.LOSS_NONFINITE), _event(Signal.LOSS_NONFINITE, Action.SKIPPED))
    assert _levels(caplog) == [logging.WARNING, logging.INFO, logging.WARNING, logging.INFO]


@pytest.mark.parametrize("action", [Action.HALTED, Action.REWOUND])
def test_a_halt_and_a_rewind_are_always_loud(action, caplog):
    journal = Journal(Ranks(alone=True))
    _written(journal, _event(), _event(action=action), _event(action=action), _event())
    assert _levels(caplog) == [logging.WARNING, logging.WARNING, logging.WARNING, logging.INFO]


def test_two_journals_do_not_share_what_they_have_told(caplog):
    _written(Journal(Ranks(alone=True)), _event())
    _written(Journal(Ranks(alone=True)), _event())
    assert _levels(caplog) == [logging.WARNING, logging.WARNING]


def test_the_line_names_signal_action_and_message(caplog):
    _written(Journal(Ranks(alone=True)), _event(Signal.LABELS_MASKED, Action.SKIPPED, "all 100% of labels are masked"))
    assert [record.getMessage() for record in caplog.records] == [
        "[labels_masked] skipped: all 100% of labels are masked"
    ]


def test_without_a_sink_the_log_still_tells(caplog):
    _written(Journal(Ranks(alone=True)), _event())
    assert len(caplog.records) == 1


# ---- several ranks ----


class ThreadRanks(Ranks):
    """Ranks that are threads of one process: messages are JSON, as between processes."""

    def __init__(self, rank, size, board, barrier):
        super().__init__(alone=True)
        self.rank, self.size, self.board, self.barrier = rank, size, board, barrier

    def gather(self, fact):
        self.board[self.rank] = json.dumps(fact)
        self.barrier.wait(timeout=10)
        found = [json.loads(text) for text in self.board]
        self.barrier.wait(timeout=10)
        return found


def _on_ranks(size, act):
    """Runs `act(journal, rank)` on every rank at once; returns what each rank's sink got."""
    board, barrier = [None] * size, threading.Barrier(size)
    told = [[] for _ in range(size)]
    threads = [
        threading.Thread(
            target=lambda rank=rank: act(Journal(ThreadRanks(rank, size, board, barrier), told[rank].append), rank)
        )
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return told


def test_rank_0_writes_the_events_of_all_and_the_others_their_own():
    events = [
        [_event(rank=0, message="zero")],
        [_event(rank=1, message="one"), _event(rank=1, message="uno")],
        [],
    ]
    told = _on_ranks(3, lambda journal, rank: journal.write_shared(events[rank]))
    assert [[event["message"] for event in rank] for rank in told] == [["zero", "one", "uno"], ["one", "uno"], []]
    assert [event["rank"] for event in told[0]] == [0, 1, 1]


def test_what_is_the_same_on_all_ranks_is_written_by_rank_0_only():
    told = _on_ranks(3, lambda journal, rank: journal.write_once(_event(rank=rank)))
    assert [len(rank) for rank in told] == [1, 0, 0]


def test_what_a_rank_writes_by_itself_stays_with_it():
    told = _on_ranks(2, lambda journal, rank: journal.write(_event(rank=rank)) if rank == 1 else None)
    assert [len(rank) for rank in told] == [0, 1]
