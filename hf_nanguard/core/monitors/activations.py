"""The monitor that measures what modules put out, and forecasts when their dtype will overflow.

What is measured of an output, and how, is said in `output.py`; all of it stays on the device until the backward is over. Then
it is put together (the largest value over the forwards of a step stands for each), reduced over ranks in one message, and
read once.

Only forwards of training count: not those of evaluation, generation or reference models, nor what gradient checkpointing
runs again if it was seen before. Of a module that returns several tensors the first one counts, for the others may hold
masks. An -inf counts in the output of a block; elsewhere it is a mask unless something that ran later is bad, too.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..event import Culprit, Event
from ..journal import Journal
from ..ranks import Ranks
from ..torch_private import is_compiled, is_in_backward
from ..vocabulary import Action, Signal
from .base import EARLY, Hook, Monitor
from .module_choice import find_blocks, pick_modules
from .module_outputs import CAUSES, NAMES, NEAR_BITS, Activation, OutputMeasure, find_tensor, measure, tabulate
from .overflow_forecast import Forecast, Headroom


class ActivationMonitor(Monitor):
    """Measures the outputs of modules every so many steps, and tells when their dtype is about to overflow.

    It reads once a step that is due, in `end_backward`, so that a step that is then skipped is seen as well. Where a
    module may be in danger it looks more often than every `every_n_steps` steps, on all ranks alike.

    Args:
        model (`nn.Module`):
            The model, without DDP wrapper.
        journal (`Journal`):
            Where events go.
        ranks (`Ranks`):
            The processes that train together.
        every_n_steps (`int`):
            The period; 0 turns the monitor off.
        modules (`str` or `Sequence[str]`, *optional*):
            Which modules: `fnmatch` patterns of their names, in one string separated by commas. The blocks of the model
            and the embeddings, projections and heads outside of them by default.
        full_metrics (`bool`, *optional*, defaults to `False`):
            Whether the log gets a curve for every module.
        early (`tuple[int, ...]`, *optional*, defaults to `(10, 20, 40)`):
            Further steps, counted from 1, at which it looks.
        compiled (`bool`, *optional*, defaults to `False`):
            Whether the model runs under `torch.compile`, which ignores hooks: the monitor then says so and stays off.
    """

    def __init__(
        self,
        model: nn.Module,
        journal: Journal,
        ranks: Ranks,
        every_n_steps: int,
        modules: str | Sequence[str] | None = None,
        full_metrics: bool = False,
        early: tuple[int, ...] = EARLY,
        compiled: bool = False,
    ):
        super().__init__(every_n_steps, early)
        patterns = [part.strip() for part in modules.split(",")] if isinstance(modules, str) else modules
        picked = pick_modules(model, patterns)
        self.model = model
        self.journal = journal
        self.ranks = ranks
        self.full_metrics = full_metrics
        self.names = list(picked)
        self.modules = list(picked.values())
        self.blocks = set(find_blocks(model))
        self.compiled = compiled or any(is_compiled(module) for module in model.modules())
        self.headroom = Headroom()
        self.seen: dict[str, Activation] = {}
        self.bits: dict[str, float] = {}
        self.next_look: int | None = None
        self.num_blind = 0
        self.is_off = False
        self.is_bad = False
        self._fresh = False
        self._step: int | None = None
        self._handles: list[RemovableHandle] = []
        self._measures: list[OutputMeasure] = []
        self._order: dict[int, None] = {}
        self._in_forward: set[int] = set()
        self._failed: set[int] = set()  # modules that cannot be measured

    def is_due(self, step: int) -> bool:
        """Returns whether the monitor looks at this step; the same on every rank."""
        closer = self.next_look is not None and step >= self.next_look
        return not self.is_off and self.every_n_steps > 0 and (closer or super().is_due(step))

    def begin_step(self, step: int) -> None:
        """Puts hooks on the watched modules, if the step is due."""
        self.close()
        if not self.is_due(step):
            return
        if not self.modules and next(self.model.children(), None) is None:  # of one piece: the loss tells of its output
            self.is_off = True
            return
        if self.compiled:
            self._turn_off(step, "the model runs under torch.compile, which ignores hooks on its modules")
            return
        if not self.modules:
            self._turn_off(step, "the model has no blocks, embeddings, projections or heads that are modules")
            return
        self._step = step
        self._handles = [
            module.register_forward_hook(Hook(partial(self._look, index)))
            for index, module in enumerate(self.modules)
            if index not in self._failed
        ]

    def end_backward(self, step: int) -> None:
        """Takes the hooks away, reads what they saw, and tells what is bad or going to be."""
        if self._step is None:
            return
        looks, order = self._measures, self._order
        self.close()
        device = looks[0].lowest.device if looks else self.ranks.device
        table = tabulate(looks, len(self.names), self.ranks.device if self.ranks.size > 1 else device)
        if self.ranks.size > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        self.seen = {
            name: Activation(-low, high, nan > 0, rms, zeros, None if near < 0 else near, -limit)
            for name, (low, high, nan, rms, zeros, near, limit) in zip(self.names, table.tolist(), strict=True)
            if high > -math.inf
        }
        self.num_blind = 0 if self.seen else self.num_blind + 1
        if self.num_blind > 1:  # once may be a step whose batches were all dropped
            self._turn_off(step, "no module that is watched ran in a forward of training")
        self._tell_nonfinite(step, [self.names[index] for index in order])
        self._tell_headroom(step)
        self._fresh = bool(self.seen)

    def close(self) -> None:
        """Takes the hooks away and forgets what they saw."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._measures, self._order, self._in_forward, self._step = [], [], {}, set(), None

    def metrics(self) -> dict[str, float]:
        """Returns what the last look saw, if there was one since the last row of the log."""
        if not self._fresh:
            return {}
        self._fresh = False
        finite = {name: seen for name, seen in self.seen.items() if seen.is_finite}
        curves = {
            "headroom_bits": self.bits,
            "activation_max": {name: seen.largest for name, seen in finite.items()},
            "activation_rms": {name: min(seen.rms, seen.largest) for name, seen in finite.items()},
            "activation_zeros": {name: seen.zeros for name, seen in finite.items()},
            "activation_near_limit": {name: near for name in finite if (near := self._near(name)) is not None},
        }
        found = {
            f"nanguard/{noun}": (min if noun == "headroom_bits" else max)(curve.values())
            for noun, curve in curves.items()
            if curve
        }
        if self.full_metrics:
            found |= {f"nanguard/{noun}/{name}": v for noun, curve in curves.items() for name, v in curve.items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint, as JSON values."""
        return {"headroom": self.headroom.state_dict(), "next_look": self.next_look}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what [`ActivationMonitor.state_dict`] returned; modules that are not watched are left out."""
        watched = {name: trend for name, trend in state["headroom"].items() if name in self.names}
        self.headroom.load_state_dict(watched)
        self.next_look = state["next_look"]

    def _look(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.model.training:
            return
        self._order[index] = None
        if not torch.is_grad_enabled():
            return  # generation, a reference model, or a checkpointed block that is going to run again with gradients
        if not is_in_backward():
            self._in_forward.add(index)
        elif index in self._in_forward:
            return
        tensor = find_tensor(output)
        if tensor is None or index in self._failed:
            return
        near = self.bits.get(self.names[index], math.inf) < NEAR_BITS + 1
        try:
            self._measures.append(measure(index, tensor, near))
        except Exception as error:  # a tensor of another kind may raise anything, and the forward must go on
            self._tell_failed(index, error)

    def _near(self, name: str) -> float | None:
        seen = self.seen[name]
        return 0.0 if seen.largest < seen.limit * 2.0**-NEAR_BITS else seen.near_limit

    def _tell_failed(self, index: int, error: Exception) -> None:
        """Says that a module cannot be measured, on the rank where that is so, and leaves it out from here on."""
        self._failed.add(index)
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        message = f"the output of {self.names[index]} is not monitored: it could not be measured ({reason})"
        step, rank = self._step or 0, self.ranks.rank
        self.journal.write(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message, rank=rank))

    def _turn_off(self, step: int, why: str) -> None:
        self.is_off = True
        message = f"activations are not monitored: {why}"
        self.journal.write_once(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message))

    def _tell_nonfinite(self, step: int, order: list[str]) -> None:
        ran = [name for name in order if name in self.seen]
        ran += [name for name in self.seen if name not in ran]  # it ran on other ranks only
        bad: list[str] = []
        for name in reversed(ran):
            seen = self.seen[name]
            if not seen.is_finite and (bad or name in self.blocks or not seen.is_masked):
                bad.insert(0, name)
        if bad and not self.is_bad:
            first = self.seen[bad[0]]
            kind = "NaN" if first.has_nan else "inf"
            message = f"the output of {bad[0]} holds {kind} at step {step}"
            values = {"kind": kind.lower(), "num_modules": len(bad), "dtype": NAMES[first.limit]}
            if bad[0] in self.bits:
                values["last_bits"] = self.bits[bad[0]]
            cause = None if first.has_nan else CAUSES[first.limit]
            culprit = Culprit(phase="forward", module=bad[0])
            self.journal.write_once(
                Event(step, Signal.ACTIVATION_NONFINITE, Action.OBSERVED, message, None, 0, values, culprit, cause)
            )
        self.is_bad = bool(bad)

    def _tell_headroom(self, step: int) -> None:
        self.bits = {
            name: self.headroom.add(step, name, seen.largest, seen.limit)
            for name, seen in self.seen.items()
            if seen.is_finite and seen.largest > 0 and not seen.is_masked
        }
        forecast = self.headroom.find_danger(list(self.bits))
        self.next_look = self.headroom.next_look(self.every_n_steps, list(self.bits))
        if forecast is None:
            return
        limit = self.seen[forecast.module].limit
        values = {
            "bits": forecast.bits,
            "bits_per_100_steps": forecast.bits_per_100_steps,
            "overflow_step": forecast.overflow_step,
            "num_modules": forecast.num_modules,
            "dtype": NAMES[limit],
        }
        message = _describe(forecast, NAMES[limit])
        culprit = Culprit(phase="forward", module=forecast.module)
        self.journal.write_once(
            Event(step, Signal.ACTIVATION_HEADROOM, Action.OBSERVED, message, None, 0, values, culprit, CAUSES[limit])
        )


def _describe(forecast: Forecast, dtype: str) -> str:
    if forecast.overflow_step is None:
        return f"{forecast.module} has {forecast.bits:.1f} bits left before {dtype} overflows"
    return (
        f"{forecast.module} loses {-forecast.bits_per_100_steps:.2g} bits per 100 steps and has {forecast.bits:.1f} left: "
        f"{dtype} overflows near step {forecast.overflow_step:,}"
    )
