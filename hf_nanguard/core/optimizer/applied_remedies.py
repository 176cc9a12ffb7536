"""Settings of an optimizer that are changed when a run is rewound, so that the failure does not return."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..event import Remedy
from .bad_update import SAFE_EPS

SMALLER = 0.1  # as in the remedy `smaller_lr`
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
SCHEDULE_RATES = ("base_lrs", "max_lrs", "_last_lr")  # keys of a state dict
APPLIED = ("larger_eps", "smaller_lr")


def choose_remedy(remedies: Sequence[Remedy]) -> str | None:
    """Returns the first remedy that was tried, worked, and can be applied to a running optimizer; `None` if there is none."""
    return next((remedy.name for remedy in remedies if remedy.works and remedy.name in APPLIED), None)


def raise_eps(optimizer: Optimizer) -> None:
    """Raises every eps to one that is not 0 in the dtype of its parameters."""
    for group in optimizer.param_groups:
        safe = max((SAFE_EPS.get(parameter.dtype, 0.0) for parameter in group["params"]), default=0.0)
        if isinstance(eps := group.get("eps"), float) and eps < safe:
            group["eps"] = safe


def scale_rates(optimizer: Optimizer, scheduler: Any, factor: float) -> None:
    """Multiplies the learning rates of an optimizer and of its schedule, for the rest of the run."""
    for group in optimizer.param_groups:
        for key in GROUP_RATES:
            if isinstance(rate := group.get(key), Tensor):
                rate.mul_(factor)
            elif isinstance(rate, (int, float)):
                group[key] = rate * factor
    if scheduler is not None:
        scheduler.load_state_dict(_scale_state(scheduler.state_dict(), factor))


def _scale_state(state: Any, factor: float) -> object:
    """Returns the state of a schedule with other rates, also of schedules inside it."""
    scaled = {key: [rate * factor for rate in state[key]] for key in SCHEDULE_RATES if isinstance(state.get(key), list)}
    inner = [_scale_state(each, factor) for each in state.get("_schedulers", ())]
    return {**state, **scaled, **({"_schedulers": inner} if inner else {})}
