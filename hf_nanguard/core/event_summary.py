"""The events of a run by what they have in common: for the message of a halt and for the end of a run."""

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
    place: str | None  # module, parameter, term or reward function
    steps: list[int] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    clears_data: bool = False  # whether all samples of an examined batch failed
    remedies: set[str] = field(default_factory=set)  # that made an examined batch finite

    def describe(self) -> str:
        """Returns cause and place, or the signal if there is no cause."""
        return (self.cause or self.signal) + (f" in {self.place}" if self.place else "")

    def format(self) -> str:
        first, last = min(self.steps), max(self.steps)
        when = f"at step {first}" if first == last else f"at steps {first} to {last}"
        where = format_rows(sorted(self.rows))
        where = " (all samples alike; the data is probably not the cause)" if self.clears_data else where
        why = f": {self.describe()}" if self.cause or self.place else ""
        return f"{len(self.steps)} x {self.signal} {self.action} {when}{why}{where}"


class EventSummary:
    """Counts the events of a run."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, str, str | None, str | None], EventKind] = {}

    def add(self, event: JsonObject) -> None:
        """Counts an event of the public schema."""
        culprit = event["culprit"] or {}
        names = (culprit.get(name) for name in ("module", "parameter", "term", "reward_function"))
        key = (event["signal"], event["action"], event["cause"], next(filter(None, names), None))
        kind = self.kinds.setdefault(key, EventKind(*key))
        kind.steps.append(event["step"])
        kind.rows.update(culprit.get("rows") or ())
        kind.clears_data |= (event["values"].get("autopsy") or {}).get("scope") == "every_sample"
        kind.remedies.update(remedy["name"] for remedy in event["remedies"] if remedy["works"])

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
        remedies = sorted(set().union(*(kind.remedies for kind in alike)))
        return text + (f" The examined batch was finite with {' or '.join(remedies)}." if remedies else "")

    def format_end(self, path: object, *notes: str) -> str | None:
        """Returns the block that is logged at the end of a run whose events are in `path`; `None` without events."""
        lines = self.format()
        block = ["---- hf_nanguard: events of this run ----", *lines, *notes, f"more in {path}"]
        return "\n  ".join(map(printable, block)) if lines else None

    def format(self) -> list[str]:
        """Returns a few lines, the most frequent kinds first; none without events."""
        kinds = sorted(self.kinds.values(), key=lambda kind: -len(kind.steps))
        lines = [kind.format() for kind in kinds[:MAX_KINDS]]
        return lines + ([f"... and {len(kinds) - MAX_KINDS} other kinds of events"] if len(kinds) > MAX_KINDS else [])
