"""A window of recent healthy values that judges whether a new one is out of line.

Median and MAD, because one outlier must not move the yardstick, and a non-finite value is never let in: a mean or an
EMA that once took a NaN would call every later step bad, or none. They are taken of logarithms: norms are positive and
scatter by factors, the more so the less there is left to learn, and a spread in plain numbers would call the tail of a
healthy run a spike. It does not see slow drifts.
"""

import math
from collections import deque
from statistics import median

MAD_TO_SIGMA = 1.4826
MAX_LOG = 700.0  # beyond 709 the exponential is infinite


class RobustWindow:
    """Keeps the last `size` finite values and tells spikes from noise.

    Args:
        size (`int`, *optional*, defaults to `100`):
            How many values are kept.
        min_count (`int`, *optional*, defaults to `50`):
            How many values must have come before anything can be called a spike.
        sigmas (`float`, *optional*, defaults to `8.0`):
            Robust standard deviations, of the logarithms, above the median from which a value is a spike.
        ratio (`float`, *optional*, defaults to `15.0`):
            Multiple of the median that a spike must exceed as well, so that a very flat history raises no alarm; in
            healthy RL tenfold norms come now and then.
    """

    def __init__(self, size: int = 100, min_count: int = 50, sigmas: float = 8.0, ratio: float = 15.0):
        self.values: deque[float] = deque(maxlen=size)
        self.min_count = min_count
        self.sigmas = sigmas
        self.ratio = ratio

    def add(self, value: float) -> None:
        """Takes a value in; a non-finite one is left out."""
        if math.isfinite(value):
            self.values.append(value)

    def threshold(self) -> float | None:
        """Returns the value above which a spike begins, `None` while too little has been seen."""
        live = [value for value in self.values if value > 0.0]  # exact zeros (equal rewards) are no yardstick
        if len(live) < self.min_count:
            return None
        logs = [math.log(value) for value in live]
        middle = median(logs)
        spread = MAD_TO_SIGMA * median(abs(value - middle) for value in logs)
        return math.exp(min(middle + max(self.sigmas * spread, math.log(self.ratio)), MAX_LOG))

    def is_spike(self, value: float) -> bool:
        """Returns whether a finite `value` is out of line with what has been seen."""
        threshold = self.threshold()
        return threshold is not None and value > threshold

    def state_dict(self) -> dict[str, list[float]]:
        """Returns what `load_state_dict` needs."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restores the window of a checkpoint; values that are not finite are left out."""
        self.values.clear()
        for value in state["values"]:
            self.add(float(value))
