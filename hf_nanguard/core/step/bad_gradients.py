"""Which parameters have non-finite gradients, NaN or inf, and which finite gradients are next to them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ...plain_text import printable
from ..event import JsonValue
from ..finite import find_nonfinite

SHOWN = 12  # bad parameters in an event
NEIGHBOURS = 4  # good ones in the log
KINDS = {"nan": "NaN", "inf": "inf"}


@dataclass(frozen=True)
class Census:
    """The gradients at one time, parameter by parameter, in model order."""

    bad: dict[str, str] = field(default_factory=dict)  # each "nan" or "inf"
    good: list[str] = field(default_factory=list)
    neighbours: list[str] = field(default_factory=list)  # the good ones right before or after a bad one

    @property
    def suspect(self) -> str | None:
        """The bad parameter nearest to the loss, which the backward pass reached first.

        `None` if no gradient is bad, or if all are: then the fault is in the loss itself, not at a parameter.
        """
        return next(reversed(self.bad)) if self.bad and (self.good or len(self.bad) == 1) else None

    def as_values(self) -> dict[str, JsonValue]:
        """Returns the census for the `values` of an event, cut to a readable length."""
        return {
            "num_bad_parameters": len(self.bad),
            "num_good_parameters": len(self.good),
            "bad_parameters": dict(list(self.bad.items())[-SHOWN:]),
            "good_neighbours": self.neighbours[-SHOWN:],
        }


def take_census(named: Iterable[tuple[str, Tensor]]) -> Census:
    """Checks gradients, given with their names in model order, as they are now; call it before they are clipped."""
    pairs = list(named)
    return judge([name for name, _ in pairs], find_nonfinite(pairs))


def judge(names: list[str], bad: dict[str, str]) -> Census:
    """Returns the census of parameters (in model order), given which are bad."""
    neighbours = [
        name
        for index, name in enumerate(names)
        if name not in bad and any(other in bad for other in names[max(index - 1, 0) : index + 2])
    ]
    return Census(
        bad={name: bad[name] for name in names if name in bad},
        good=[name for name in names if name not in bad],
        neighbours=neighbours,
    )


def describe(census: Census) -> str:
    """Returns one clause that names what is bad."""
    total = len(census.bad) + len(census.good)
    if not total:  # an engine such as DeepSpeed's keeps them elsewhere
        return "the gradient norm is not finite, and no parameter holds a gradient that could be checked"
    if not census.bad:
        return f"all {total} gradients are finite"
    if census.suspect is None:
        return f"all {total} gradients are bad"
    kind = KINDS[census.bad[census.suspect]]
    rest = f" ({len(census.bad)} of {total} gradients are bad)" if len(census.bad) > 1 else f" (1 of {total})"
    return f"gradient of {census.suspect} became {kind}{rest}"


def format_bad_gradients(
    step: int, norm: float, census: Census, num_nan: int, num_inf: int, max_shown: int = SHOWN
) -> str:
    """Returns the block that is logged when gradients are not finite: the total norm and the last bad parameters."""
    kinds = {kind: sum(1 for found in census.bad.values() if found == kind) for kind in ("nan", "inf")}
    lines = [
        f"---- bad gradients at step {step} ----",
        f"  total norm before clipping: {norm}",
        f"  NaN in {kinds['nan']} parameters ({num_nan} so far), inf in {kinds['inf']} ({num_inf} so far)",
    ]
    if census.good and not census.bad:
        lines.append("  every gradient is finite, only their norm is not; no parameter is to blame")
    if census.bad and not census.good:
        return "\n".join(map(printable, [*lines, f"  all {len(census.bad)} parameters are bad"]))
    shown = list(census.bad.items())[-max_shown:]
    if len(census.bad) > len(shown):
        lines.append(f"  ... {len(census.bad) - len(shown)} more bad parameters before these")
    lines += [f"  bad:  {name} ({KINDS[kind]})" for name, kind in shown]
    lines += [f"  good: {name} (next to a bad one)" for name in census.neighbours[-NEIGHBOURS:]]
    return "\n".join(map(printable, lines))
