"""Do stored weights still move?

A bfloat16 weight has eight bits: an update of less than a 512th of it is rounded away, the loss goes on as if nothing were
wrong, and nothing is learned. That is told apart from a learning rate of zero and from parameters that no gradient reaches.

A look takes one host read. Under DDP weights and gradients are the same everywhere, so no message is needed; if parameters are
sharded, ranks tell each other their counts. It does not know optimizers that round by chance, whose few movements are right on
average.
"""

import math
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from ..event import Culprit, Event
from ..journal import Journal
from ..optimizer.rounding import MOVES, keeps_remainder, try_rounding_remedies
from ..ranks import Ranks
from ..vocabulary import Action, Cause, Signal
from .base import Monitor
from .update_sample import Count, UpdateSample, read_sample, take_sample

PATIENCE = 3  # looks in a row
RECOVERED = 2 * MOVES  # a share around the threshold is no news each time
SHOWN = 12
LOW_PRECISION = ("bfloat16", "float16")


class MovementMonitor(Monitor):
    """Looks every so many steps at the share of entries whose stored value an update changes.

    | metric | meaning |
    |---|---|
    | `nanguard/update_share` | share of sampled entries with a gradient whose stored value the update changed |
    | `nanguard/idle_parameters` | trainable parameters that had no gradient, or exactly zero, in every look so far |
    | `nanguard/update_share/<parameter>` | the share of each parameter, with `full_metrics` |

    Args:
        model (`nn.Module`):
            The model without wrappers.
        optimizer (`torch.optim.Optimizer`):
            Its optimizer.
        journal (`Journal`), ranks (`Ranks`):
            Where events go, and the processes that train together.
        every_n_steps (`int`, *optional*, defaults to `100`):
            The period; 0 turns it off.
        full_metrics (`bool`, *optional*, defaults to `False`):
            Whether there is a metric for every parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        journal: Journal,
        ranks: Ranks,
        every_n_steps: int = 100,
        full_metrics: bool = False,
    ):
        super().__init__(every_n_steps)
        self.model = model
        self.optimizer = optimizer
        self.journal = journal
        self.ranks = ranks
        self.full_metrics = full_metrics
        self.sample: UpdateSample | None = None
        self.seen: dict[str, float] = {}
        self.excused: set[str] = set()  # parameters of which the optimizer keeps a finer copy
        self.idle: set[str] | None = None  # parameters without a gradient in every look so far
        self.num_rounded = 0
        self.num_still = 0
        self.told_rounding = False
        self.told_rate = False

    def before_update(self, step: int) -> None:
        """Takes a sample, if the step is due."""
        self.sample = take_sample(self.model, self.optimizer) if self.is_due(step) else None

    def after_update(self, step: int) -> None:
        """Compares; it never is a reason to halt."""
        sample, self.sample = self.sample, None
        if sample is None:
            return
        count = read_sample(sample, self.ranks)
        if not all(map(math.isfinite, count.sizes.values())):
            return  # a loss scaler skips such an update
        idle = {name for name, size in count.sizes.items() if size == 0.0} | sample.idle
        self.idle = idle if self.idle is None else self.idle & idle
        self.seen["nanguard/idle_parameters"] = float(len(self.idle))
        share = count.share()
        if share is None:
            return
        self.seen["nanguard/update_share"] = share
        if self.full_metrics:
            shares = {name: count.share({name}) for name in count.live}
            self.seen.update(
                {f"nanguard/update_share/{name}": each for name, each in shares.items() if each is not None}
            )
        if not self._watch_rate(step, sample, count, share):
            self._watch_rounding(step, sample, count)

    def _watch_rate(self, step: int, sample: UpdateSample, count: Count, share: float) -> bool:
        """Counts looks at a learning rate of zero, which moves nothing, and tells of them; returns whether this is one."""
        used = {piece.group for piece in sample.pieces}
        if share > 0.0 or any(count.rates[at] != 0.0 for at in used):
            self.num_still, self.told_rate = 0, False
            return False
        self.num_still += 1
        if self.num_still < PATIENCE or self.told_rate:
            return True
        self.told_rate = True
        base = max((self._base_rate(at) or 0.0 for at in used), default=0.0)
        why = f"its schedule has it at 0, though it is made for {base:g}" if base else "it was given as 0"
        advice = "Check how many steps the schedule was made for" if base else "Set a learning rate"
        message = (
            f"no weight has moved in {self.num_still} looks in a row, the last at step {step}: the learning rate is 0 "
            f"({why}). {advice}."
        )
        self._write(step, message, {"update_share": share, "learning_rate": 0.0, "initial_lr": base}, None)
        return True

    def _watch_rounding(self, step: int, sample: UpdateSample, count: Count) -> None:
        """Counts looks in which rounding swallowed almost all updates, and tells of them."""
        judged = {
            piece.name: piece
            for piece in sample.pieces
            if _name_dtype(piece.parameter) in LOW_PRECISION
            and piece.name not in self.excused
            and self._is_under_way(count, piece.group)
        }
        share = count.share(set(judged))
        if share is None:
            return
        if share >= MOVES:
            self.num_rounded = 0
            self.told_rounding = self.told_rounding and share < RECOVERED
            return
        self.num_rounded += 1
        if self.num_rounded < PATIENCE or self.told_rounding:
            return
        samples = sample.sample(set(judged))
        finer = {name for name, sample in samples.items() if keeps_remainder(self.optimizer, sample)}
        if finer:
            self.excused |= finer
            self.num_rounded = 0
            return
        self.told_rounding = True
        rates = sorted({rate for piece in judged.values() if (rate := count.rates[piece.group]) is not None})
        dtypes = " and ".join(sorted({_name_dtype(piece.parameter) for piece in judged.values()}))
        remedies = tuple(asdict(each) for each in try_rounding_remedies(self.optimizer, list(samples.values())))
        message = self._describe(step, share, rates, dtypes, remedies)
        values = {"update_share": share, "learning_rate": max(rates, default=None), "dtype": dtypes}
        self._write(step, message, values, Cause.ROUNDING_STALL, remedies)

    def _base_rate(self, at: int) -> float | None:
        base = self.optimizer.param_groups[at].get("initial_lr")
        return None if base is None else float(base)

    def _is_under_way(self, count: Count, at: int) -> bool:
        """Whether a schedule is anywhere near its learning rate: in warm-up and at its end updates are small by design."""
        rate, base = count.rates[at], self._base_rate(at)
        if rate is None:  # an optimizer that finds its own
            return True
        return rate > 0.0 and (base is None or rate >= 0.5 * base)

    def _describe(
        self, step: int, share: float, rates: list[float], dtypes: str, remedies: tuple[dict[str, Any], ...]
    ) -> str:
        at = f" at learning rate {' and '.join(f'{rate:g}' for rate in rates)}" if rates else ""
        helps = "; ".join(each["note"] for each in remedies if each["works"] is not False)
        return (
            f"weights hardly move: the update of step {step} changed {share:.2%} of the {dtypes} entries that have a "
            f"gradient, and under {MOVES:.0%} in {self.num_rounded} looks in a row. Updates{at} are lost to rounding: they "
            f"are less than half the distance to the next {dtypes} number. What helps: {helps}."
        )

    def _write(
        self,
        step: int,
        message: str,
        values: dict[str, Any],
        cause: Cause | None,
        remedies: tuple[dict[str, Any], ...] = (),
    ) -> None:
        idle = sorted(self.idle or ())
        values |= {"num_idle_parameters": len(idle), "idle_parameters": idle[:SHOWN]}
        signal, action, culprit = Signal.UPDATE_STALLED, Action.OBSERVED, Culprit(phase="optimizer")
        self.journal.write_once(Event(step, signal, action, message, None, 0, values, culprit, cause, remedies))

    def close(self) -> None:
        """Lets go of a sample whose update did not come."""
        self.sample = None

    def metrics(self) -> dict[str, float]:
        """Returns what the last look saw, once."""
        seen, self.seen = self.seen, {}
        return seen

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint."""
        return {
            "num_rounded": self.num_rounded,
            "num_still": self.num_still,
            "told_rounding": self.told_rounding,
            "told_rate": self.told_rate,
            "idle": None if self.idle is None else sorted(self.idle),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts of a checkpoint."""
        self.num_rounded, self.num_still = int(state["num_rounded"]), int(state["num_still"])
        self.told_rounding, self.told_rate = bool(state["told_rounding"]), bool(state["told_rate"])
        self.idle = None if state["idle"] is None else set(state["idle"])


def _name_dtype(parameter: Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
