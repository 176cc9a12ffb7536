"""Samples of few targets to which a model that has learned gives almost no chance: how a wrong label differs from a hard row.

By its loss alone a hard row of one target cannot be told from a row with a wrong label. Losses of hard rows are of all sizes, so a run
that has them has more losses between the usual level and a very large one than very large ones; wrong labels among rows that are learned
leave a gap there. So do rows of a rare group until they are learned; then their losses fall from visit to visit. But some are learned late
or never, so what is found here is suspect and not proved: it has a verdict of its own, `labels`, and is never quarantined.

A sample counts if its loss stands apart from the recent ones of the run, and exceeds a uniform guess, and the level at the start, by `ODDS`. It
is suspect if it has not fallen at the next visit, unless those of the other rows that came again have; at once if those of most had not.
"""

import math
from collections import deque
from collections.abc import Mapping

from ..event import JsonObject

LEARNED = 0.1  # of the level at the start, below which a model has learned
ODDS = math.log(10.0)  # against the label, beyond those of a guess
LEAST = 1.5  # times a guess that the loss must be as well: losses of many classes, or scaled ones, are large
NUM_KEPT = 150
MIN_SEEN = 30
FAR = 5.0  # times the usual level
NUM_CHANGES, MIN_CHANGES, MOST = 30, 4, 0.6
KEPT = 0.8  # of the first loss, at least
WIDE, NEAR = 8.0, 2.0  # a loss divided by these is where the gap below it begins and ends


class LearnedLosses:
    """The recent losses of micro-batches, large ones included, since a model has learned."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=NUM_KEPT)

    def add(self, loss: float, usual: float | None, start: float | None) -> None:
        """Adds a loss if the usual level is far below that at the start."""
        if usual is not None and start is not None and usual < LEARNED * start:
            self.values.append(loss)

    def stands_apart(self, loss: float, usual: float | None) -> bool:
        """Returns whether a loss, which was added, is far above the usual level with a gap below it, or one that fewer losses fill than
        are as large."""
        if usual is None or loss <= FAR * usual or len(self.values) <= MIN_SEEN:
            return False
        between, alike = self._count(loss)
        return 2 * between <= alike + 1

    def _count(self, loss: float) -> tuple[int, int]:
        """Returns how many losses are in the gap below a loss, and how many are as large."""
        between = sum(loss / WIDE < each <= loss / NEAR for each in self.values)
        return between, sum(each > loss / NEAR for each in self.values)

    def state_dict(self) -> JsonObject:
        return {"values": list(self.values)}

    def load_state_dict(self, state: JsonObject) -> None:
        self.values.clear()
        self.values.extend(value for value in map(float, state["values"]) if math.isfinite(value))


def is_denied(loss: float, guess: float) -> bool:
    """Returns whether a model gives a label less chance than a guess that has a loss of `guess`, by far."""
    return loss > max(guess + ODDS, LEAST * guess)


class DeniedRows:
    """Rows whose class is denied, with their losses when they were noticed and when they came again.

    Rows of a rare group are denied as well until they are learned. Then their losses fall from visit to visit, some sooner and some
    later, so it takes several rows that came again to tell one from the other.
    """

    def __init__(self) -> None:
        self.first: dict[int, float] = {}
        self.changes: deque[float] = deque(maxlen=NUM_CHANGES)

    def add(self, losses: Mapping[int, float]) -> None:
        """Adds the losses of rows at a visit."""
        for row, loss in losses.items():
            if row in self.first:
                self.changes.append(loss / self.first[row])
            self.first.setdefault(row, loss)

    def are_kept(self) -> bool:
        """Returns whether the losses of most rows that came again had not fallen, if they are enough."""
        num_kept = sum(change >= KEPT for change in self.changes)
        return len(self.changes) >= MIN_CHANGES and num_kept >= MOST * len(self.changes)

    def is_kept(self, row: int | None, loss: float) -> bool:
        """Returns whether a row that came again, and was not added yet, is like that, and the others are not otherwise."""
        first = None if row is None else self.first.get(row)
        return first is not None and loss >= KEPT * first and (len(self.changes) < MIN_CHANGES or self.are_kept())

    def state_dict(self) -> JsonObject:
        return {"first": [[row, loss] for row, loss in self.first.items()], "changes": list(self.changes)}

    def load_state_dict(self, state: JsonObject) -> None:
        self.first.update((int(row), float(loss)) for row, loss in state["first"])
        self.changes.extend(map(float, state["changes"]))
