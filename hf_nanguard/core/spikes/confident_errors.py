"""Samples of few targets to which a model that has learned gives almost no chance: how a wrong label differs from a hard row.

By its loss alone a hard row of one target cannot be told from a row with a wrong label. Two things differ. Losses of hard rows are of all
sizes, so a run that has them has more losses between the usual level and a very large one than very large ones; wrong labels among rows
that are learned leave a gap there. And a hard row is learned with others like it: when it comes again its loss has fallen.

So a sample counts if its loss stands apart from the recent ones of the run, and exceeds a uniform guess, and the level at the start, by
`TWICE` at two visits; or by `ONCE` if it is one of many. Of 72 simulated runs without a wrong label, 60 of them with hard rows, none had a
row for which that holds at two visits; of flipped labels it held for nine in ten where the other rows can be learned, and for few where
losses are of all sizes.
"""

import math
from collections import deque

from ..event import JsonObject

LEARNED = 0.1  # of the level at the start, below which a model has learned
ONCE, TWICE = math.log(100.0), math.log(10.0)  # odds against the label, beyond those of a guess
LEAST = 1.5  # times a guess that the loss must be as well: losses of many classes, or scaled ones, are large
MANY = 6
NUM_KEPT = 150
MIN_SEEN = 30
FAR = 5.0  # times the usual level
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

    def is_one_of_many(self, loss: float) -> bool:
        """Returns whether many losses are as large, and hardly any fill the gap: a run with a few hard rows has none of these."""
        between, alike = self._count(loss)
        return alike >= MANY and 4 * between <= alike

    def _count(self, loss: float) -> tuple[int, int]:
        """Returns how many losses are in the gap below a loss, and how many are as large."""
        between = sum(loss / WIDE < each <= loss / NEAR for each in self.values)
        return between, sum(each > loss / NEAR for each in self.values)

    def state_dict(self) -> JsonObject:
        return {"values": list(self.values)}

    def load_state_dict(self, state: JsonObject) -> None:
        self.values.clear()
        self.values.extend(value for value in map(float, state["values"]) if math.isfinite(value))


def is_denied(loss: float, guess: float, odds: float) -> bool:
    """Returns whether a model gives a label less chance than a guess that has a loss of `guess`, by these odds."""
    return loss > max(guess + odds, LEAST * guess)
