"""Logits processors: a finite row of scores stays bit-identical, a non-finite one is repaired or ended.

Clipping healthy rows would make the sampled policy differ from the one whose log-probabilities are trained.
"""

import copy
import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ...boundary import Boundary
from ...core.logits import RowMaxima, Tally, bound_scores, can_read_in_place, repair_scores
from ...core.settings import SETTINGS
from ...errors import ArgumentError

logger = logging.getLogger("hf_nanguard")

MODES = SETTINGS["logits_mode"].choices
MAX_ROWS = 4
# Takes a processor, the number of tokens and of rows, and the maxima of the scores, without which all rows were finite.
Listener = Callable[["NumericalStabilityLogitsProcessor", int, int, RowMaxima | None], None]


def check_number(name: str, value: float, lowest: float, highest: float = math.inf, above: bool = False) -> None:
    """Raises an [`ArgumentError`] unless the value is a finite number in the range, without `lowest` if `above`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < lowest or value > highest or (above and value == lowest):
        least = f"above {lowest:g}" if above else f"at least {lowest:g}"
        most = "" if highest == math.inf else f" and at most {highest:g}"
        raise ArgumentError(
            f"{name} must be a finite number {least}{most}, got {value!r}. Leave it out for the default."
        )


class NumericalStabilityLogitsProcessor(LogitsProcessor):
    """Repairs scores before a token is drawn from them.

    With `mode="repair"` finite rows stay bit-identical, NaN and +inf entries are masked, -inf stays a mask, and a row
    without a finite score ends its sequence; **`clip_value` and `min_prob` have no effect**. With `mode="always"` every row
    is then bounded to `[max - 2 * clip_value, max]`, unmasked tokens get at least `min_prob`, and the row is normalised:
    this changes the policy of a healthy model, so log-probabilities computed elsewhere no longer agree with it.

    In beam search, scores arrive after a log-softmax, so a row with one NaN is all NaN and is ended.

    Args:
        clip_value (`float`, *optional*, defaults to `30.0`):
            Half the largest distance to the best token, in mode `"always"`.
        min_prob (`float`, *optional*, defaults to `1e-8`):
            The smallest probability of an unmasked token, in mode `"always"`.
        verbose (`bool`, *optional*, defaults to `True`):
            Whether the first occurrences are logged with shape and values, on a CPU. On other devices nothing is read
            while generating; [`guard_generation`] logs them when its results are read.
        mode (`str`, *optional*, defaults to `"repair"`):
            `"repair"` or `"always"`.
        eos_token_id (`int` or `list[int]`, *optional*):
            The token that ends a sequence; the first of several. Without it, a row without a finite score gets token 0.

    Raises:
        ArgumentError: If an argument cannot work.

    Example:
        >>> guard = NumericalStabilityLogitsProcessor(eos_token_id=tokenizer.eos_token_id)
        >>> model.generate(**inputs, do_sample=True, logits_processor=LogitsProcessorList([guard]))
        >>> guard.num_repaired, guard.num_ended
    """

    supports_continuous_batching = True

    def __init__(
        self,
        clip_value: float = 30.0,
        min_prob: float = 1e-8,
        verbose: bool = True,
        mode: str = "repair",
        eos_token_id: int | Sequence[int] | None = None,
    ):
        check_number("clip_value", clip_value, 0, above=True)
        check_number("min_prob", min_prob, 0, highest=1)
        if mode not in MODES[:2]:
            raise ArgumentError(
                f"mode must be 'repair' or 'always', got {mode!r}. Leave the processor out to have none."
            )
        ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ArgumentError(f"eos_token_id must be token ids, got {eos_token_id!r}. Give tokenizer.eos_token_id.")
        self.clip_value = clip_value
        self.min_prob = min_prob
        self.verbose = verbose
        self.mode = mode
        self.end_id = ids[0] if ids else 0
        self.rest = -math.inf
        self.tally = Tally()
        self.listeners: list[Listener] = []
        self.placed = False
        self._boundary = Boundary()
        self.log_ends = iter(("", "", " Later ones are counted only."))  # of the occurrences that are logged

    def place(self, end_id: int, mode: str, rest: float = -math.inf) -> "NumericalStabilityLogitsProcessor":
        """Returns a copy that [`guard_generation`] places: it logs as often as all copies together, and `rest` is as
        in [`repair_scores`]."""
        placed = self.muted()
        placed.placed, placed.end_id, placed.mode, placed.rest = True, end_id, mode, rest
        return placed

    def muted(self) -> "NumericalStabilityLogitsProcessor":
        """Returns a copy with counts of its own and without listeners."""
        muted = copy.copy(self)
        muted.listeners, muted.tally = [], Tally()
        return muted

    def subscribe(self, listener: Listener) -> None:
        """Notifies a listener of every call."""
        self.listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Stops notifying a listener."""
        self.listeners = [other for other in self.listeners if other != listener]

    def report_to(self, boundary: Boundary) -> None:
        """Reports errors of the processor there, also those of the copies that are made from now on."""
        self._boundary = boundary

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.safely(self._process, input_ids, scores, otherwise=lambda input_ids, scores: scores)

    def safely(self, process: Callable[..., Tensor], *args: Tensor, otherwise: Callable[..., Tensor]) -> Tensor:
        """Returns processed scores; those given if that fails."""
        return self._boundary.call("scores", process, *args, otherwise=otherwise)

    def _process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[-1] if input_ids.ndim > 1 else 0
        fixed, maxima = repair_scores(scores, self.end_id, rest=self.rest)
        for listener in self.listeners:
            listener(self, length, scores.shape[0], maxima)
        if maxima is not None:
            self.tally.add(maxima)
            self.log(scores, maxima, length)
        return self.bound(fixed, self.tally)

    def bound(self, repaired: Tensor, tally: Tally | None = None) -> Tensor:
        """Bounds repaired scores if the mode says so, and counts the rows in a tally."""
        if self.mode == "repair":
            return repaired
        bounded, raised = bound_scores(repaired, self.clip_value, self.min_prob)
        if tally is not None:
            tally.add_bounded(raised)
        return bounded

    def log(self, scores: Tensor, maxima: RowMaxima, length: int) -> None:
        """Logs non-finite scores with shape and values, the first few times, if that needs no host read."""
        if self.verbose and can_read_in_place(maxima.before) and (end := next(self.log_ends, None)) is not None:
            logger.warning("hf_nanguard: %s%s", describe_scores(scores, maxima, length), end)

    @property
    def num_repaired(self) -> int:
        """How many rows of scores were repaired so far; one host read."""
        return self.tally.read()[0]

    @property
    def num_ended(self) -> int:
        """How many rows of scores had no finite score so far; one host read."""
        return self.tally.read()[1]

    @property
    def num_bounded(self) -> int:
        """How many rows of scores had a token raised by `clip_value` or `min_prob` so far, in mode `"always"`; one host
        read. In a large vocabulary `min_prob` raises some token of almost every row."""
        return self.tally.read_bounded()


def describe_scores(scores: Tensor, maxima: RowMaxima, length: int) -> str:
    """Describes shape and values of the non-finite rows. Reads them, so only for scores on the CPU."""
    repaired, ended = maxima.judge()
    parts = []
    rows = (repaired | ended).nonzero().flatten().tolist()
    for row in rows[:MAX_ROWS]:
        values = scores[row].float()
        good = values[values.isfinite()]
        kinds = {"NaN": values.isnan(), "inf": values == math.inf, "-inf": values == -math.inf}
        counts = ", ".join(f"{int(found.sum())} {kind}" for kind, found in kinds.items() if found.any())
        among = f", {good.numel()} finite from {good.min():.4g} to {good.max():.4g}" if good.numel() else ""
        parts.append(f"row {row} ({counts}{among}) was {'ended' if ended[row] else 'repaired'}")
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    shape = f"{list(scores.shape)} {str(scores.dtype).removeprefix('torch.')}"
    return f"non-finite scores {shape} after {length} tokens: {'; '.join(parts)}{more}."


class SafeTemperatureLogitsWarper(LogitsProcessor):
    """Divides scores by a temperature with a lower bound, and clamps what the division would overflow.

    Other scores are those of transformers' own warper. -inf stays a mask; NaN and +inf are left for
    [`NumericalStabilityLogitsProcessor`], which masks them. Do not use it in a trainer that divides log-probabilities by
    its own temperature: the two would no longer agree.

    Args:
        temperature (`float`):
            The temperature.
        min_temperature (`float`, *optional*, defaults to `0.1`):
            The smallest temperature; a smaller one is replaced by it.

    Raises:
        ArgumentError: If an argument cannot work.

    Example:
        >>> warper = SafeTemperatureLogitsWarper(temperature=0.0)
        >>> model.generate(**inputs, do_sample=True, logits_processor=LogitsProcessorList([warper]))
    """

    supports_continuous_batching = True

    def __init__(self, temperature: float, min_temperature: float = 0.1):
        check_number("temperature", temperature, 0)
        check_number("min_temperature", min_temperature, 0, above=True)
        self.temperature = max(temperature, min_temperature)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        divided = scores / self.temperature
        if self.temperature >= 1:
            return divided
        limits = torch.finfo(divided.dtype)
        return torch.where(scores.isinf(), scores, divided.clamp_(limits.min, limits.max))
