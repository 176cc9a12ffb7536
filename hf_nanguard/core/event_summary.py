"""The events of a run by what they have in common: for the message of a halt, the end of a run and its report."""

import shlex
from collections import Counter
from dataclasses import dataclass, field

from ..plain_text import format_rows, printable
from .event import JsonObject
from .vocabulary import Action

MAX_KINDS = 6
CONTAINED = (Action.DROPPED, Action.SKIPPED, Action.REPAIRED, Action.CLIPPED)


@dataclass
class EventKind:
    """Events with the same signal, action, cause and place."""

    signal: str
    action: str
    cause: str | None
    place: str | None  # module, term, reward function, line of code or parameter
    steps: list[int] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    clears_data: bool = False  # whether all samples of an examined batch failed
    remedies: dict[str, None] = field(default_factory=dict)  # that made an examined batch finite, the best first

    @classmethod
    def of(cls, event: JsonObject) -> "EventKind":
        """Returns the kind of one event. A field of another type than the schema says counts as missing."""
        culprit, autopsy = _dict(event.get("culprit")), _dict(_dict(event.get("values")).get("autopsy"))
        places = (_text(culprit.get(name)) for name in ("module", "term", "reward_function", "source", "parameter"))
        remedies, action = map(_dict, _list(event.get("remedies"))), str(event.get("action"))
        return cls(
            str(event.get("signal")), action, _text(event.get("cause")), next(filter(None, places), None),
            steps=[step for step in [event.get("step")] if isinstance(step, int)],
            # those of a rewind are the rows that the run leaves out, good ones among them
            rows={row for row in _list(culprit.get("rows")) if isinstance(row, int)} if action != Action.REWOUND else set(),
            clears_data=autopsy.get("scope") == "every_sample",
            remedies={str(remedy.get("name")): None for remedy in remedies if remedy.get("works") is True},
        )  # fmt: skip

    @property
    def works(self) -> str:
        """The remedies that made an examined batch finite, with a label; "" without any."""
        return f"works: {', '.join(self.remedies)}" if self.remedies else ""

    def explain(self) -> str:
        """Returns what an examination has found: cause, place and remedies; "" if there was none."""
        why = self.describe() if self.cause not in (None, self.signal) else ""
        return "; ".join(filter(None, (why, self.works)))

    def describe(self) -> str:
        """Returns cause and place, or the signal if there is no cause."""
        return (self.cause or self.signal) + (f" in {self.place}" if self.place else "")

    def format(self) -> str:
        """Returns one line: how often, when, why, where, which rows, and which remedies made the examined batch finite."""
        when = _format_steps(sorted({*self.steps}))
        where = format_rows(sorted(self.rows))
        where = " (all samples alike; the data is probably not the cause)" if self.clears_data else where
        is_explained = self.cause not in (None, self.signal)
        why = f": {self.describe()}" if is_explained else f" in {self.place}" if self.place else ""
        works = f"; {self.works}" if self.remedies else ""
        return f"{len(self.steps)} x {self.signal} {self.action} {when}{why}{where}{works}"


class EventSummary:
    """Counts the events of a run."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, str, str | None, str | None], EventKind] = {}

    def add(self, event: JsonObject) -> None:
        """Counts an event of the public schema, also one of a file that somebody else has written."""
        found = EventKind.of(event)
        kind = self.kinds.setdefault((found.signal, found.action, found.cause, found.place), found)
        if kind is not found:
            kind.steps += found.steps
            kind.rows |= found.rows
            kind.clears_data |= found.clears_data
            kind.remedies |= found.remedies

    def describe_common(self, since: int) -> str:
        """Returns what most bad steps from a step on have in common, as sentences; "" if nothing was contained."""
        steps: Counter[tuple[str | None, str | None]] = Counter()
        found = [kind for kind in self.kinds.values() if kind.action in CONTAINED and max(kind.steps) >= since]
        for kind in found:
            steps[kind.cause or kind.signal, kind.place] += len({step for step in kind.steps if step >= since})
        if not found:
            return ""
        cause, num = steps.most_common(1)[0]
        alike = [kind for kind in found if (kind.cause or kind.signal, kind.place) == cause]
        total = len({step for kind in found for step in kind.steps if step >= since})
        text = f"{num} of these {total} bad steps: {alike[0].describe()}."
        rows = set().union(*(kind.rows for kind in alike))
        if len(rows) == 1 and not any(kind.clears_data for kind in alike):
            text += f" Each has dataset row {min(rows)}."
        remedies = dict.fromkeys(name for kind in alike for name in kind.remedies)
        return text + (f" The examined batch was finite with {' or '.join(remedies)}." if remedies else "")

    def format_end(self, folder: object, *notes: str) -> str | None:
        """Returns the block that is logged at the end of a run with this output directory; `None` without events."""
        lines = self.format()
        more = f"more: nanguard report {shlex.quote(str(folder))}"
        block = ["---- hf_nanguard: events of this run ----", *lines, *notes, more]
        return "\n  ".join(map(printable, block)) if lines else None

    def format(self) -> list[str]:
        """Returns a few lines, the most frequent kinds first; none without events."""
        kinds = sorted(self.kinds.values(), key=lambda kind: -len(kind.steps))
        lines = [kind.format() for kind in kinds[:MAX_KINDS]]
        return lines + ([f"... and {len(kinds) - MAX_KINDS} other kinds of events"] if len(kinds) > MAX_KINDS else [])


def _format_steps(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"at step {steps[0]}"
    return f"at steps {steps[0]} and {steps[1]}" if len(steps) == 2 else f"at steps {steps[0]} to {steps[-1]}"


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
