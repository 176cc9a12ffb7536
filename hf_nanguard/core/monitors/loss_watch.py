"""Judges the loss of every step against the run's own history and writes `loss_spike` and `loss_diverged`."""

import math
from collections.abc import Callable

from ..event import Event, Failure, JsonObject, JsonValue
from ..journal import Journal
from ..vocabulary import Action, Signal
from .loss_divergence import Divergence, DivergenceDetector
from .spike_detector import Spike, SpikeDetector

Explain = Callable[[Event, bool], Event]  # given whether the loss has come back since

NEAR_ZERO = 1e-6  # a loss that small, or negative, moves around 0, as the policy loss of RL does
NUM_FIRST = 10
NEGLIGIBLE = 0.01  # of the first losses: factors between losses below do not matter
SIGNED_RATIO, SIGNED_FLOOR, SIGNED_LEVEL = 10.0, 1.0, 3.0  # for a loss around 0, which advantages keep near 1


class LossWatch:
    """Observes the losses of a run. Only rank 0 writes, about its own losses."""

    def __init__(self, journal: Journal, holds_divergence: bool = False):
        self.journal = journal
        self.ranks = journal.ranks
        self.holds_divergence = holds_divergence  # for `take_divergence`, on every rank, instead of writing it
        self.is_signed = False
        self.begin_run()

    def begin_run(self) -> None:
        """Forgets the losses of another run; whether they change their sign is a property of the loss."""
        self.held: tuple[Divergence, Event] | None = None
        self.spikes = SpikeDetector(ratio=2.8, tail=3.0)
        self.divergence = DivergenceDetector()
        self.num_seen = 0
        self.explains: dict[int, Explain | None] = {}  # of the steps whose spike is not reported yet
        was_signed, self.is_signed = self.is_signed, False
        if was_signed:
            self.expect_sign_changes()

    @property
    def is_open(self) -> bool:
        """Whether the loss is in an episode of spikes or of divergence."""
        return self.spikes.is_open or self.divergence.is_open

    def is_spike(self, loss: float) -> bool:
        """Returns whether a loss, which is not added, is far above its usual level."""
        return self.spikes.is_spike(loss)

    def expect_sign_changes(self) -> None:
        """Judges the loss as one that moves around 0, where only its size says anything."""
        if not self.is_signed:
            self.is_signed = True
            self.spikes.raise_floor(SIGNED_FLOOR, SIGNED_RATIO)
            self.divergence.raise_floor(SIGNED_LEVEL)

    def observe(self, step: int, loss: float, norm: float = 1.0, explain: Explain | None = None) -> None:
        """Adds the loss of a step that was trained on, and the norm of its gradient. `explain` adds to the event of a spike what
        was found in the step, also if the spike is reported later."""
        if not math.isfinite(loss):
            return
        if loss <= NEAR_ZERO:
            self.expect_sign_changes()
        if self.num_seen == NUM_FIRST and not self.is_signed:
            floor = NEGLIGIBLE * min(self.spikes.values)  # the first loss, if the others are those of a diverged run
            self.spikes.raise_floor(floor)
            self.divergence.raise_floor(floor)
        self.num_seen += 1
        spike = self.spikes.add(step, loss)
        self.explains[step] = explain
        if spike is not None:
            self._emit_spike(step, spike)
        if not self.spikes.pending:
            self.explains.clear()
        if (divergence := self.divergence.add(step, loss, norm)) is not None:
            self._emit_divergence(step, divergence)

    def _emit_spike(self, step: int, spike: Spike) -> None:
        values = {"loss": spike.value, "usual": spike.usual, "threshold": spike.threshold}
        message = f"loss {spike.value:.4g} at step {spike.step} is far above the usual {spike.usual:.4g}"
        event = Event(spike.step, Signal.LOSS_SPIKE, Action.OBSERVED, message, values=values)
        explain = self.explains.get(spike.step)
        self.journal.write_once(event if explain is None else explain(event, step > spike.step))

    def _emit_divergence(self, step: int, found: Divergence) -> None:
        values: dict[str, JsonValue] = {
            "loss": found.value,
            "usual": found.usual,
            "since_step": found.since,
            "reference": found.reference,
        }
        what = "where it began" if found.reference == "start" else "its best level"
        message = (
            f"the loss stays above {what}: {found.value:.4g} at step {step}, against {found.usual:.4g}, since step "
            f"{found.since}. Lower the learning rate, lengthen the warm-up, or check the data from that step on"
        )
        event = Event(step, Signal.LOSS_DIVERGED, Action.OBSERVED, message, values=values)
        if self.holds_divergence:
            self.held = found, event
        else:
            self.journal.write_once(event)

    def take_divergence(self) -> Failure | None:
        """Returns that the loss of a rank diverges, the same on every rank, with one small reduction. Every rank calls it."""
        held, self.held = self.held, None
        if not self.ranks.any(held is not None):
            return None
        mine: JsonObject | None = None
        if held is not None:
            mine = {"since": held[0].since, "step": held[1].step, "message": held[1].message, "values": held[1].values}
        found = next(filter(None, self.ranks.gather(mine)))
        message = found["message"]
        event = Event(found["step"], Signal.LOSS_DIVERGED, Action.OBSERVED, message, values=found["values"])
        return Failure(message, event, found["since"], Action.SKIPPED)

    def state_dict(self) -> JsonObject:
        return {
            "spikes": self.spikes.state_dict(),
            "divergence": self.divergence.state_dict(),
            "is_signed": self.is_signed,
            "num_seen": self.num_seen,
        }

    def load_state_dict(self, state: JsonObject) -> None:
        self.spikes.load_state_dict(state["spikes"])
        self.divergence.load_state_dict(state["divergence"])
        self.num_seen = int(state["num_seen"])
        if state["is_signed"]:
            self.expect_sign_changes()
