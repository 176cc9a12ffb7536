"""Tries remedies on the bad micro-batch itself: each alters one replay and checks whether loss and gradients are finite.

Each costs one replay, and the memory of a second copy of the weights if these are cast
(`altered_model.py`); operators are bounded without a copy (`bounded_operators.py`). The model is unchanged afterwards.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ....boundary import attempt
from ....plain_text import quote_error
from ...event import Remedy
from ...rerun.nested_inputs import quote_name
from ...vocabulary import Cause
from ..evidence.suspect_batch import SuspectBatch
from ..evidence.verdict import Blame
from ..trace.origin import Origin
from .altered_model import LOW_PRECISION, in_precision, swapped, upcast_module, zeros_in
from .bounded_operators import BOUNDS, bounded

NO_TIME = "no time left"
Alter = Callable[[list[str]], AbstractContextManager]


@dataclass(frozen=True)
class Idea:
    """A remedy that may apply; name and note are those of its [`Remedy`]."""

    name: str
    note: str
    alter: Alter = lambda remarks: nullcontext()  # returns a context that alters the runs inside and may add remarks
    samples: list[int] | None = None  # which samples to run; all if `None`
    certain: bool = True  # if not, it applies only if the trial left a remark


def try_remedies(
    suspect: SuspectBatch, origin: Origin, blame: Blame, allowed: Callable[[], bool]
) -> tuple[Remedy, ...]:
    """Tries what may help on the bad micro-batch, starting with what follows from the cause.

    Gradients are cleared and kept buffers put back; parameters, buffers, modules and autocast are the same objects as
    before, also after a trial that raises. An exception in a trial counts as its outcome. `allowed` is called before each
    trial; once it returns `False`, the rest is returned as untried.
    """
    remedies: list[Remedy] = []
    in_time = True
    for idea in find_ideas(suspect, origin, blame):
        in_time = in_time and allowed()
        if in_time:
            remedy = _try(suspect, idea)
            remedies += [remedy] if remedy is not None else []
        elif idea.certain:
            remedies.append(Remedy(idea.name, tried=False, note=NO_TIME))
    return tuple(remedies)


def _try(suspect: SuspectBatch, idea: Idea) -> Remedy | None:
    remarks: list[str] = []
    suspect.runner.reset()

    def run() -> tuple[bool, str]:
        with idea.alter(remarks):
            outcome = suspect.run(idea.samples)
        if not math.isfinite(outcome.loss):
            return outcome.healthy, f"the loss was {outcome.loss}"
        why = f"the loss was finite, but {len(outcome.bad)} gradients were not"
        return outcome.healthy, why if outcome.bad else ""

    try:  # the user's code, in a precision that it was not written for
        works, failure = attempt(run, lambda error: (False, _describe_error(error)))
    finally:
        suspect.runner.reset()
    if not (idea.certain or remarks):
        return None
    return Remedy(idea.name, True, works, "; ".join(filter(None, (idea.note, *dict.fromkeys(remarks), failure))))


def _describe_error(error: Exception) -> str:
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
    return "out of memory" if out_of_memory else quote_error(error, 200)


def find_ideas(suspect: SuspectBatch, origin: Origin, blame: Blame) -> Iterator[Idea]:
    """Yields what applies: first what addresses the cause, then the precision; rows are blamed last, because a model that
    is about to overflow does so on some rows first."""
    cause, weight = origin.cause, origin.parameter
    if cause in BOUNDS:
        name, note, rules = BOUNDS[cause]
        yield Idea(name, note, lambda _: bounded(rules))
    if cause is Cause.INPUT_NONFINITE and origin.leaf is not None and origin.leaf in suspect.fields:
        field = suspect.fields[origin.leaf]
        note = f"non-finite entries of {quote_name(origin.leaf)} as 0"
        yield Idea("fill_input", note, lambda _: suspect.changed_inputs(zeros_in(field)))
    weights = {**dict(suspect.model.named_parameters()), **dict(suspect.model.named_buffers())}
    if cause in (Cause.PARAM_NONFINITE, Cause.UNINITIALISED_WEIGHT) and weight in weights:  # not in a teacher's
        tensor = weights[weight]
        note = f"non-finite entries of {weight} as 0"
        yield Idea("initialise_weight", note, lambda _: swapped(suspect.runner, suspect.model, zeros_in(tensor)))
    if origin.leaf is None:  # no precision helps if a value was non-finite before the first operator
        yield from _find_precisions(suspect, origin)
    if blame.scope == "samples" and blame.samples and suspect.num_samples:
        rest = [sample for sample in range(suspect.num_samples) if sample not in blame.samples]
        if rest:
            yield Idea("drop_rows", f"{len(rest)} of {suspect.num_samples} samples left", samples=rest)


def _find_precisions(suspect: SuspectBatch, origin: Origin) -> Iterator[Idea]:
    model = suspect.model
    dtypes = {tensor.dtype for tensor in (*model.parameters(), *model.buffers())}
    dtype = getattr(torch, origin.dtype) if origin.dtype else None
    if dtype is not None:
        dtypes.add(dtype)
    if torch.float16 in dtypes:
        narrow = (torch.float16,)
        alter: Alter = lambda remarks: in_precision(suspect, narrow, torch.bfloat16, remarks)  # noqa: E731
        yield Idea("bfloat16", "float16 as bfloat16", alter)
    # Autocast can be seen only while it runs, so without another sign of low precision float32 is tried to find out.
    yield Idea(
        "float32",
        "model, inputs and operators in float32",
        lambda remarks: in_precision(suspect, LOW_PRECISION, torch.float32, remarks),
        certain=any(dtype in LOW_PRECISION for dtype in dtypes),
    )
    module = dict(model.named_modules()).get(origin.module) if origin.module else None
    if module is not None and dtype in LOW_PRECISION:
        note = f"{origin.module} in float32, its output as {origin.dtype} again"
        yield Idea("upcast_module", note, lambda remarks: upcast_module(suspect, module, dtype, remarks))
