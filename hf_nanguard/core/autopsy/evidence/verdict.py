"""What an autopsy found, as plain values, and how it is told in a log."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...event import Culprit, strict
from ...vocabulary import Cause
from ..trace.memory import SHOWN_POSITIONS
from ..trace.origin import Origin

MAX_TEXT = 160
MAX_SHOWN = 6


@dataclass(frozen=True)
class Remedy:
    """An idea that may help, and what came of trying it.

    Args:
        name (`str`):
            What it is called.
        tried (`bool`):
            Whether it was tried on the bad batch.
        works (`bool`, *optional*):
            Whether loss and gradients were finite then; `None` if it was not tried.
        note (`str`, *optional*):
            What a person needs to know: the setting it stands for, or why it was not tried.
    """

    name: str
    tried: bool
    works: bool | None = None
    note: str | None = None


@dataclass(frozen=True)
class Blame:
    """Whose data it was.

    Args:
        scope (`str`):
            `"samples"`: these suffice to reproduce it. `"every_sample"`: each of them does. `"batch"`: none alone, only
            together. `"untried"`: not tested; samples are then where the bad number was seen, if that is known.
        samples (`list[int]`, *optional*):
            Places in the micro-batch.
        tokens (`list[list[int]]`, *optional*):
            Sample and position of the first bad values.
        rows (`list[int]`, *optional*):
            Their rows in the training dataset.
        texts (`dict[int, str]`):
            Decoded text of some of them.
    """

    scope: str = "untried"
    samples: list[int] | None = None
    tokens: list[list[int]] | None = None
    rows: list[int] | None = None
    texts: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What an autopsy found.

    Args:
        origin (`Origin`, *optional*):
            Where the bad number was born, `None` if it did not come back.
        blame (`Blame`):
            Whose data it was.
        reproducible (`bool`, *optional*):
            Whether every replay was bad; `None` if there was no time for another. Without an origin: whether it is bad as the
            loop runs it, though not under the trace.
        remedies (`tuple[Remedy, ...]`):
            What was tried, and what was not.
        num_samples (`int`, *optional*):
            How many samples the micro-batch has.
        num_runs (`int`), seconds (`float`):
            What it took.
        bundle (`str`, *optional*):
            Where the bundle is, relative to the run's `nanguard` folder.
    """

    origin: Origin | None
    blame: Blame = Blame()
    reproducible: bool | None = None
    remedies: tuple[Remedy, ...] = ()
    num_samples: int | None = None
    num_runs: int = 0
    seconds: float = 0.0
    bundle: str | None = None

    @property
    def spares_others(self) -> bool:
        """Whether other samples of the batch were healthy, by test or by sight: then the model can go on without these."""
        found = self.blame.samples
        known = self.blame.scope in ("samples", "untried") and found is not None
        if self.blame.scope == "untried" and self.origin is not None and len(self.origin.positions) >= SHOWN_POSITIONS:
            return False  # there were more bad places than were looked at, perhaps in the other samples
        return known and self.num_samples is not None and len(found or ()) < self.num_samples

    @property
    def cause(self) -> Cause:
        """Why it happened."""
        if self.reproducible is False or (self.origin is None and not self.reproducible):
            return Cause.TRANSIENT
        return Cause.UNKNOWN if self.origin is None else self.origin.cause

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as strict JSON values."""
        return strict({**asdict(self), "cause": str(self.cause)})

    def as_values(self) -> dict[str, Any]:
        """Returns what does not fit into an event's culprit, for its `values`."""
        origin = self.origin
        born = {} if origin is None else {
            name: value
            for name in ("kind", "node", "dtype", "largest", "limit", "text", "leaf", "num_bad")
            if (value := getattr(origin, name)) is not None
        }  # fmt: skip
        return {
            **born,
            "scope": self.blame.scope,
            "texts": self.blame.texts,
            "reproducible": self.reproducible,
            "num_replays": self.num_runs,
            "seconds": self.seconds,
        }

    def explain(self, culprit: Culprit) -> Culprit:
        """Adds what was found to what an event says about the culprit."""
        origin, blame = self.origin, self.blame
        if origin is None:
            return culprit
        return replace(
            culprit,
            phase=origin.phase,
            module=origin.module,
            op=origin.op,
            source=origin.source,
            parameter=origin.parameter or culprit.parameter,
            samples=blame.samples or culprit.samples,
            rows=blame.rows or culprit.rows,
            tokens=blame.tokens or culprit.tokens,
        )


def format_verdict(verdict: Verdict, step: int, micro_step: int) -> str:
    """Returns the block that is logged: what, where, whose, why, what works. At most 15 lines."""
    lines = [f"---- autopsy of micro-batch {micro_step} of step {step} ----"]
    lines += [f"  {name + ':':<9}{text}" for name, text in _tell(verdict) if text]
    return "\n".join(lines[:15])


def _tell(verdict: Verdict) -> list[tuple[str, str]]:
    origin, blame = verdict.origin, verdict.blame
    if origin is None and verdict.reproducible:
        return [
            ("what", "bad whenever it is run as in training, finite when it is run eagerly under a trace"),
            ("why", "unknown: suspect torch.compile or a kernel; try without"),
        ]
    if origin is None:
        return [
            ("what", "the replay of the batch was finite"),
            ("why", "transient: suspect hardware or non-determinism"),
        ]
    works = [remedy.name for remedy in verdict.remedies if remedy.works]
    fails = [remedy.name for remedy in verdict.remedies if remedy.tried and not remedy.works]
    untried = [remedy.name for remedy in verdict.remedies if not remedy.tried]
    again = {True: "every replay was bad", False: "not every replay was bad", None: "not repeated"}
    repeat = again[verdict.reproducible]
    return [
        ("what", _tell_what(origin)),
        ("where", _tell_where(origin)),
        ("line", origin.text or ""),
        ("whose", _tell_whose(blame, verdict.num_samples)),
        ("text", "; ".join(f"[{sample}] {text}" for sample, text in list(blame.texts.items())[:2])),
        ("why", f"{verdict.cause} ({repeat})"),
        ("works", ", ".join(works)),
        ("fails", ", ".join(fails)),
        ("untried", ", ".join(untried)),
        ("bundle", verdict.bundle or ""),
    ]


def _tell_what(origin: Origin) -> str:
    kind = {"nan": "NaN", "inf": "inf"}.get(origin.kind, origin.kind)
    if origin.outside:
        return f"{origin.op} read {kind} from a tensor made outside the pass ({origin.dtype})"
    if origin.leaf is not None:
        what = {"input": "input", "parameter": "parameter"}.get(origin.phase, origin.phase)
        return f"{what} {origin.leaf} holds {kind} in {origin.num_bad} entries ({origin.dtype})"
    facts = [str(origin.dtype)]
    if origin.largest is not None and origin.limit is not None:
        facts.append(f"largest input {origin.largest:.4g}, limit {origin.limit:.4g}")
    within = f" in {origin.node}" if origin.node else ""
    inputs = "finite inputs and a mask" if origin.masked else "finite inputs"
    return f"{origin.op}{within} made {kind} of {inputs} ({', '.join(facts)})"


def _tell_where(origin: Origin) -> str:
    place = "the loss, outside the model" if origin.module is None else origin.module or "the model itself"
    reader = f", first read by {origin.op}" if origin.leaf is not None else ""
    phase = {"backward": "backward of "}.get(origin.phase, "")
    return f"{phase}{place}, {origin.source or 'line not known'}{reader}"


def _tell_whose(blame: Blame, num_samples: int | None) -> str:
    of = f" of {num_samples}" if num_samples else ""
    rows = "" if not blame.rows else f", dataset row{'s' if len(blame.rows) > 1 else ''} {_few(blame.rows)}"
    tokens = "" if not blame.tokens else f", tokens {_few([tuple(token) for token in blame.tokens])}"
    samples = _few(blame.samples or [])
    if blame.scope == "every_sample":
        return f"every sample{of}: not the data's fault{rows if len(blame.rows or []) == 1 else ''}"
    if blame.scope == "batch":
        return f"no sample alone, only the batch as a whole{rows}"
    if blame.scope == "untried":
        return f"not tested{f'; seen in sample {samples}{of}' if samples else ''}{rows}{tokens}"
    return f"sample {samples}{of}{rows}{tokens}"


def _few(values: list) -> str:
    return ", ".join(map(str, values[:MAX_SHOWN])) + (", ..." if len(values) > MAX_SHOWN else "")
