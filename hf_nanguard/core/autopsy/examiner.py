"""The examination of a bad micro-batch, in the order of its worth: origin, data, repeat, remedies.

The origin takes one replay under a trace. What follows shares a budget of time; what the budget does not reach is marked
untried. Whatever goes wrong in here costs the explanation, never the run.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..event import Event
from ..journal import Journal
from ..optimizer.update import examine_update, try_update_remedies
from ..rerun.micro_batch import MicroBatch
from ..rerun.runner import Runner
from ..settings import Policy
from ..vocabulary import Action, Signal
from .blame import find_blame
from .bundle.writer import write_bundle
from .remedies.try_remedies import try_remedies
from .suspect_batch import SuspectBatch
from .trace.origin import Origin
from .verdict import Blame, Remedy, Verdict, format_verdict

logger = logging.getLogger("hf_nanguard")

TRACES_PER_AUTOPSY = 4
PATIENCE = 2.0
MAX_TEXTS = 2
FOLDER = "autopsy"


class Budget:
    """A stretch of time, and a word to the user when it gets long.

    Args:
        seconds (`float`):
            How long replays may go on after the origin was found.
        say (`Callable`, *optional*):
            Told what is being done, at most every two seconds, once it has taken longer than that.
    """

    def __init__(self, seconds: float, say: Callable[[str], None] | None = None):
        self.seconds = seconds
        self.say = say
        self.begun = self.told = time.monotonic()
        self.deadline = float("inf")
        self.stage = ""

    @contextmanager
    def patient(self, stage: str) -> Iterator[None]:
        """Surrounds something that cannot be asked on its way; it is told if it takes long."""
        self.stage = stage
        timer = threading.Timer(PATIENCE, lambda: None if self.say is None else self.say(f"{stage} ..."))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def start(self) -> None:
        """Begins to count."""
        self.deadline = time.monotonic() + self.seconds

    def allowed(self) -> bool:
        """Returns whether there is time for another replay."""
        now = time.monotonic()
        if self.say is not None and now - self.told > PATIENCE:
            self.told = now
            self.say(f"{self.stage} ({now - self.begun:.0f} s)")
        return now < self.deadline

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun


def examine(
    suspect: SuspectBatch, budget: Budget, origin: Origin | None = None, remedies: bool = True, text: bool = True
) -> Verdict:
    """Examines a bad micro-batch.

    Args:
        specimen (`SuspectBatch`):
            The micro-batch, ready to be run again.
        budget (`Budget`):
            How much time there is once the origin is known.
        origin (`Origin`, *optional*):
            Where the bad number was born, if that is known already.
        remedies (`bool`, *optional*, defaults to `True`):
            Whether to try remedies.
        text (`bool`, *optional*, defaults to `True`):
            Whether to decode the samples to blame.
    """
    with budget.patient("looking for the origin"):
        origin = origin or suspect.find_origin()
    budget.start()
    if origin is None:
        return Verdict(None, num_samples=suspect.num_samples, num_runs=suspect.num_runs, seconds=budget.spent)
    budget.stage = "looking for the samples it takes"
    blame = find_blame(suspect, origin, budget.allowed)
    blame = replace(blame, texts=read_texts(suspect, blame) if text else {})
    budget.stage = "looking whether it comes back"
    reproducible = (not suspect.run().healthy) if budget.allowed() else None
    origin, tried = trace_update(suspect, origin)
    if remedies and reproducible is not False:
        budget.stage = "trying remedies"
        tried += try_remedies(suspect, origin, blame, budget.allowed, origin.cause)
    return Verdict(origin, blame, reproducible, tried, suspect.num_samples, suspect.num_runs, round(budget.spent, 3))


def trace_update(suspect: SuspectBatch, origin: Origin) -> tuple[Origin, tuple[Remedy, ...]]:
    """Goes one step further back if a parameter was bad: to the optimizer update that made it so."""
    optimizer = suspect.runner.optimizer
    named = [(n, p) for n, p in suspect.model.named_parameters() if n == origin.parameter]
    update = examine_update(optimizer, named) if optimizer is not None and named else None
    if update is None:
        return origin, ()
    return replace(origin, phase="optimizer", cause=update.cause), try_update_remedies(optimizer, update, named[0][1])


def read_texts(suspect: SuspectBatch, blame: Blame) -> dict[int, str]:
    """Returns the text of the samples to blame, as far as the loop can decode it."""
    if blame.scope == "every_sample":
        return {}
    try:
        found = {sample: suspect.runner.decode(suspect.micro, sample) for sample in (blame.samples or [])[:MAX_TEXTS]}
    except Exception:  # a tokenizer that does not know the ids, e.g. the placeholders of images, may raise anything
        return {}
    return {sample: text for sample, text in found.items() if text}


class Examiner:
    """Decides which bad micro-batches are examined, and keeps what was found.

    Args:
        policy (`Policy`):
            Whether, how often and how long.
        journal (`Journal`):
            Where it is told when an autopsy fails.
        folder (`Path`, *optional*):
            The run's `nanguard` folder; without one no bundle is written.

    `spared` are the bad parameters that some samples were seen to do without.
    """

    def __init__(self, policy: Policy, journal: Journal, folder: Path | None = None):
        self.policy = policy
        self.journal = journal
        self.folder = folder
        self.known: dict[tuple, Verdict] = {}
        self.spared: set[str] = set()
        self.num_traces = 0
        self.told_out_of_sight = False
        self.told_finite: set[bool] = set()

    @property
    def due(self) -> bool:
        """Whether another micro-batch may be traced."""
        return self.policy.autopsy and self.num_traces < TRACES_PER_AUTOPSY * self.policy.max_autopsies

    def examine(self, runner: Runner, micro: MicroBatch, share: Any, step: int) -> Verdict | None:
        """Examines a bad micro-batch; `None` if it is not to be examined, or could not be.

        A fault that was examined before is only located again. Gradients, buffers and random state are left as the last
        replay had them: whoever calls goes on from a clean state of his own, or does this in `runner.undisturbed()`.
        """
        if not self.due:
            return None
        self.num_traces += 1
        try:
            verdict = self._examine(runner, micro, share, step)
            if verdict.spares_others and verdict.origin is not None and verdict.origin.parameter is not None:
                self.spared.add(verdict.origin.parameter)
            return verdict
        except torch.OutOfMemoryError as error:
            self._tell_failure(step, micro, f"out of memory: {_first_line(error)}")
        except Exception as error:  # any code of the user's may run in a replay; an explanation must not cost the run
            self._tell_failure(step, micro, f"{type(error).__name__}: {_first_line(error)}")
        return None

    def _examine(self, runner: Runner, micro: MicroBatch, share: Any, step: int) -> Verdict:
        suspect = SuspectBatch(runner, micro, share)
        say = lambda stage: logger.warning("hf_nanguard: autopsy of step %d: %s", step, stage)  # noqa: E731
        budget = Budget(self.policy.autopsy_seconds, say)
        with budget.patient("looking for the origin"):
            origin = suspect.find_origin()
        known = self.known.get(origin.signature) if origin is not None else None
        if known is not None or len(self.known) >= self.policy.max_autopsies or runner.lockstep:
            return self._locate(suspect, origin, known, budget, step)
        if origin is None:
            again = not suspect.run(compiled=True).healthy  # as the loop runs it, which is not how it can be traced
            verdict = Verdict(None, reproducible=again, num_runs=suspect.num_runs, seconds=round(budget.spent, 3))
            if again in self.told_finite:
                return verdict
            self.told_finite.add(again)
        else:
            verdict = examine(suspect, budget, origin, text=self.policy.bundle_text)
            verdict = self._write_bundle(suspect, verdict, step)
            self.known[origin.signature] = verdict
        self._tell(verdict, step, micro)
        return verdict

    def _tell(self, verdict: Verdict, step: int, micro: MicroBatch) -> None:
        """Logs the verdict, with the path of its bundle as a person can use it."""
        if verdict.bundle is not None and self.folder is not None:
            verdict = replace(verdict, bundle=str(self.folder / verdict.bundle))
        logger.warning(format_verdict(verdict, step, micro.index))

    def _locate(
        self, suspect: SuspectBatch, origin: Origin | None, known: Verdict | None, budget: Budget, step: int
    ) -> Verdict:
        """Says where it was, without another examination."""
        if origin is None:
            return Verdict(None, num_runs=suspect.num_runs, seconds=round(budget.spent, 3))
        blame = find_blame(suspect, origin, lambda: False)
        verdict = Verdict(
            origin, blame, num_samples=suspect.num_samples, num_runs=suspect.num_runs, seconds=round(budget.spent, 3),
            remedies=known.remedies if known is not None else (), bundle=known.bundle if known is not None else None,
        )  # fmt: skip
        if known is None and len(self.known) < self.policy.max_autopsies:
            self.known[origin.signature] = verdict
            self._tell(verdict, step, suspect.micro)
        return verdict

    def _write_bundle(self, suspect: SuspectBatch, verdict: Verdict, step: int) -> Verdict:
        if self.folder is None:
            return verdict
        try:
            path = write_bundle(
                self.folder / FOLDER / f"step-{step}",
                suspect,
                verdict,
                {**suspect.runner.facts(suspect.share), "rows": suspect.micro.rows},
                weights=self.policy.bundle_weights,
                text=self.policy.bundle_text,
            )
        except Exception as error:  # a full disk, or anything in the inputs that cannot be written
            self._tell_failure(
                step, suspect.micro, f"no bundle was written: {type(error).__name__}: {_first_line(error)}"
            )
            return verdict
        return replace(verdict, bundle=path.relative_to(self.folder).as_posix())

    def tell_out_of_sight(self, step: int) -> None:
        """Says, once, that the fault lies where this runner cannot look."""
        if not self.told_out_of_sight and self.journal.ranks.rank == 0:
            logger.warning(
                "hf_nanguard: no autopsy of step %d: the model's own forward and backward are finite when run again, so the "
                "fault lies in the loss or in a hook on the model, which a callback does not see. attach(trainer) does.",
                step,
            )
        self.told_out_of_sight = True

    def _tell_failure(self, step: int, micro: MicroBatch, reason: str) -> None:
        message = f"autopsy of micro-batch {micro.index} of step {step}: {reason}"
        rank = self.journal.ranks.rank
        self.journal.write(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message, micro.index, rank))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
