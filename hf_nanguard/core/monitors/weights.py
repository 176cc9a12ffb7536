"""Checks that weights and optimizer state are finite, every N steps and before every save.

Trainable parameters, every float tensor of the optimizer's state and the buffers of a checkpoint go through one
`_foreach_norm` for each device and dtype; the largest norms are read together. The 2-norm misses no NaN and no inf and takes
a twentieth of the time of largest magnitudes on a CPU, but it overflows for huge finite numbers. So a suspicious norm is
confirmed by a second, exact check, which names the tensor, its rows and the update that made it non-finite.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..event import Culprit, Event, Failure, JsonObject, Remedy, strict
from ..finite import SHOWN_ROWS, find_nonfinite, find_rows, local, magnitudes, read_host
from ..optimizer.bad_update import UpdateFinding, examine_state, examine_update, try_update_remedies
from ..state_tensors import StateTensor, is_plain, list_state_tensors, name_saved_buffers
from ..torch_private import foreach_norm
from ..vocabulary import Action, Cause, Signal
from .base import Monitor

SHOWN_TENSORS = 12
BAD_START = (
    "This was the case before the first step of this run. Load other weights or initialize these entries; "
    "on_bad_start='observe' trains anyway."
)


@dataclass(frozen=True)
class StateFinding:
    """The first non-finite tensor of a model and its optimizer. Plain values only."""

    parameter: str  # or buffer
    state: str | None  # the tensor of the optimizer's state, `None` if the parameter itself is bad
    kind: str  # "nan" (any NaN inside) or "inf"
    num_bad: int
    num_entries: int  # on this rank
    rows: tuple[int, ...]  # the first rows with a bad entry, of the shard on this rank
    bad: dict[str, str]  # all bad tensors with their kinds, parameters first, optimizer state as "parameter/state"
    is_shard: bool = False  # whether other ranks hold other parts of it
    is_buffer: bool = False
    update: UpdateFinding | None = None  # the update that made it non-finite, if the optimizer's state shows it
    remedies: tuple[Remedy, ...] = ()  # settings of the optimizer that were tried on a copy


def check_state(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    accepted: Collection[str] = (),
    ignored: Collection[str] = (),
) -> StateFinding | None:
    """Finds the first non-finite tensor of a model and its optimizer, with one host read while there is none.

    Frozen parameters are not checked. In buffers, only NaN is bad. `accepted` are parameters in which inf is not bad either, and
    buffers in which nothing is; tensors that are `ignored` are not checked. Returns the first bad parameter, else the first bad state or buffer, on this rank.
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    buffers = ((name, buffer) for name, buffer in name_saved_buffers(model) if name not in accepted)
    watched = [
        replace(each, may_be_inf=True) if each.name in accepted else each
        for each in list_state_tensors(list(named.items()), optimizer, buffers)
        if each.name not in ignored
    ]
    finding = _find_exactly(watched, accepted) if _is_any_suspect(watched) else None
    if finding is None or optimizer is None or finding.parameter not in named:
        return finding
    return _explain(finding, named[finding.parameter], optimizer)


def find_bad_weights(model: nn.Module, accepted: Collection[str] = ()) -> dict[str, str]:
    """Returns the kind (`"nan"` or `"inf"`) of each non-finite parameter. Inf in a frozen one is a mask; `accepted` are others in
    which it is not bad."""
    named = {name: p for name, p in model.named_parameters() if not p.is_meta and is_plain(local(p))}
    bad = find_nonfinite(named.items())
    judged = {name for name, parameter in named.items() if parameter.requires_grad and name not in accepted}
    return {name: kind for name, kind in bad.items() if kind == "nan" or name in judged}


@torch.no_grad()
def _is_any_suspect(watched: list[StateTensor]) -> bool:
    """The one host read of a check: the largest norm of each device and dtype, buffers apart.

    Kernels over lists are fused on accelerators only if all tensors of a list share device and dtype.
    """
    groups: dict[tuple[str, torch.dtype, bool], list[StateTensor]] = {}
    for each in watched:
        groups.setdefault((str(each.tensor.device), each.tensor.dtype, each.may_be_inf), []).append(each)
    # Accelerators first: results from the host are then copied there, and all are read at once.
    ordered = [groups[key] for key in sorted(groups, key=lambda key: key[0] == "cpu")]
    norms = [foreach_norm([each.tensor for each in group], 2) for group in ordered]
    read = read_host([torch.stack(group).amax() for group in norms])
    return any(group[0].is_bad(largest) for group, largest in zip(ordered, read, strict=True))


@torch.no_grad()
def _find_exactly(watched: list[StateTensor], accepted: Collection[str]) -> StateFinding | None:
    """Returns the first bad tensor, in the order parameter, state, buffer, and its bad entries."""
    largest = read_host(magnitudes([each.tensor for each in watched]))
    found = [
        (each, "nan" if math.isnan(value) else "inf")
        for each, value in zip(watched, largest, strict=True)
        if each.is_bad(value)
    ]
    if not found:
        return None
    first, kind = found[0]
    entries = torch.isnan(first.tensor) if first.may_be_inf else ~torch.isfinite(first.tensor)
    return StateFinding(
        parameter=first.owner,
        state=first.state,
        kind=kind,
        num_bad=int(entries.sum()),
        num_entries=entries.numel(),
        rows=find_rows(entries),
        bad={each.name: kind for each, kind in found},
        is_shard=first.is_shard,
        is_buffer=first.may_be_inf and first.name not in accepted,
    )


def _explain(finding: StateFinding, parameter: Tensor, optimizer: Optimizer) -> StateFinding:
    """Adds the update that made a parameter or its state non-finite, and settings that would have helped."""
    examine = examine_update if finding.state is None else examine_state
    update = examine(optimizer, [(finding.parameter, parameter)])
    if update is None:
        return finding
    return replace(finding, update=update, remedies=try_update_remedies(optimizer, update, parameter))


def format_finding(finding: StateFinding, rank: int | None = None) -> str:
    """Returns a clause that names tensor, kind, rows and cause; `rank` is the one that holds the shard of a sharded tensor."""
    own = f"{'buffer' if finding.is_buffer else 'parameter'} {finding.parameter}"
    what = own if finding.state is None else f"optimizer state {finding.state} of {finding.parameter}"
    kind = "NaN" if finding.kind == "nan" else "inf"
    message = f"{what} contains {kind} in {finding.num_bad} of {finding.num_entries} entries"
    if finding.rows:
        shown = ", ".join(map(str, finding.rows)) + (", ..." if len(finding.rows) == SHOWN_ROWS else "")
        shard = f" of the shard on rank {rank}" if finding.is_shard and rank is not None else ""
        message += f" ({'row' if len(finding.rows) == 1 else 'rows'} {shown}{shard})"
    if finding.update is not None:
        message += f"; {finding.update.message}"
    others = len(finding.bad) - 1
    return message + (f" ({others} more {'tensor is' if others == 1 else 'tensors are'} non-finite)" if others else "")


def _read_remedies(found: JsonObject) -> tuple[Remedy, ...]:
    return tuple(Remedy(**remedy) for remedy in found["remedies"])


def _format_advice(remedies: Sequence[Remedy]) -> str:
    """Returns a sentence about the best remedy, empty without any."""
    best = next((remedy for remedy in remedies if remedy.works), None)
    if best is not None:
        return f" This would have helped, as tried on a copy: {best.name} ({best.note})."
    untried = next((remedy for remedy in remedies if not remedy.tried), None)
    return "" if untried is None else f" This may help: {untried.name} ({untried.note})."


@dataclass(eq=False)
class WeightMonitor(Monitor):
    """Checks weights and optimizer state every N steps and before a checkpoint is saved, even with a period of 0.

    A check makes one host read and, with several ranks, one small reduction, by which all ranks learn whether any of them
    found a non-finite tensor. If so, they exchange findings and rank 0 writes one event; tensors are reported once.
    """

    _: KW_ONLY
    optimizer: Optimizer
    acts: bool = True  # whether a non-finite tensor is a reason to halt, or only reported
    reported: set[str] = field(default_factory=set, init=False)
    ignored: frozenset[str] = field(default=frozenset(), init=False)  # bad from the start, which the policy accepts

    def __post_init__(self) -> None:
        # What is not finite before the first update is so by design. The magnitudes are read once something is found bad.
        named: list[tuple[str, Tensor]] = list(self.model.named_parameters())
        watched = list(list_state_tensors(named, None, name_saved_buffers(self.model)))
        self._initial = [(each.name, each.may_be_inf) for each in watched]
        with torch.no_grad():
            self._initial_dev = magnitudes([each.tensor for each in watched])

    @cached_property
    def accepted(self) -> frozenset[str]:
        """The parameters that contained inf, and the buffers that contained NaN, before the first update. NaN in a parameter is
        never accepted."""
        read = read_host(self._initial_dev)
        return frozenset(
            name
            for (name, is_buffer), largest in zip(self._initial, read, strict=True)
            if (math.isnan(largest) if is_buffer else math.isinf(largest))
        )

    def after_update(self, step: int) -> Failure | None:
        """Checks weights and optimizer state if a check is due."""
        return self.check_before_save(step) if self.is_due(step) else None

    def is_sound(self) -> bool:
        """Returns whether weights and optimizer state of this rank are finite."""
        return self._find() is None

    def check_before_save(self, step: int) -> Failure | None:
        """Checks weights and optimizer state now, on every rank; returns why the run cannot continue, the same on every rank."""
        finding = self._find()
        mine = None if finding is None else (strict(asdict(finding)), format_finding(finding, self.ranks.rank))
        if not self.ranks.any(mine is not None):
            return None
        reports = [(rank, *report) for rank, report in enumerate(self.ranks.gather(mine)) if report is not None]
        # A parameter goes before a state, whichever ranks they were found on.
        rank, found, message = min(reports, key=lambda report: (report[1]["state"] is not None, report[0]))
        bad = {name: kind for _, each, _ in reports for name, kind in each["bad"].items()}
        event = None if self.reported.issuperset(bad) else self._make_event(step, rank, found, message, bad)
        self.reported.update(bad)
        if self.acts:
            advice = _format_advice(_read_remedies(found))
            return Failure(f"Training was halted at step {step}: {message}.{advice}", event)
        if event is not None:
            self.journal.write_once(event)
        return None

    def load_state_dict(self, state: JsonObject) -> None:
        """Reports tensors again that are bad again: the run continues from another state."""
        self.reported.clear()

    def check_start(self, step: int, halts: bool) -> Failure | None:
        failure = self.check_before_save(step)
        bad = self.reported.copy()
        if failure is None or halts:
            return failure and replace(failure, reason=f"{failure.reason} {BAD_START}")
        if failure.event is not None:
            self.journal.write_once(failure.event)
        self.ignored = frozenset(bad)
        return None

    def fail_exchange(self, stage: str, step: int) -> None:
        """Fails the check that the other ranks make now."""
        if stage in ("check_start", "check_before_save") or (stage == "after_update" and self.is_due(step)):
            self.ranks.fail()

    def _find(self) -> StateFinding | None:
        """Checks this rank; what was not finite before the first update is accepted."""
        finding = check_state(self.model, self.optimizer, (), self.ignored)
        return finding if finding is None else check_state(self.model, self.optimizer, self.accepted, self.ignored)

    def _make_event(self, step: int, rank: int, found: JsonObject, message: str, bad: dict[str, str]) -> Event:
        is_state, update = found["state"] is not None, found["update"]
        values = {key: found[key] for key in ("state", "kind", "num_bad", "num_entries", "rows")}
        values |= {"num_bad_tensors": len(bad), "bad_tensors": dict(list(bad.items())[:SHOWN_TENSORS])}
        cause = Cause.OPTIMIZER_STATE if is_state else Cause.PARAM_NONFINITE
        if update is not None:
            cause = Cause(update["cause"])
            values |= {key: update[key] for key in ("learning_rate", "eps")}
        phase = "optimizer" if is_state or update is not None else "parameter"
        return Event(
            step,
            Signal.OPTIMIZER_NONFINITE if is_state else Signal.PARAM_NONFINITE,
            Action.OBSERVED,
            f"At step {step}, {message}.",
            rank=rank,
            values=values,
            culprit=Culprit(phase=phase, parameter=found["parameter"]),
            cause=cause,
            remedies=_read_remedies(found),
        )
