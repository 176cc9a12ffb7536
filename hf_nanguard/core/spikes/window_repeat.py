"""The steps since the last snapshot with and without the rows that are to blame: what these rows did to the run.

A run that is repeated from the snapshot without these rows is the same run up to the step that has them, so only this step is run
again, from the state it began with: its micro-batches, the clip, the update; then the loss of its other samples. That is done twice,
with all rows and without those to blame. The update is one of a copy of the optimizer, and weights, gradients, buffers and random
state are put back.

It costs two steps, up to eight passes, a copy of the trainable weights in host memory and one of them and of the optimizer on the
device. Not repeated: a step whose samples of a rank are all to blame, an optimizer that cannot be copied.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...boundary import attempt
from ..autopsy.evidence.suspect_batch import SuspectBatch
from ..event import JsonValue
from ..finite import read_host
from ..ranks import Ranks
from ..rerun.host_copy import wait_for_copies
from ..rerun.micro_batch import AccumulationGroup, MicroBatch
from ..rerun.runner import Runner
from ..rerun.snapshot import Weights
from .spike_examination import SampleReading

MAX_MEASURED = 4  # micro-batches whose other samples are measured after the update
SAME = 0.01  # a step whose loss differs by more than this share when it is run again cannot be compared


@dataclass(frozen=True)
class LossWindow:
    """The losses of the steps since a snapshot, as the run has read them."""

    snapshot_step: int
    steps: list[int]
    losses: list[float]


class CannotRepeatError(Exception):
    """The step cannot be run again to be compared. Raised on every rank alike."""


def repeat_window(
    window: LossWindow,
    group: AccumulationGroup,
    runner: Runner,
    step: int,
    loss: float,
    blamed: Sequence[SampleReading],
    ranks: Ranks,
) -> dict[str, JsonValue]:
    """Returns both curves for an event, or why there are none. Every rank must call it.

    `window` has the steps before this one, whose micro-batches are held in `group`; `blamed` are samples of all ranks."""
    try:
        rest = list(_leave_out(group, runner, [each for each in blamed if each.rank == ranks.rank]))
        num_left = ranks.gather(len(rest))
        if not all(num_left):
            raise CannotRepeatError("a rank has no other sample in this step")
        sizes = [len(group.micro_batches)] * ranks.size
        again = _run_step(group, runner, group.micro_batches, sizes, rest, ranks)
        if ranks.any(not abs(again.loss - loss) <= SAME * abs(loss)):
            raise CannotRepeatError(f"run again, the step has a loss of {again.loss:.4g}")
        without = _run_step(group, runner, rest, num_left, rest, ranks)
        curve = _average(ranks, [*window.losses, loss, again.after, without.loss, without.after])
        before, (full, after, cut, after_cut) = curve[: len(window.losses)], curve[len(window.losses) :]
        steps: list[JsonValue] = [*window.steps, step]
        return {
            "snapshot_step": window.snapshot_step,
            "steps": steps,
            "with_rows": [*before, full],
            "without_rows": [*before, cut],
            "others_after": {"with_rows": after, "without_rows": after_cut},
        }
    except CannotRepeatError as error:
        return {"why_not": str(error)}


@dataclass(frozen=True)
class RepeatedStep:
    """The loss of a repeated step, and that of its other samples after its update; those of this rank."""

    loss: float
    after: float


def _leave_out(group: AccumulationGroup, runner: Runner, blamed: Sequence[SampleReading]) -> Iterator[MicroBatch]:
    """Yields the micro-batches without the samples to blame."""
    for micro in group.micro_batches:
        bad = {reading.sample for reading in blamed if reading.micro_step == micro.index}
        if not bad:
            yield micro
            continue
        suspect = SuspectBatch(runner, micro, None)
        if rest := [sample for sample in range(suspect.num_samples or 1) if sample not in bad]:
            yield suspect.part(rest)


def _run_step(
    group: AccumulationGroup,
    runner: Runner,
    micros: list[MicroBatch],
    numbers: list[int],
    others: list[MicroBatch],
    ranks: Ranks,
) -> RepeatedStep:
    """Runs micro-batches as the whole step, and then the others with the weights after it."""
    with runner.isolated():
        losses = runner.rerun(group, micros, runner.regroup(micros, numbers))
    norm = runner.measure()
    if runner.max_grad_norm:
        runner.clip(runner.max_grad_norm, norm)
    updated = attempt(lambda: _update_copy(runner.optimizer), lambda error: None)
    if ranks.any(updated is None) or updated is None:
        raise CannotRepeatError("its optimizer cannot be copied")
    values = read_host(losses)
    with _updated_weights(runner, updated):
        measured = [SuspectBatch(runner, micro, None).measure()[0] for micro in others[:MAX_MEASURED]]
    return RepeatedStep(runner.mean_loss(values), sum(measured) / len(measured))


def _update_copy(optimizer: Optimizer | None) -> dict[Tensor, Tensor] | None:
    """Returns what a step makes of each parameter, by a copy of the optimizer: with its state and gradients, without its hooks."""
    if optimizer is None:
        return None
    clone = copy.deepcopy(optimizer)
    copies = dict(zip(_list_parameters(optimizer), _list_parameters(clone), strict=True))
    for parameter, copied in copies.items():
        copied.grad = parameter.grad
    with torch.enable_grad():  # as in a training loop
        clone.step()
    return {parameter: copied.detach() for parameter, copied in copies.items()}


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def _updated_weights(runner: Runner, updated: dict[Tensor, Tensor]) -> Iterator[None]:
    """Gives parameters other values inside the block."""
    weights = Weights(runner.model)
    saved = weights.copy(None)
    try:
        with torch.no_grad():
            for parameter, value in updated.items():
                parameter.copy_(value)
        yield
    finally:
        wait_for_copies()
        weights.restore(saved, 0)


def _average(ranks: Ranks, values: list[float]) -> list[float]:
    """Returns the means over all ranks."""
    reports = ranks.gather(values)
    return [sum(each) / len(reports) for each in zip(*reports, strict=True)]
