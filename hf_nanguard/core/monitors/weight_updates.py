"""Checks that optimizer updates still change the stored weights.

A bfloat16 weight has eight significant bits: an update below 1/512 of it is rounded away. The loss looks normal and nothing is
learned. This is distinguished from a learning rate of zero and from parameters that receive no gradient.

A check makes one host read. Under DDP weights and gradients are the same on every rank, so no message is needed; if parameters
are sharded, ranks exchange their counts. Optimizers with stochastic rounding, whose few changes are right on average, are not
recognised.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field

from torch.optim import Optimizer

from ..event import Culprit, JsonObject, JsonValue, Remedy
from ..finite import dtype_name, local
from ..optimizer.rounding_remedies import MOVES, keeps_remainder, moves_copies, try_rounding_remedies
from ..vocabulary import Cause, Signal
from .base import Monitor
from .update_sample import Piece, UpdateCounts, UpdateSample, read_sample, take_sample

PATIENCE = 3  # checks in a row with a learning rate of zero, which a schedule may begin or end with
RECOVERED = 2 * MOVES  # a share that stays around the threshold is reported once
MIN_PART = 0.1  # of the entries that are judged: less is not judged on its own
SHOWN = 12
LOW_PRECISION = ("bfloat16", "float16")


@dataclass
class UpdateState:
    """The state of an [`UpdateMonitor`] in a checkpoint."""

    num_still: int = 0  # checks in a row with a learning rate of zero
    reported_rounding: bool = False
    reported_rate: bool = False
    idle: list[str] | None = None  # parameters without a gradient in every check so far, `None` before the first


@dataclass(eq=False)
class UpdateMonitor(Monitor):
    """Measures every N steps the share of entries whose stored value an update changes.

    | metric | meaning |
    |---|---|
    | `nanguard/update_share` | share of sampled entries with a gradient whose stored value the update changed |
    | `nanguard/idle_parameters` | number of trainable parameters whose gradient was missing or exactly zero in every check so far |
    | `nanguard/update_share/<parameter>` | the share of each parameter, with `full_metrics` |
    """

    _: KW_ONLY
    optimizer: Optimizer
    state: UpdateState = field(default_factory=UpdateState, init=False)
    sample: UpdateSample | None = field(default=None, init=False)
    exempt: set[str] = field(default_factory=set, init=False)  # the optimizer keeps a copy of them in higher precision

    def before_update(self, step: int) -> None:
        """Takes a sample if a check is due."""
        self.sample = take_sample(self.model, self.optimizer) if self.is_due(step) else None

    def after_update(self, step: int) -> None:
        """Compares the sample with the weights after the update; never a reason to halt."""
        sample, self.sample = self.sample, None
        if sample is None:
            return
        counts = read_sample(sample, self.ranks)
        if not all(map(math.isfinite, counts.sizes.values())):
            return  # a loss scaler skips such an update
        idle = sample.idle | {name for name, size in counts.sizes.items() if size == 0.0}
        self.state.idle = sorted(idle if self.state.idle is None else idle.intersection(self.state.idle))
        self.record("idle_parameters", float(len(self.state.idle)))
        share = counts.share(counts.live)
        if share is None:
            return
        shares = {name: each for name in counts.live if (each := counts.share([name])) is not None}
        self.record("update_share", share, shares)
        if not self._check_rate(step, sample, counts, share):
            self._check_rounding(step, sample, counts)

    def fail_exchange(self, stage: str, step: int) -> None:
        """Fails the exchange of the other ranks, which there is if parameters are sharded."""
        is_sharded = any(local(weight) is not weight for weight in self.model.parameters())
        if stage == "after_update" and is_sharded and self.is_due(step):
            self.ranks.fail()

    def close(self) -> None:
        """Drops the sample of an update that did not happen."""
        self.sample = None

    def state_dict(self) -> JsonObject:
        return asdict(self.state)

    def load_state_dict(self, state: JsonObject) -> None:
        self.state = UpdateState(**state)

    def _check_rate(self, step: int, sample: UpdateSample, counts: UpdateCounts, share: float) -> bool:
        """Returns whether nothing moved because the learning rate is zero; reports it if that lasts."""
        state, used = self.state, {piece.group for piece in sample.pieces}
        if share > 0.0 or any(counts.rates[group] != 0.0 for group in used):
            state.num_still, state.reported_rate = 0, False
            return False
        state.num_still += 1
        full = [self._full_rate(group) for group in used]
        stays = all(rate == 0.0 for rate in full)  # a schedule of it is 0 as well
        if (state.num_still < PATIENCE and not stays) or state.reported_rate:
            return True
        state.reported_rate = True
        initial = max((rate or 0.0 for rate in full), default=0.0)
        why = f"the schedule has reduced it from {initial:g}" if initial else "it was set to 0"
        advice = "Check the number of steps the schedule was created for" if initial else "Set a learning rate"
        checks = (
            f"{state.num_still} checks in a row, the last at step {step}," if state.num_still > 1 else f"step {step}"
        )
        message = f"No weight changed in {checks} because the learning rate is 0 ({why}). {advice}."
        self._emit_stall(step, message, {"update_share": share, "learning_rate": 0.0, "initial_lr": initial})
        return True

    def _check_rounding(self, step: int, sample: UpdateSample, counts: UpdateCounts) -> None:
        """Reports it if almost all updates of weights in low precision are lost to rounding."""
        state = self.state
        judged = {
            piece.name: piece
            for piece in sample.pieces
            if dtype_name(piece.parameter.dtype) in LOW_PRECISION
            and piece.name not in self.exempt
            and self._is_under_way(counts.rates[piece.group], piece.group)
        }
        share, judged = self._find_slowest(judged, counts)
        if share is None:
            return
        if share >= MOVES or state.reported_rounding:
            state.reported_rounding = state.reported_rounding and share < RECOVERED
            return
        entries = sample.pick_entries(judged)
        exempt = {name for name, each in entries.items() if keeps_remainder(self.optimizer, each)}
        if exempt:
            self.exempt |= exempt
            return
        if moves_copies(self.optimizer, list(entries.values())):
            return
        state.reported_rounding = True
        rates = sorted({rate for piece in judged.values() if (rate := counts.rates[piece.group]) is not None})
        dtypes = " and ".join(sorted({dtype_name(piece.parameter.dtype) for piece in judged.values()}))
        remedies = try_rounding_remedies(self.optimizer, list(entries.values()))
        at = f" at learning rate {' and '.join(f'{rate:g}' for rate in rates)}" if rates else ""
        message = (
            f"Weights hardly change: the update of step {step} changed {share:.2%} of the {dtypes} entries that have a "
            f"gradient. Updates{at} are lost to rounding because they are smaller than half the distance to the next {dtypes} "
            "number. "
            f"This helps: {'; '.join(str(remedy.note) for remedy in remedies if remedy.works is not False)}."
        )
        values = {"update_share": share, "learning_rate": max(rates, default=None), "dtype": dtypes}
        self._emit_stall(step, message, values, Cause.ROUNDING_STALL, remedies)

    def _find_slowest(self, judged: dict[str, Piece], counts: UpdateCounts) -> tuple[float | None, dict[str, Piece]]:
        """Returns the smallest share of those that each learning rate moves, and what has that rate. Parameters of one rate are
        judged together, because some (the weights of norms, near 1) move less by design, and so are small parts of a model."""
        lowest, slowest = counts.share(judged), judged
        total = sum(counts.live[name] for name in judged)
        for rate in {counts.rates[piece.group] for piece in judged.values()}:
            part = {name: piece for name, piece in judged.items() if counts.rates[piece.group] == rate}
            share, live = counts.share(part), sum(counts.live[name] for name in part)
            if lowest is not None and share is not None and share < lowest and live >= MIN_PART * total:
                lowest, slowest = share, part
        return lowest, slowest

    def _full_rate(self, group: int) -> float | None:
        """Returns the learning rate that a schedule scales or leads to, `None` without a schedule."""
        settings = self.optimizer.param_groups[group]
        known = [float(settings[name]) for name in ("initial_lr", "max_lr") if settings.get(name) is not None]
        return max(known, default=None)  # OneCycleLR begins at `initial_lr`

    def _is_under_way(self, rate: float | None, group: int) -> bool:
        """Returns whether a schedule is near its full learning rate: in warm-up and at its end updates are small by design."""
        if rate is None:  # the optimizer finds its own
            return True
        full = self._full_rate(group)
        return rate > 0.0 and (full is None or rate >= 0.5 * full)

    def _emit_stall(
        self,
        step: int,
        message: str,
        values: Mapping[str, JsonValue],
        cause: Cause | None = None,
        remedies: tuple[Remedy, ...] = (),
    ) -> None:
        idle = self.state.idle or []
        values = {**values, "num_idle_parameters": len(idle), "idle_parameters": idle[:SHOWN]}
        self.emit(step, Signal.UPDATE_STALLED, message, values, Culprit("optimizer"), cause, remedies)
