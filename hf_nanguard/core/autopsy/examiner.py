"""Examines a bad micro-batch, most useful findings first: origin, samples, reproducibility, remedies, bundle.

Finding the origin takes one replay under a trace. Everything after it shares a time budget; what the budget does not reach
is marked untried. An error in here costs the explanation, never the run.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...boundary import attempt
from ...plain_text import cut
from ..event import Remedy
from ..journal import Journal
from ..optimizer.bad_update import examine_update, try_update_remedies
from ..rerun.micro_batch import MicroBatch
from ..rerun.runner import Runner
from ..settings import Policy
from .bundle.writer import write_bundle
from .evidence.blamed_samples import find_blame
from .evidence.suspect_batch import SuspectBatch
from .evidence.verdict import MAX_TEXT, Blame, Verdict, format_verdict
from .remedies.try_remedies import try_remedies
from .trace.origin import Origin

logger = logging.getLogger("hf_nanguard")

TRACES_PER_AUTOPSY = 4
PATIENCE = 2.0
MAX_TEXTS = 2
FOLDER = "autopsy"


class Budget:
    """The time that one autopsy may take.

    Replays may continue for `seconds` after the origin was found. `report` is called with the current stage, at most every
    `PATIENCE` seconds, once that much time has passed.
    """

    def __init__(self, seconds: float, report: Callable[[str], None] | None = None):
        self.seconds = seconds
        self.report = report or (lambda stage: None)
        self.start = self.reported = time.monotonic()
        self.deadline = float("inf")
        self.stage = ""

    def find_origin(self, suspect: SuspectBatch) -> Origin | None:
        """Traces the micro-batch, however long that takes, and starts the countdown."""
        timer = threading.Timer(PATIENCE, self.report, ["looking for the origin ..."])  # a trace never calls `allowed`
        timer.daemon = True
        timer.start()
        try:
            return suspect.find_origin()
        finally:
            timer.cancel()
            self.begin()

    def begin(self) -> None:
        """Starts the countdown."""
        self.deadline = time.monotonic() + self.seconds

    def enter(self, stage: str) -> None:
        """Names what the next replays are for."""
        self.stage = stage

    def allowed(self) -> bool:
        """Returns whether there is time for another replay."""
        now = time.monotonic()
        if now - self.reported > PATIENCE:
            self.reported = now
            self.report(f"{self.stage} ({now - self.start:.0f} s)")
        return now < self.deadline

    def conclude(self, suspect: SuspectBatch, verdict: Verdict) -> Verdict:
        """Returns the verdict with the number of samples and what the autopsy took."""
        seconds = round(time.monotonic() - self.start, 3)
        return replace(verdict, num_samples=suspect.num_samples, num_runs=suspect.num_runs, seconds=seconds)


def examine(suspect: SuspectBatch, budget: Budget, remedies: bool = True) -> Verdict:
    """Examines a bad micro-batch and, if `remedies` is true, tries remedies."""
    origin = budget.find_origin(suspect)
    found = budget.conclude(suspect, Verdict(None)) if origin is None else explain(suspect, origin, budget, remedies)
    return found.shown()


def explain(suspect: SuspectBatch, origin: Origin, budget: Budget, remedies: bool = True) -> Verdict:
    """Examines a bad micro-batch whose origin is known."""
    budget.enter("looking for the samples that cause it")
    blame = find_blame(suspect, origin, budget.allowed)
    blame = replace(blame, texts=read_texts(suspect, blame))
    budget.enter("checking whether it is reproducible")
    reproducible = (not suspect.run().healthy) if budget.allowed() else None
    origin, tried = trace_update(suspect, origin)
    if remedies and reproducible is not False:
        budget.enter("trying remedies")
        tried += try_remedies(suspect, origin, blame, budget.allowed)
    return budget.conclude(suspect, Verdict(origin, blame, reproducible, tried))


def trace_update(suspect: SuspectBatch, origin: Origin) -> tuple[Origin, tuple[Remedy, ...]]:
    """Goes one step further back if a parameter was not finite: to the optimizer update that wrote it."""
    optimizer = suspect.runner.optimizer
    named = [(n, p) for n, p in suspect.model.named_parameters() if n == origin.parameter]
    if optimizer is None or not named or (update := examine_update(optimizer, named)) is None:
        return origin, ()
    return replace(origin, phase="optimizer", cause=update.cause), try_update_remedies(optimizer, update, named[0][1])


def read_texts(suspect: SuspectBatch, blame: Blame) -> dict[int, str]:
    """Returns the text of the samples to blame, as far as the loop can decode it, behind what identifies their dataset rows."""
    if blame.scope == "every_sample":
        return {}
    rows, ids = suspect.rows or [], suspect.micro.ids

    def read(sample: int) -> str:
        text = suspect.decode(sample)
        name = suspect.runner.name_row(rows[sample] if sample < len(rows) else None, text)
        name = name or (ids[sample] if suspect.num_samples == len(ids) else None)
        return " ".join(cut(part, MAX_TEXT) for part in (name and f"({name})", text) if part)

    # A tokenizer may not know the ids, e.g. the placeholders of images.
    chosen = (blame.samples or [])[:MAX_TEXTS]
    found = attempt(lambda: {sample: read(sample) for sample in chosen}, lambda error: {})
    return {sample: text for sample, text in found.items() if text}


class Examiner:
    """Decides which bad micro-batches are examined, and keeps the verdicts.

    `folder` is the run's `nanguard` folder; without one no bundle is written. `spared` holds the non-finite parameters that
    some samples do not use, as an autopsy has shown.
    """

    def __init__(self, policy: Policy, journal: Journal, folder: Path | None = None):
        self.policy = policy
        self.journal = journal
        self.boundary, self.ranks = journal.boundary, journal.ranks
        self.begin_run(folder)

    def begin_run(self, folder: Path | None) -> None:
        """Begins another run, with all the autopsies that it may have and a folder for their bundles."""
        self.folder = folder
        self.known: dict[tuple, Verdict] = {}
        self.spared: set[str] = set()
        self.num_traces = 0
        self.logged_finite: set[bool] = set()  # the outcomes of a finite trace that were logged

    @property
    def due(self) -> bool:
        """Whether another micro-batch may be traced."""
        return self.policy.autopsy and self.num_traces < TRACES_PER_AUTOPSY * self.policy.max_autopsies

    def examine(
        self, runner: Runner, micro: MicroBatch, weight: object, step: int, others_pass: bool = False
    ) -> Verdict | None:
        """Examines a bad micro-batch; `None` if no more are examined, or if the examination failed.

        `others_pass` says that other micro-batches were finite with the same weights. A fault that was examined before is only located again. Gradients, buffers and random state are left as the last
        replay had them: the caller continues from a clean state of its own, or calls this in `runner.undisturbed()`.
        """
        if not self.due:
            return None
        self.num_traces += 1
        verdict = self.boundary.call("autopsy", self._examine, runner, micro, weight, step, others_pass)
        if verdict is None:
            return None
        if verdict.spares_others and verdict.origin is not None and verdict.origin.parameter is not None:
            self.spared.add(verdict.origin.parameter)
        return verdict

    def _examine(
        self, runner: Runner, micro: MicroBatch, weight: object, step: int, others_pass: bool
    ) -> Verdict | None:
        with self.boundary.not_survivable(runner.lockstep and self.ranks.size > 1):
            return self._examine_suspect(SuspectBatch(runner, micro, weight, others_pass=others_pass), step)

    def _examine_suspect(self, suspect: SuspectBatch, step: int) -> Verdict:
        budget = Budget(
            self.policy.autopsy_seconds,
            lambda stage: logger.warning("hf_nanguard: autopsy of step %d: %s", step, stage),
        )
        origin = budget.find_origin(suspect)
        full = len(self.known) >= self.policy.max_autopsies
        if origin is None:
            return self._report_finite(suspect, budget, step, full)
        known = self.known.get(origin.signature)
        if known is not None or full or suspect.runner.lockstep:  # locates it, without another examination
            verdict = replace(known or Verdict(origin), origin=origin, reproducible=None)
            verdict = replace(verdict, blame=find_blame(suspect, origin, lambda: False))
            verdict = budget.conclude(suspect, verdict)
        else:
            verdict = explain(suspect, origin, budget)
            if self.folder is not None and self.policy.bundle:
                bundle = partial(self._write_bundle, self.folder, suspect, verdict, step)
                verdict = self.boundary.call("bundle", bundle, otherwise=lambda: verdict)
        if known is None and not full:
            self.known[origin.signature] = verdict
            self._log(verdict, step, suspect.micro)
        return verdict

    def _report_finite(self, suspect: SuspectBatch, budget: Budget, step: int, full: bool) -> Verdict:
        """Handles a fault that the trace did not reproduce; logs each of the two outcomes once."""
        if full or suspect.runner.lockstep:
            return budget.conclude(suspect, Verdict(None))
        again = not suspect.run(compiled=True).healthy  # as the loop runs it, which cannot be traced
        verdict = budget.conclude(suspect, Verdict(None, reproducible=again))
        if again not in self.logged_finite:
            self.logged_finite.add(again)
            self._log(verdict, step, suspect.micro)
        return verdict

    def _log(self, verdict: Verdict, step: int, micro: MicroBatch) -> None:
        """Logs the verdict, with a bundle path that can be opened from the working directory."""
        if verdict.bundle is not None and self.folder is not None:
            verdict = replace(verdict, bundle=str(self.folder / verdict.bundle))
        self.journal.log(format_verdict(verdict.shown(self.policy.bundle_text), step, micro.index))

    def _write_bundle(self, folder: Path, suspect: SuspectBatch, verdict: Verdict, step: int) -> Verdict:
        path = write_bundle(
            folder / FOLDER / f"step-{step}",
            suspect,
            verdict,
            {**suspect.runner.facts(suspect.weight), "rows": suspect.micro.rows},
            weights=self.policy.bundle_weights,
            text=self.policy.bundle_text,
        )
        return replace(verdict, bundle=path.relative_to(folder).as_posix())
