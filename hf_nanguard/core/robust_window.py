"""Detects spikes: compares a value with the median and MAD of recent healthy values.

Median and MAD are used because a single outlier does not change them. Non-finite values are never added: after one NaN, a
mean or an EMA would call every later step bad, or none. Statistics are computed on logarithms, because norms are positive and
vary by factors, increasingly so towards the end of a run, where a linear scale would report spikes. Slow drifts are not
detected.
"""

import math
from collections import deque
from statistics import median

MAD_TO_SIGMA = 1.4826
MAX_LOG = 700.0  # beyond 709 the exponential is infinite


class RobustWindow:
    """Keeps the last `size` finite values and detects spikes.

    Args:
        size (`int`, *optional*, defaults to `100`):
            How many values are kept.
        min_count (`int`, *optional*, defaults to `50`):
            How many values are needed before anything can be a spike.
        sigmas (`float`, *optional*, defaults to `8.0`):
            Robust standard deviations, of the logarithms, above the median from which a value is a spike.
        ratio (`float`, *optional*, defaults to `15.0`):
            Multiple of the median that a spike must exceed as well, because almost constant values have a very small MAD;
            in healthy RL runs a norm is ten times the median now and then.
    """

    def __init__(self, size: int = 100, min_count: int = 50, sigmas: float = 8.0, ratio: float = 15.0):
        self.values: deque[float] = deque(maxlen=size)
        self.min_count = min_count
        self.sigmas = sigmas
        self.ratio = ratio

    def add(self, value: float) -> None:
        """Adds a value; a non-finite one is ignored."""
        if math.isfinite(value):
            self.values.append(value)

    def threshold(self) -> float | None:
        """Returns the value above which a new one is a spike, `None` while there are too few values."""
        live = [
            value for value in self.values if value > 0.0
        ]  # exact zeros, e.g. from equal rewards, have no logarithm
        if len(live) < self.min_count:
            return None
        logs = [math.log(value) for value in live]
        middle = median(logs)
        spread = MAD_TO_SIGMA * median(abs(value - middle) for value in logs)
        return math.exp(min(middle + max(self.sigmas * spread, math.log(self.ratio)), MAX_LOG))

    def is_spike(self, value: float) -> bool:
        """Returns whether a finite `value` is a spike."""
        threshold = self.threshold()
        return threshold is not None and value > threshold

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the values, for a checkpoint."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restores the values of a checkpoint; non-finite ones are ignored."""
        self.values.clear()
        for value in state["values"]:
            self.add(float(value))
