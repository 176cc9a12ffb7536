"""Quarantined rows: written when an event proves them, left out by later runs in the same output directory.

A later run trains on the **next row of the dataset that is not quarantined** in place of each quarantined one. So the number of steps, the
order of all other rows, the position after a resume, the share of each rank and the groups of a repeating sampler (GRPO) stay as they
are: the run is bit-identical to one whose dataset has these rows in place of the quarantined ones. Rows are replaced where a batch sampler
yields them, before any worker reads the dataset. A file that appears during a run counts from the next `train()` on.

A row whose finite spike was examined may be hard, or the first of new data. So it is left out only where spikes are acted on:
under `nanguard_on_spike="observe"` it is recorded, and trained on as in the run that found it.

Not possible, and said so: iterable datasets, batches that rank 0 dispatches, dataloaders that are not torch's.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...core.event import Culprit, Event, JsonValue
from ...core.journal import Journal
from ...core.settings import Policy
from ...core.vocabulary import Action, Cause, Signal
from ...plain_text import format_rows
from ..compat.observed_loader import find_number
from ..compat.prepared_dataset import PreparedRows
from .dataset_fingerprint import find_contents, find_fingerprint
from .masked_samples import MAX_ROWS
from .quarantine_file import FILE, SPIKES, find_proved_rows, quarantine_rows, read_quarantine

logger = logging.getLogger("hf_nanguard")


class RowQuarantine:
    """Writes and honors the quarantine of one trainer."""

    def __init__(self, policy: Policy, journal: Journal, find_step: Callable[[], int]):
        self.policy = policy
        self.journal = journal
        self.ranks = journal.ranks
        self.find_step = find_step
        self.has_completions = False
        self.folder: Path | None = None
        self.run = ""
        self.dataset: Any = None
        self.prepared = PreparedRows()
        self.replacements: dict[int, int] = {}  # rows of the trainer's dataset
        self._news: Event | None = None

    def expect_completions(self) -> None:
        """Blames no row from now on: what is trained on is sampled anew each time, so a bad sample says little about its prompt."""
        self.has_completions = True

    def begin_run(self, folder: Path, run: str, dataset: object, prepared: PreparedRows) -> None:
        """Takes the folder and the dataset of a run, whose id is `run`."""
        self.folder, self.run, self.dataset, self.prepared = folder, run, dataset, prepared
        self.replacements, self._news = {}, None

    def honor(self) -> None:
        """Reads the file on rank 0 and finds what replaces its rows. Every rank must call it."""
        if self.folder is None:
            return
        if self.policy.quarantine != "skip" or not self.policy.acts:
            return
        ranks = self.journal.ranks
        shared = ranks.gather(self._read(self.folder) if ranks.rank == 0 else None)[0]
        if shared is None:
            return
        rows, why = shared["rows"], shared["why"]
        self.replacements = self._replace(set(rows))
        if not self.replacements and rows:
            why, rows = "it names no row of the dataset, or all of them", []
        self._news = self._describe(rows, why)

    def _read(self, folder: Path) -> dict[str, Any] | None:
        """Returns the rows to leave out, and what is wrong with the file; `None` without one."""
        entries, why = read_quarantine(folder)
        if not entries:
            return None if why is None else {"rows": [], "why": why}
        fingerprint = find_fingerprint(self.dataset, self.prepared.user_rows)
        if fingerprint is None:
            return {"rows": [], "why": "the rows of this dataset have no numbers"}
        known = {entry.row for entry in entries if entry.dataset == fingerprint}
        contents = find_contents(self.dataset, known, self.prepared.user_rows)
        fitting = [
            entry
            for entry in entries
            if entry.dataset == fingerprint and entry.content in (None, contents.get(entry.row, entry.content))
        ]
        rows = {entry.row for entry in fitting if self._acts_on(entry.signal)}
        reasons = [] if why is None else [why]
        if others := len({entry.row for entry in entries if entry.dataset != fingerprint}):
            reasons.append(
                f"{others} of its rows belong{'s' * (others == 1)} to another dataset than this one ({fingerprint})"
            )
        if changed := len(known - {entry.row for entry in fitting}):
            reasons.append(f"{changed} of its rows {'has' if changed == 1 else 'have'} changed since then")
        if spiked := len({entry.row for entry in fitting} - rows):
            reasons.append(
                f"{spiked} of its rows {'has' if spiked == 1 else 'have'} caused finite spikes only, which "
                'nanguard_on_spike="observe" trains on'
            )
        return {"rows": sorted(rows), "why": " and ".join(reasons) or None}

    def _acts_on(self, signal: str) -> bool:
        """Returns whether a row that has caused a signal is left out."""
        return self.policy.on_spike != "observe" or signal not in SPIKES

    def _replace(self, rows: set[int]) -> dict[int, int]:
        """Returns for each row of the trainer's dataset that is left out the one that takes its place."""
        if not rows:
            return {}
        number, known = len(self.dataset), self.prepared.user_rows
        given = list(rows) if known is None else np.flatnonzero(np.isin(known, list(rows))).tolist()
        places = {place for place in given if place < number}
        if len(places) >= number:
            return {}
        found: dict[int, int] = {}
        first = next(place for place in range(number) if place not in places)
        for place in sorted(places, reverse=True):
            after = place + 1
            found[place] = found.get(after, after) if after < number else first
        return found

    def _describe(self, rows: list[int], why: str | None) -> Event:
        several = len(rows) != 1
        parts = []
        if rows:
            parts.append(
                f"{len(rows)} row{'s' * several} of {FILE} {'are' if several else 'is'} left out{format_rows(rows)}; the next row "
                f"of the dataset takes {'their places' if several else 'its place'}"
            )
        if why is not None:
            parts.append(f"{'the rest of ' * bool(rows)}{FILE} is ignored because {why}")
        values: dict[str, JsonValue] = {"num_rows": len(rows), "why": why}
        culprit = Culprit(phase="input", rows=rows[:MAX_ROWS] or None)
        action = Action.DROPPED if rows else Action.OBSERVED
        return Event(0, Signal.ROWS_QUARANTINED, action, "; ".join(parts), values=values, culprit=culprit)

    # ---- as batches are read ----

    def begin_epoch(self, is_observed: bool) -> None:
        """Reports, once a run, what is left out; or that nothing can be, because the batches are not seen."""
        event, self._news = self._news, None
        if event is None:
            return
        if self.replacements and not is_observed:
            self.replacements = {}
            event = self._describe([], "this dataloader does not show which rows its batches are made of")
        self.journal.write_once(replace(event, step=self.find_step()))

    def replace(self, batch: object) -> object:
        """Returns what a batch sampler has yielded, with other rows in place of those that are left out."""
        if not self.replacements or not isinstance(batch, (list, tuple, Tensor, np.ndarray)):
            return batch
        rows = batch.tolist() if isinstance(batch, (Tensor, np.ndarray)) else list(batch)
        others = [self.replacements.get(-1 if (number := find_number(row)) is None else number) for row in rows]
        if all(other is None for other in others):
            return batch
        return [row if other is None else other for row, other in zip(rows, others, strict=True)]

    # ---- as events are written ----

    def note(self, event: Mapping[str, Any]) -> None:
        """Writes the rows that an event proves to be bad. Rank 0 does, which has the events of all ranks."""
        if self.folder is None or self.policy.quarantine == "off" or self.has_completions or self.ranks.rank:
            return
        if not (rows := find_proved_rows(event)):
            return
        fingerprint = find_fingerprint(self.dataset, self.prepared.user_rows)
        if fingerprint is None:
            return
        cause = None if event.get("cause") is None else Cause(event["cause"])
        contents = find_contents(self.dataset, rows, self.prepared.user_rows)
        given = (self.folder, rows, fingerprint, Signal(event["signal"]), int(event["step"]), self.run, cause, contents)
        if added := quarantine_rows(*given):
            several = len(added) > 1
            later = "leave them out" if several else "leave it out"
            unless = "" if self._acts_on(event["signal"]) else ', unless nanguard_on_spike is "observe"'
            after = f"; later runs in this folder {later}{unless}" if self.policy.quarantine == "skip" else ""
            logger.info(
                "hf_nanguard: %d row%s added to %s%s%s.", len(added), "s" * several, FILE, format_rows(added), after
            )
