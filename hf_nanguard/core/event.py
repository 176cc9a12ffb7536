"""The public event: one line of `events.jsonl`, strict JSON, versioned."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, NoReturn, TypeAlias

from .vocabulary import Action, Cause, Signal

SCHEMA = 1
MAX_DIGITS = 20  # of an integer, with its sign
# What events, bundles and checkpoints hold, as it is built.
JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
# An object as a JSON file gives it back; its values are checked where they are used.
JsonObject: TypeAlias = dict[str, Any]


def strict(value: Any) -> Any:
    """Returns `value` with every non-finite float as the string "nan", "inf" or "-inf", as strict JSON needs."""
    if not isinstance(value, (str, bytes, int, float)) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of NumPy or torch
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def parse_strict(text: str | bytes) -> Any:
    """Returns what strict JSON says; anything else is a `ValueError`: NaN, numbers beyond a float or 64 bits,
    too deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse_number, parse_float=_parse_float, parse_int=_parse_int)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _parse_float(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def _parse_int(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:20]}")


@dataclass(frozen=True)
class Culprit:
    """Where a bad number came from. Unknown fields are `None`."""

    phase: str | None = None
    module: str | None = None
    op: str | None = None
    source: str | None = None
    parameter: str | None = None
    term: str | None = None
    samples: list[int] | None = None
    rows: list[int] | None = None
    tokens: list[list[int]] | None = None
    reward_function: str | None = None
    prompt: str | None = None
    completion: str | None = None


@dataclass(frozen=True)
class Remedy:
    """A change that may help, and whether it did when it was tried on the bad batch or update."""

    name: str  # e.g. `larger_eps`
    tried: bool
    works: bool | None = None  # whether the result was finite; `None` if it was not tried
    note: str | None = None  # the setting it means, what was measured, or why it was not tried


@dataclass(frozen=True)
class Event:
    """One thing that was seen and what was done about it."""

    step: int
    signal: Signal
    action: Action
    message: str
    micro_step: int | None = None
    rank: int | None = None  # whose it is; the journal puts its own rank here
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    culprit: Culprit | None = None
    cause: Cause | None = None
    remedies: tuple[Remedy, ...] = ()
    bundle: str | None = None
    time: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))

    def as_dict(self) -> JsonObject:
        """Returns the event as the public schema has it, ready for a strict JSON writer."""
        return strict(
            {
                "schema": SCHEMA,
                "time": self.time,
                "step": self.step,
                "micro_step": self.micro_step,
                "rank": self.rank,
                "signal": str(self.signal),
                "action": str(self.action),
                "message": self.message,
                "values": self.values,
                "culprit": asdict(self.culprit) if self.culprit is not None else None,
                "cause": str(self.cause) if self.cause is not None else None,
                "remedies": [asdict(remedy) for remedy in self.remedies],
                "bundle": self.bundle,
            }
        )


@dataclass(frozen=True)
class Failure:
    """Why a run cannot continue from the state that it is in; the same on every rank.

    Whoever resolves it rewinds the run or halts it, and writes the event with that action.
    """

    reason: str  # the message of a halt
    event: Event | None  # `None` if it was written already
    since: int | None = None  # the first step that may have led to it, if that is known
    fallback: Action = Action.HALTED  # what is done if the run cannot be rewound; with any other action it goes on
