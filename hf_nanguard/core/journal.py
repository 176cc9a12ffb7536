"""The journal of a run: events go to the sink, the first of each kind to the log, and rank 0 hears of every decision."""

import logging
import math
from collections.abc import Callable
from typing import Any

from .event import Culprit, Event
from .ranks import Ranks
from .rerun.micro_batch import AccumulationGroup
from .vocabulary import Action, Signal

logger = logging.getLogger("hf_nanguard")

EventSink = Callable[[dict[str, Any]], None]


class Journal:
    """Writes events.

    Args:
        ranks (`Ranks`):
            The processes that train together.
        on_event (`Callable`, *optional*):
            Called with every event as a dictionary of the public schema.
    """

    def __init__(self, ranks: Ranks, on_event: EventSink | None = None):
        self.ranks = ranks
        self.on_event = on_event
        self.told: set[Signal] = set()

    def write(self, event: Event) -> None:
        """Writes an event of this rank."""
        self._write(event.as_dict())

    def write_once(self, event: Event) -> None:
        """Writes an event that is the same on every rank, on rank 0 only."""
        if self.ranks.rank == 0:
            self.write(event)

    def share(self, events: list[Event]) -> None:
        """Writes this rank's events and, on rank 0, those of all others. Every rank must call it."""
        for rank, dicts in enumerate(self.ranks.gather([event.as_dict() for event in events])):
            if rank == self.ranks.rank or self.ranks.rank == 0:
                for event in dicts:
                    self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        if self.on_event is not None:
            self.on_event(event)
        signal = Signal(event["signal"])
        loud = signal not in self.told or event["action"] == Action.HALTED
        self.told.add(signal)
        logger.log(logging.WARNING if loud else logging.INFO, "[%s] %s: %s", signal, event["action"], event["message"])


def tell_watched(journal: Journal, group: AccumulationGroup, watched: list[float], step: int) -> None:
    """Writes an event for every watched tensor that is not finite or exceeds its bound.

    Args:
        journal (`Journal`):
            Where to.
        group (`AccumulationGroup`):
            The group in which the tensors were watched.
        watched (`list[float]`):
            Their largest magnitudes, as read.
        step (`int`):
            The step.
    """
    for (name, _, bound), largest in zip(group.watched, watched, strict=True):
        if math.isfinite(largest) and (bound is None or largest <= bound):
            continue
        what = f"exceeds its bound of {bound}" if math.isfinite(largest) else "is not finite"
        message = f"{name} {what} at step {step} (largest magnitude {largest})"
        values = {"largest": largest, "bound": bound}
        culprit = Culprit(phase="forward", term=name)
        rank = journal.ranks.rank
        journal.write(Event(step, Signal.PREDICTION_NONFINITE, Action.OBSERVED, message, None, rank, values, culprit))


def tell_bad_terms(
    journal: Journal, group: AccumulationGroup, losses: list[float], step: int, skipped: bool = False
) -> None:
    """Writes an event for every term that is not finite and that no event of the step as a whole tells of.

    Args:
        journal (`Journal`):
            Where to.
        group (`AccumulationGroup`):
            The group, with its terms as read.
        losses (`list[float]`):
            Its losses, if they were read: one that is not finite is told of with its terms.
        step (`int`):
            The step.
        skipped (`bool`, *optional*, defaults to `False`):
            Whether the step was skipped.
    """
    for micro in group.micro_batches:
        told = micro.index < len(losses) and not math.isfinite(losses[micro.index])
        for name in micro.bad_terms:
            drops = all(term.drops for term in micro.terms if term.name == name and term.is_bad)
            if told and not drops:
                continue
            action = Action.SKIPPED if skipped else Action.DROPPED if drops else Action.OBSERVED
            rest = "the loss goes on without it" if action is Action.DROPPED else "the gradients are finite"
            rest = "the step was skipped" if skipped else rest
            message = f"{name} is {micro.term_values[name]} in micro-batch {micro.index} of step {step}; {rest}"
            values = {"terms": micro.term_values}
            culprit = Culprit(phase="loss", term=name, rows=micro.rows)
            rank = journal.ranks.rank
            journal.write(Event(step, Signal.LOSS_NONFINITE, action, message, micro.index, rank, values, culprit))
