"""Counts the log-ratios that were bounded, and emits `ratio_overflow` for the first one.

Counts stay on the device until the step reads its losses. The log-ratios of a step, and one boolean each, are held by
reference until then, so that the event can name the token; they are read only if a count is not zero.
"""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ...core.event import Culprit, Event
from ...core.journal import Journal
from ...core.rerun.micro_batch import AccumulationGroup
from ...core.vocabulary import Action, Cause, Signal

# What each bounded term is called in an event, and the cause.
TERMS = {
    "ratio": ("The log-ratio of new to old policy", Cause.RATIO_OVERFLOW),
    "kl": ("The log-ratio of reference to policy in the KL term", Cause.KL_OVERFLOW),
}


@dataclass(frozen=True)
class _Term:
    """One term of one loss, on the device. `log_ratios` and `beyond` have one entry per token or per sequence."""

    name: str
    micro_step: int
    num_dev: Tensor
    log_ratios: Tensor
    beyond: Tensor
    rows: Tensor | None


class RatioOverflow:
    """Counts what [`RatioBound`] has bounded on this rank."""

    def __init__(self, journal: Journal):
        self.journal = journal
        self.counts: dict[str, int] = {}  # as read, since the last log row
        self._terms: list[_Term] = []  # of the step in progress
        self._micro_step = -1
        self._is_reported = False

    def begin_loss(self) -> None:
        self._micro_step += 1

    def add(self, name: str, log_ratios: Tensor, beyond: Tensor, rows: Tensor | None) -> None:
        """Adds one term of the loss, with the dataset rows of its completions; `beyond` is true where it was bounded."""
        self._terms.append(_Term(name, self._micro_step, beyond.sum(), log_ratios, beyond, rows))

    def add_readings(self, group: AccumulationGroup, step: int) -> None:
        """Has the counts read with everything else that is read at the end of the step."""
        for term in self._terms:
            group.read_later(term.num_dev, partial(self._count, term, step))
        self._terms, self._micro_step = [], -1

    def take_counts(self) -> dict[str, int]:
        """Returns how many `"ratio"`s (of a token or a sequence) and `"kl"` terms were bounded since the last call; `{}` if
        there was nothing to bound."""
        counts, self.counts = self.counts, {}
        return counts

    def _count(self, term: _Term, step: int, number: float) -> None:
        self.counts[term.name] = self.counts.get(term.name, 0) + int(number)
        if number and not self._is_reported:
            self._is_reported = True
            self._emit(term, step)

    def _emit(self, term: _Term, step: int) -> None:
        """Reads the first bounded value of a term and writes the event."""
        at = term.beyond.nonzero()[0].tolist()
        sample, value = at[0], float(term.log_ratios[tuple(at)])
        token = at[1] if term.beyond.ndim > 1 and term.beyond.shape[1] > 1 else None
        row = None if term.rows is None else int(term.rows[sample])
        what, cause = TERMS[term.name]
        place = ("" if token is None else f"token {token} of ") + f"completion {sample}"
        place += "" if row is None else f" (dataset row {row})"
        message = (
            f"{what} was {value:.4g} at {place} in micro-batch {term.micro_step} of step {step} and was bounded before its "
            f"exponential was taken. Later ones are only counted, in nanguard/bounded_{term.name}."
        )
        culprit = Culprit(
            phase="loss",
            term=term.name,
            samples=[sample],
            rows=None if row is None else [row],
            tokens=None if token is None else [[sample, token]],
        )
        event = Event(step, Signal.RATIO_OVERFLOW, Action.REPAIRED, message, term.micro_step)
        self.journal.write(replace(event, values={"log_ratio": value}, culprit=culprit, cause=cause))
