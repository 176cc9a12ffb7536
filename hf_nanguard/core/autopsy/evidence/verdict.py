"""What an autopsy found, as plain values, and the block that is logged."""

from dataclasses import asdict, dataclass, field, replace

from ....plain_text import printable, quote, show
from ...event import Culprit, JsonObject, JsonValue, Remedy, strict
from ...rerun.nested_inputs import quote_name
from ...vocabulary import Cause
from ..trace.memory import SHOWN_POSITIONS
from ..trace.origin import Origin

MAX_TEXT = 160
MAX_SHOWN = 6
OVERFLOWS = (Cause.FP16_OVERFLOW, Cause.BF16_OVERFLOW, Cause.FP32_OVERFLOW, Cause.EXP_OVERFLOW)


@dataclass(frozen=True)
class Blame:
    """Which samples of a micro-batch cause a fault.

    The scope is `"samples"`: these suffice to reproduce it and others are finite with the same weights, `"every_sample"`: each of
    the batch does, and no others are known, `"batch"`: none alone, only together, `"only_sample"`: the batch has one, and it is not known whether others are finite with these weights, or
    `"untried"`: not tested; `samples` are then those with non-finite values at the origin, if known.
    """

    scope: str = "untried"
    samples: list[int] | None = None  # positions in the micro-batch
    tokens: list[list[int]] | None = None  # sample and position of the first non-finite values
    rows: list[int] | None = None  # their rows in the training dataset
    texts: dict[int, str] = field(default_factory=dict)  # decoded text of some of them

    @property
    def singles_out(self) -> bool:
        """Whether the samples are fewer than all: where all fail, or there is only one, none is to blame."""
        return self.scope not in ("every_sample", "only_sample")


@dataclass(frozen=True)
class Verdict:
    """What an autopsy found."""

    origin: Origin | None  # `None` if the replay was finite
    blame: Blame = Blame()
    # Whether every replay was non-finite; `None` if there was no time for another. Without an origin: whether it is
    # non-finite as the loop runs it, though not under the trace.
    reproducible: bool | None = None
    remedies: tuple[Remedy, ...] = ()  # tried or not
    num_samples: int | None = None  # of the micro-batch
    num_runs: int = 0  # replays that the autopsy took
    seconds: float = 0.0
    bundle: str | None = None  # its folder, relative to the run's `nanguard` folder

    @property
    def spares_others(self) -> bool:
        """Whether other samples of the batch are finite, tested or seen at the origin: training can continue without these."""
        found = self.blame.samples
        known = self.blame.scope in ("samples", "untried") and found is not None
        if self.blame.scope == "untried" and self.origin is not None and len(self.origin.positions) >= SHOWN_POSITIONS:
            return False  # not all positions were recorded: the others may be in other samples
        return known and self.num_samples is not None and len(found or ()) < self.num_samples

    @property
    def cause(self) -> Cause:
        """The cause of the origin; transient if not every replay was non-finite."""
        if self.reproducible is False or (self.origin is None and not self.reproducible):
            return Cause.TRANSIENT
        return Cause.UNKNOWN if self.origin is None else self.origin.cause

    def as_dict(self) -> JsonObject:
        return strict({**asdict(self), "cause": str(self.cause)})

    def as_values(self) -> dict[str, JsonValue]:
        """Returns what has no field in an event's culprit, for its `values`."""
        origin = self.origin
        details = {} if origin is None else {
            name: value
            for name in ("kind", "node", "dtype", "largest", "limit", "text", "leaf", "num_bad")
            if (value := _name_leaf(origin) if name == "leaf" else getattr(origin, name)) is not None
        }  # fmt: skip
        return {
            **details,
            "scope": self.blame.scope,
            "texts": {str(sample): quote(text) for sample, text in self.blame.texts.items()},
            "reproducible": self.reproducible,
            "num_replays": self.num_runs,
            "seconds": self.seconds,
        }

    def shown(self, text: bool = True) -> "Verdict":
        """Returns what may be shown of it: quoted text as it is, or, without `text`, no text of the data."""
        blame = self.blame if text else replace(self.blame, texts={})
        origin = None if self.origin is None else replace(self.origin, leaf=show(_name_leaf(self.origin), text))
        remedies = tuple(replace(remedy, note=show(remedy.note, text)) for remedy in self.remedies)
        return replace(self, origin=origin, blame=blame, remedies=remedies)

    def explain(self, culprit: Culprit) -> Culprit:
        """Returns an event's culprit with the findings added; without samples, its rows are those of the whole micro-batch."""
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
            samples=(blame.samples if blame.singles_out else None) or culprit.samples,
            rows=blame.rows or culprit.rows,
            tokens=blame.tokens or culprit.tokens,
        )


def _name_leaf(origin: Origin) -> str | None:
    """Returns the name of a leaf, quoted if it may be text of the data."""
    return quote_name(origin.leaf) if origin.phase == "input" and origin.leaf is not None else origin.leaf


def format_verdict(verdict: Verdict, step: int, micro_step: int) -> str:
    """Returns the block that is logged: what, where, whose, why, what works. At most 15 lines."""
    lines = [f"---- autopsy of micro-batch {micro_step} of step {step} ----"]
    lines += [f"  {name + ':':<9}{printable(text)}" for name, text in _format_fields(verdict).items() if text]
    return "\n".join(lines[:15])


def _format_fields(verdict: Verdict) -> dict[str, str]:
    origin, remedies = verdict.origin, verdict.remedies
    if origin is None and verdict.reproducible:
        return {
            "what": "non-finite whenever it runs as in training, finite when it runs eagerly under the trace",
            "why": "unknown: suspect torch.compile or a custom kernel; run without it to find out",
        }
    if origin is None:
        return {
            "what": "loss and gradients were finite when the batch was run again",
            "why": "transient: suspect hardware or non-determinism",
        }
    replays = {True: "every replay was non-finite", False: "not every replay was non-finite", None: "not repeated"}
    return {
        "what": _format_what(origin),
        "where": _format_where(origin),
        "line": origin.text or "",
        "whose": _format_whose(verdict.blame, verdict.num_samples) + _format_others(verdict),
        "text": "; ".join(f"[{sample}] {text}" for sample, text in list(verdict.blame.texts.items())[:2]),
        "why": f"{verdict.cause} ({replays[verdict.reproducible]})",
        "works": ", ".join(remedy.name for remedy in remedies if remedy.works),
        "fails": ", ".join(remedy.name for remedy in remedies if remedy.tried and not remedy.works),
        "untried": ", ".join(remedy.name for remedy in remedies if not remedy.tried),
        "bundle": verdict.bundle or "",
    }


def _format_what(origin: Origin) -> str:
    kind = {"nan": "NaN"}.get(origin.kind, origin.kind)
    if origin.outside:
        return f"{origin.op} read {kind} from a tensor that was made outside the pass ({origin.dtype})"
    if origin.leaf is not None:
        holder = "input" if origin.phase == "input" else "parameter"
        entries = "1 entry" if origin.num_bad == 1 else f"{origin.num_bad} entries"
        return f"{holder} {origin.leaf} contains {kind} in {entries} ({origin.dtype})"
    facts = str(origin.dtype)
    if origin.largest is not None and origin.limit is not None:
        facts += f", largest input {origin.largest:.4g}, limit {origin.limit:.4g}"
    within = f" in {origin.node}" if origin.node else ""
    inputs = "finite inputs and a mask" if origin.masked else "finite inputs"
    return f"{origin.op}{within} turned {inputs} into {kind} ({facts})"


def _format_where(origin: Origin) -> str:
    place = "the loss, outside the model" if origin.module is None else origin.module or "the model itself"
    reader = f", first read by {origin.op}" if origin.leaf is not None else ""
    phase = "backward of " if origin.phase == "backward" else ""
    return f"{phase}{place}, {origin.source or 'line unknown'}{reader}"


def _format_whose(blame: Blame, num_samples: int | None) -> str:
    rows = "" if not blame.rows else f", dataset row{_plural(blame.rows)} {_format_few(blame.rows)}"
    tokens = "" if not blame.tokens else f", tokens {_format_few([tuple(token) for token in blame.tokens])}"
    samples = blame.samples or []
    which = f"sample{_plural(samples)} {_format_few(samples)}{f' of {num_samples}' if num_samples else ''}"
    if blame.scope == "every_sample":
        return f"all {len(samples)} samples; the data is probably not the cause{rows if len(blame.rows or []) == 1 else ''}"
    if blame.scope == "batch":
        return f"no sample alone, only the batch as a whole{rows}"
    if blame.scope == "only_sample":
        return f"the only sample{rows}{tokens}; whether others are finite with these weights is not known"
    if blame.scope == "untried":
        return f"not tested{f'; seen in {which}' if samples else ''}{rows}{tokens}"
    return f"{which}{rows}{tokens}"


def _format_others(verdict: Verdict) -> str:
    """Returns what the other samples say about an overflow: a model that is about to overflow does so on some rows first."""
    if verdict.cause not in OVERFLOWS or verdict.blame.scope != "samples":
        return ""
    others = "the other samples" if verdict.spares_others else "other micro-batches"
    return f"; {others} are finite with these weights, but if the model diverges, some rows overflow before others"


def _plural(values: list) -> str:
    return "s" if len(values) > 1 else ""


def _format_few(values: list) -> str:
    return ", ".join(map(str, values[:MAX_SHOWN])) + (", ..." if len(values) > MAX_SHOWN else "")
