"""Events of what a user has named: tensors that are watched, and terms of the loss."""

import math

from ..event import Culprit, Event
from ..journal import Journal
from ..rerun.micro_batch import AccumulationGroup
from ..vocabulary import Action, Signal


def emit_watched(journal: Journal, group: AccumulationGroup, watched: list[float], step: int) -> None:
    """Writes an event for every watched tensor whose largest magnitude, as read, is not finite or exceeds its bound."""
    for (name, _, bound), largest in zip(group.watched, watched, strict=True):
        if math.isfinite(largest) and (bound is None or largest <= bound):
            continue
        what = f"exceeds its bound of {bound}" if math.isfinite(largest) else "is not finite"
        message = f"{name} {what} at step {step} (largest magnitude {largest})"
        values = {"largest": largest, "bound": bound}
        culprit = Culprit(phase="forward", term=name)
        event = Event(step, Signal.PREDICTION_NONFINITE, Action.OBSERVED, message, values=values, culprit=culprit)
        journal.write(event)


def emit_bad_terms(journal: Journal, group: AccumulationGroup, losses: list[float], step: int) -> None:
    """Writes an event for every non-finite term of a step with finite gradients, unless the event of its loss names it."""
    for micro in group.micro_batches:
        is_named = micro.index < len(losses) and not math.isfinite(losses[micro.index])
        for name in micro.bad_terms:
            drops = all(term.drops for term in micro.terms if term.name == name and term.is_bad)
            if is_named and not drops:
                continue
            action = Action.DROPPED if drops else Action.OBSERVED
            rest = "the loss continues without it" if drops else "the gradients are finite"
            message = f"{name} is {micro.term_values[name]} in micro-batch {micro.index} of step {step}; {rest}"
            values = {"terms": micro.term_values}
            culprit = Culprit(phase="loss", term=name, rows=micro.rows)
            event = Event(step, Signal.LOSS_NONFINITE, action, message, micro.index, values=values, culprit=culprit)
            journal.write(event)
