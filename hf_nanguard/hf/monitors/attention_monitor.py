"""Looks at attention, routers and the head of a transformers model every so many steps, on a small sample.

Growing attention scores are told as `entropy_collapse`, for they are what makes a softmax one-hot. A growing log-sum-exp
is told as `activation_headroom`: a softmax does not feel where its logits lie, but their dtype does.
"""

import logging
import math
from typing import Any

import torch.distributed as dist
from torch import nn

from ...core.event import Culprit, Event
from ...core.journal import Journal
from ...core.monitors.base import EARLY, Monitor
from ...core.monitors.softmax_health import RULES, CollapseWatch, Finding
from ...core.ranks import Ranks
from ...core.vocabulary import Action, Signal
from .attention_probe import AttentionProbe, read_probe

logger = logging.getLogger("hf_nanguard")

MESSAGES = {
    "attention_entropy": "attention of {module} has become one-hot: its relative entropy is {value:.3g}, after {first:.3g}",
    "attention_score": "attention scores of {module} have grown to {value:.4g}, from {first:.4g}: a softmax of such scores is one-hot",
    "router_balance": "router {module} sends nearly all tokens to the same experts: {value:.3g} is left of a balance of {first:.3g}",
    "logsumexp": "the log-sum-exp of the logits of {module} has grown to {value:.4g}, from {first:.4g}",
}  # fmt: skip
ADVICE = {
    "attention_entropy": "Lower the learning rate, or normalise queries and keys",
    "attention_score": "Lower the learning rate, or normalise queries and keys",
    "router_balance": "Raise the weight of the load balancing loss (router_aux_loss_coef, output_router_logits=True)",
    "logsumexp": "Add a z-loss, or lower the learning rate of the head",
}


class AttentionMonitor(Monitor):
    """Tells when attention turns one-hot, a router uses one expert only, or logits grow out of bounds.

    | metric | meaning |
    |---|---|
    | `nanguard/attention_score_max` | largest score before the softmax, over layers |
    | `nanguard/attention_entropy_min` | lowest relative entropy of a layer: 1 is uniform, 0 one-hot |
    | `nanguard/router_entropy_min` | lowest relative entropy of a router's distribution for a token |
    | `nanguard/router_load_max` | largest share of tokens whose first choice is the same expert |
    | `nanguard/logsumexp_max` | largest magnitude of the log-sum-exp of the head's logits |

    Args:
        model (`nn.Module`):
            The model without DDP.
        journal (`Journal`), ranks (`Ranks`):
            Those of the guard.
        every_n_steps (`int`, *optional*, defaults to `0`):
            The period; 0 turns it off.
        full_metrics (`bool`, *optional*, defaults to `False`):
            Whether metrics name every module, as `nanguard/attention_entropy/<module>` and so on.
        early (`tuple[int, ...]`, *optional*, defaults to `(10, 20, 40)`):
            Further steps at which it looks.

    A look costs some 60 small operations a layer, views among them, one host read and, on many ranks, one reduction.
    """

    def __init__(
        self,
        model: nn.Module,
        journal: Journal,
        ranks: Ranks,
        every_n_steps: int = 0,
        full_metrics: bool = False,
        early: tuple[int, ...] = EARLY,
    ):
        super().__init__(every_n_steps, early)
        self.model = model
        self.journal = journal
        self.ranks = ranks
        self.full_metrics = full_metrics
        self.probe: AttentionProbe | None = None
        self.watches = {kind: CollapseWatch(rule) for kind, rule in RULES.items()}
        self.row: dict[str, float] = {}
        self.said: set[str] = set()
        self.blind = False

    def begin_step(self, step: int) -> None:
        """Puts the hooks of a due step in place."""
        self.close()
        if self.is_due(step) and not self.blind:
            self.probe = AttentionProbe(self.model, self.ranks.device)

    def end_backward(self, step: int) -> None:
        """Takes them away."""
        if self.probe is not None:
            self.probe.finish()

    def after_update(self, step: int) -> str | None:
        """Reads what was seen, and judges it."""
        probe, self.probe = self.probe, None
        if probe is None:
            return None
        probe.end()
        if self.ranks.size > 1:
            dist.all_reduce(probe.buffer, op=dist.ReduceOp.MAX)
        found = read_probe(probe)
        self._say_what_is_missing(probe, found, step)
        self._note_metrics(found)
        others = {module: 1 - share for module, share in found["router_load"].items()}
        balance = {module: min(load, others[module]) for module, load in found["router_load_entropy"].items()}
        judged = {**found, "router_balance": balance}
        for kind, watch in self.watches.items():
            if (finding := watch.observe(judged[kind])) is not None:
                self._tell(kind, finding, found, step)
        return None

    def close(self) -> None:
        """Takes away the hooks of a step that was broken off."""
        if self.probe is not None:
            self.probe.end()
        self.probe = None

    def metrics(self) -> dict[str, float]:
        """Returns what the looks since the last row of the log have seen, the newest value of each."""
        row, self.row = self.row, {}
        return row

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint."""
        return {kind: watch.state_dict() for kind, watch in self.watches.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        for kind, watch in self.watches.items():
            watch.load_state_dict(state[kind])

    def _note_metrics(self, found: dict[str, dict[str, float]]) -> None:
        worst = {
            "attention_score": max,
            "attention_entropy": min,
            "router_entropy": min,
            "router_load": max,
            "logsumexp": max,
        }
        for noun, choose in worst.items():
            values = {module: value for module, value in found[noun].items() if math.isfinite(value)}
            if values:
                self.row[f"nanguard/{noun}_{choose.__name__}"] = choose(values.values())
            if self.full_metrics:
                self.row |= {f"nanguard/{noun}/{module}": value for module, value in values.items()}

    def _tell(self, kind: str, finding: Finding, found: dict[str, dict[str, float]], step: int) -> None:
        module = finding.module
        signal = Signal.ACTIVATION_HEADROOM if kind == "logsumexp" else Signal.ENTROPY_COLLAPSE
        more = f" ({finding.num_modules - 1} more modules likewise)" if finding.num_modules > 1 else ""
        message = MESSAGES[kind].format(module=module, value=finding.value, first=finding.first)
        measured = {noun: seen[module] for noun, seen in found.items() if module in seen}
        values = {
            "kind": kind,
            "first": finding.first,
            "num_modules": finding.num_modules,
            kind: finding.value,
            **measured,
        }
        culprit = Culprit(phase="forward", module=module)
        text = f"{message}{more} at step {step}. {ADVICE[kind]}."
        self.journal.write_once(Event(step, signal, Action.OBSERVED, text, values=values, culprit=culprit))

    def _say_what_is_missing(self, probe: AttentionProbe, found: dict[str, dict[str, float]], step: int) -> None:
        if not any(found.values()):
            self.blind = True
            message = (
                "attention, routers and head could not be looked at: a compiled model does not run its hooks, and a model "
                "that is not of transformers has no such interface. This monitor is off from here on"
            )
            self.journal.write_once(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message))
            return
        if probe.hidden:
            names = ", ".join(sorted(probe.hidden))
            self._say(
                f"attention with attn_implementation={names!r} is not looked at: its mask is not shown. Use 'sdpa' or 'eager'."
            )
        elif not found["attention_score"]:
            self._say(
                "attention is not looked at: no layer fetches it by the interface of transformers, or layers are compiled."
            )
        if probe.sharded_head:
            self._say(
                "the log-sum-exp of the head is not looked at: its weight is sharded and its forward is not called."
            )

    def _say(self, text: str) -> None:
        if text not in self.said and self.ranks.rank == 0:
            logger.warning("hf_nanguard: %s", text)
        self.said.add(text)
