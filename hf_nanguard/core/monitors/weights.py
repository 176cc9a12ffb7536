"""Weights and optimizer state, looked at every so many steps and before every save: are they finite still?

Trainable parameters, every float tensor the optimizer keeps and the buffers a checkpoint holds go through one
`_foreach_norm` for each dtype; each device reduces its part to a few numbers, which are read together. The 2-norm misses no
NaN and no inf and takes a twentieth of the time that largest magnitudes take on a CPU, but of huge finite numbers it is inf as
well: so what it finds is confirmed by a second, exact look, which names the tensor, its rows and the update that made it so.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..event import Culprit, Event, strict
from ..finite import find_nonfinite, local, magnitudes, read_host
from ..journal import Journal
from ..optimizer.update import UpdateFinding, examine_state, examine_update, try_update_remedies
from ..ranks import Ranks
from ..state_tensors import Watched, is_plain, list_watched, name_saved_buffers
from ..torch_private import foreach_norm
from ..vocabulary import Action, Cause, Signal
from .base import Monitor

SHOWN_ROWS = 8
SHOWN_TENSORS = 12


@dataclass(frozen=True)
class StateFinding:
    """A tensor that holds a bad number. Plain values only.

    Args:
        parameter (`str`):
            The parameter, or the buffer.
        state (`str`, *optional*):
            The tensor of the optimizer's state; `None` if the parameter itself is bad.
        kind (`str`):
            `"nan"` (any NaN inside) or `"inf"`.
        num_bad, num_entries (`int`):
            How many entries are bad, and how many there are (on this rank).
        rows (`tuple[int, ...]`):
            The first rows with a bad entry (of the part on this rank).
        bad (`dict[str, str]`):
            All bad tensors with their kinds, parameters first; an optimizer's state as `parameter/state`.
        is_shard (`bool`):
            Whether other ranks hold other parts of it.
        is_buffer (`bool`):
            Whether it is a buffer of the model, and no parameter.
        update (`UpdateFinding`, *optional*):
            The update that made it so, if the optimizer holds evidence.
        remedies (`tuple[dict, ...]`):
            What was tried.
    """

    parameter: str
    state: str | None
    kind: str
    num_bad: int
    num_entries: int
    rows: tuple[int, ...]
    bad: dict[str, str]
    is_shard: bool = False
    is_buffer: bool = False
    update: UpdateFinding | None = None
    remedies: tuple[dict[str, Any], ...] = ()


def check_state(
    named_parameters: Iterable[tuple[str, Tensor]],
    optimizer: Any = None,
    named_buffers: Iterable[tuple[str, Tensor]] = (),
) -> StateFinding | None:
    """Looks for a bad number in weights and optimizer state, by one host read as long as there is none.

    Args:
        named_parameters (`Iterable[tuple[str, Tensor]]`):
            Parameters by name; frozen ones are passed by.
        optimizer (`torch.optim.Optimizer`, *optional*):
            The optimizer, or anything with its `param_groups` and `state`.
        named_buffers (`Iterable[tuple[str, Tensor]]`, *optional*):
            Buffers by name, in which only NaN is bad.

    Returns:
        `StateFinding | None`: the first bad parameter, else the first bad state, as far as it lives on this rank.

    Example:

    ```python
    finding = check_state(model.named_parameters(), optimizer)
    if finding is not None:
        raise SystemExit(tell(finding))
    ```
    """
    named = list(named_parameters)
    watched = list(list_watched(named, optimizer, named_buffers))
    finding = _look_closer(watched) if _is_any_suspect(watched) else None
    return None if finding is None else _explain(finding, named, optimizer)


def find_unsound(model: nn.Module, optimizer: Any = None, excused: Collection[str] = ()) -> StateFinding | None:
    """Looks for a bad number in a model and its optimizer, as [`check_state`] does, but for buffers that are `excused`."""
    buffers = ((name, buffer) for name, buffer in name_saved_buffers(model) if name not in excused)
    return check_state(model.named_parameters(), optimizer, buffers)


def find_bad_weights(model: nn.Module) -> dict[str, str]:
    """Names the parameters, frozen ones too, that hold a bad number; an infinity in a frozen one is a mask."""
    named = {name: p for name, p in model.named_parameters() if not p.is_meta and is_plain(local(p))}
    bad = find_nonfinite(named.items())
    return {name: kind for name, kind in bad.items() if kind == "nan" or named[name].requires_grad}


@torch.no_grad()
def _is_any_suspect(watched: list[Watched]) -> bool:
    """The one host read of a check: the largest norms by device and dtype, healthy infinities apart.

    Kernels over lists are fused on accelerators only if all of a list are of one device and dtype.
    """
    heaps: dict[tuple[str, torch.dtype, bool], list[Watched]] = {}
    for each in watched:
        heaps.setdefault((str(each.tensor.device), each.tensor.dtype, each.may_be_inf), []).append(each)
    # Accelerators first: what lives on the host then goes to them, and all comes back in one read.
    ordered = [heaps[place] for place in sorted(heaps, key=lambda place: place[0] == "cpu")]
    norms = [foreach_norm([each.tensor for each in heap], 2) for heap in ordered]
    read = read_host([torch.stack(heap).amax() for heap in norms])
    return any(heap[0].is_bad(largest) for heap, largest in zip(ordered, read, strict=True))


@torch.no_grad()
def _look_closer(watched: list[Watched]) -> StateFinding | None:
    """Names the first bad tensor, in the order parameter, state, buffer, and what is bad inside."""
    largest = read_host(magnitudes([each.tensor for each in watched]))
    found = [(each, value) for each, value in zip(watched, largest, strict=True) if each.is_bad(value)]
    if not found:
        return None
    first, value = found[0]
    entries = torch.isnan(first.tensor) if first.may_be_inf else ~torch.isfinite(first.tensor)
    rows = (entries if entries.ndim < 2 else entries.flatten(1).any(1)).reshape(-1).nonzero().flatten()
    bad = {each.name: "nan" if math.isnan(size) else "inf" for each, size in found}
    kind = "nan" if math.isnan(value) else "inf"
    shown = tuple(rows[:SHOWN_ROWS].tolist())
    return StateFinding(
        first.owner, first.state, kind, int(entries.sum()), entries.numel(), shown, bad, first.is_shard, first.may_be_inf
    )  # fmt: skip


def _explain(finding: StateFinding, named: list[tuple[str, Tensor]], optimizer: Any) -> StateFinding:
    """Adds the update that made it so, and what would help."""
    suspects = [(name, parameter) for name, parameter in named if name == finding.parameter]
    if optimizer is None or not suspects:
        return finding
    examine = examine_update if finding.state is None else examine_state
    update = examine(optimizer, suspects)
    if update is None:
        return finding
    tried = try_update_remedies(optimizer, update, suspects[0][1])
    return replace(finding, update=update, remedies=tuple(asdict(remedy) for remedy in tried))


def tell(finding: StateFinding, rank: int | None = None) -> str:
    """Returns a clause that names tensor, kind, rows and cause.

    Args:
        finding (`StateFinding`):
            What was found.
        rank (`int`, *optional*):
            Whose part of a sharded tensor it was.
    """
    own = f"{'buffer' if finding.is_buffer else 'parameter'} {finding.parameter}"
    what = own if finding.state is None else f"{finding.state} of {finding.parameter}"
    kind = "NaN" if finding.kind == "nan" else "inf"
    message = f"{what} holds {kind}: {finding.num_bad} of {finding.num_entries} entries are bad"
    if finding.rows:
        more = ", ..." if len(finding.rows) == SHOWN_ROWS else ""
        message += f", in rows {', '.join(map(str, finding.rows))}{more}"
        message += f" of rank {rank}'s part" if finding.is_shard and rank is not None else ""
    if finding.update is not None:
        message += f"; {finding.update.message}"
    others = len(finding.bad) - 1
    return message + (f" ({others} more {'tensor is' if others == 1 else 'tensors are'} bad)" if others else "")


def _advise(remedies: tuple[dict[str, Any], ...]) -> str:
    """Returns a sentence on the best remedy, if there is any."""
    best = next((remedy for remedy in remedies if remedy["works"]), None)
    if best is not None:
        return f" What would have helped, tried on a copy: {best['name']} ({best['note']})."
    untried = next((remedy for remedy in remedies if not remedy["tried"]), None)
    return "" if untried is None else f" What may help: {untried['name']} ({untried['note']})."


class SoundnessMonitor(Monitor):
    """Checks weights and optimizer state every so many steps, and before a checkpoint is made of them.

    A check takes one host read and, on several ranks, one small reduction, by which all of them learn whether anybody's part
    is bad. If so, they tell each other what they found, and rank 0 writes one event; tensors it has named are not news again.

    Args:
        model (`nn.Module`):
            The model without wrappers.
        optimizer (`torch.optim.Optimizer`):
            Its optimizer.
        journal (`Journal`), ranks (`Ranks`):
            Where events go, and the processes that train together.
        every_n_steps (`int`, *optional*, defaults to `100`):
            The period; 0 for never but before a checkpoint is saved.
        acts (`bool`, *optional*, defaults to `True`):
            Whether a bad number is a reason to halt, or only observed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        journal: Journal,
        ranks: Ranks,
        every_n_steps: int = 100,
        acts: bool = True,
    ):
        super().__init__(every_n_steps)
        self.model = model
        self.optimizer = optimizer
        self.journal = journal
        self.ranks = ranks
        self.acts = acts
        self.told: set[str] = set()
        # A buffer that held NaN before the first update is not this run's doing. On the device, until one is found bad.
        watched = list(list_watched([], None, name_saved_buffers(model)))
        with torch.no_grad():
            norms = foreach_norm([each.tensor for each in watched], 2)
        self.at_first = dict(zip((each.name for each in watched), norms, strict=True))
        self.excused: set[str] | None = None

    def after_update(self, step: int) -> str | None:
        """Looks, if the step is due."""
        return self.check(step) if self.is_due(step) else None

    def check_before_save(self, step: int) -> str | None:
        """Looks at what is about to be saved; returns a reason not to, the same on every rank."""
        return self.check(step)

    def find(self) -> StateFinding | None:
        """Looks at the part of this rank, due or not, and leaves alone what was NaN before the run began."""
        finding = find_unsound(self.model, self.optimizer, self.excused or ())
        if finding is None or not finding.is_buffer or self.excused is not None:
            return finding
        read = read_host(list(self.at_first.values()))
        self.excused = {name for name, norm in zip(self.at_first, read, strict=True) if math.isnan(norm)}
        return find_unsound(self.model, self.optimizer, self.excused)

    def check(self, step: int) -> str | None:
        """Looks now, due or not. Every rank must call it."""
        finding = self.find()
        if not self.ranks.any(finding is not None):
            return None
        report = None if finding is None else (strict(asdict(finding)), tell(finding, self.ranks.rank))
        reports = self.ranks.gather(report)
        # A parameter goes before a state, whichever ranks they were found on.
        rank, (found, message) = min(
            ((rank, told) for rank, told in enumerate(reports) if told is not None),
            key=lambda each: (each[1][0]["state"] is not None, each[0]),
        )
        bad = {name: kind for told in reports if told is not None for name, kind in told[0]["bad"].items()}
        if not self.told.issuperset(bad):
            self.journal.write_once(self._make_event(step, rank, found, message, bad))
        self.told.update(bad)
        if not self.acts:
            return None
        return f"Training was halted at step {step}: {message}.{_advise(found['remedies'])}"

    def _make_event(self, step: int, rank: int, found: dict[str, Any], message: str, bad: dict[str, str]) -> Event:
        of_state, update = found["state"] is not None, found["update"]
        values = {key: found[key] for key in ("state", "kind", "num_bad", "num_entries", "rows")} | {
            "num_bad_tensors": len(bad),
            "bad_tensors": dict(list(bad.items())[:SHOWN_TENSORS]),
        }
        cause = Cause.OPTIMIZER_STATE if of_state else Cause.PARAM_NONFINITE
        if update is not None:
            cause = Cause(update["cause"])
            values |= {key: update[key] for key in ("learning_rate", "eps")}
        phase = "optimizer" if of_state or update is not None else "parameter"
        signal = Signal.OPTIMIZER_NONFINITE if of_state else Signal.PARAM_NONFINITE
        action = Action.HALTED if self.acts else Action.OBSERVED
        culprit = Culprit(phase=phase, parameter=found["parameter"])
        remedies = tuple(found["remedies"])
        return Event(step, signal, action, f"{message} at step {step}", None, rank, values, culprit, cause, remedies)
