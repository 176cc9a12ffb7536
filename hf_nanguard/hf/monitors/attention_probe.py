"""One step at which attention, routers and the head of a transformers model are looked at, on a small sample.

What is seen of a step is its first forward that trains: generation and reference models do not count, and what gradient
checkpointing computes a second time is not measured a second time. A layer that is used several times in a forward is
measured at its first use.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...core.monitors.base import Hook
from ...core.monitors.softmax_health import (
    ABSENT,
    SAMPLES,
    measure_attention,
    measure_logsumexp,
    measure_router,
    pick_positions,
)
from ..compat.attention import find_routers, implies_causality, observed_attention

SHOWN = ("eager", "sdpa")  # implementations whose masks are plain tensors


def trains_now() -> bool:
    """Returns whether a forward that trains runs here, in Python: a look inside of a compiled graph would be part of it."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class AttentionProbe:
    """One step that is looked at: its hooks, and what they see in one buffer on the device.

    Args:
        model (`nn.Module`):
            The model without DDP.
        device (`torch.device`):
            Where the buffer lives.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        named = list(model.named_modules())
        names = {id(module): name for name, module in named}
        # A layer that attends holds its projections, so that modules without children are none. Which of the others
        # attend is known only once they do, and not on every rank alike, but the buffer has one shape.
        layers = [(name, module) for name, module in named if next(module.children(), None) is not None]
        self.layers = {id(module): row for row, (_, module) in enumerate(layers)}
        self.layer_names = [name for name, _ in layers]
        self.routers = find_routers(model)
        inner = next((module for _, module in named if isinstance(module, PreTrainedModel)), None)
        self.head = None if inner is None else inner.get_output_embeddings()
        self.head_name = names.get(id(self.head), "head")
        self.buffer = torch.full((2 * len(self.layers) + 4 * len(self.routers) + 2,), ABSENT, device=device)
        self.seen: set[int] = set()
        self.real: Tensor | None = None  # which tokens are no padding
        self.states: Tensor | None = None  # a few of those that a fused head is given
        self.states_real: Tensor | None = None
        self.hidden: set[str] = set()  # implementations that do not show their masks
        self.sharded_head = False
        self.stack = ExitStack()
        self._begin(model, inner)

    def _begin(self, model: nn.Module, inner: PreTrainedModel | None) -> None:
        hooks = [model.register_forward_pre_hook(Hook(self._see_inputs), with_kwargs=True)]
        for i, (_, router, place) in enumerate(self.routers):
            hooks.append(router.register_forward_hook(Hook(self._see_router(2 * len(self.layers) + 4 * i, place))))
        if inner is not None and isinstance(self.head, nn.Module):
            hooks.append(self.head.register_forward_hook(Hook(self._see_head)))
            if inner.base_model is not inner:
                hooks.append(inner.base_model.register_forward_hook(Hook(self._see_backbone)))
        for hook in hooks:
            self.stack.callback(hook.remove)
        self.stack.enter_context(observed_attention(self._see_attention))

    def end(self) -> None:
        """Takes the hooks away."""
        self.stack.close()

    def finish(self) -> None:
        """Takes the hooks away and gives a few hidden states to a head that was not called itself."""
        self.end()
        states, head, self.states = self.states, self.head, None
        if states is None or not isinstance(head, nn.Module) or id(head) in self.seen:
            return
        weights = list(head.parameters())
        if any(hasattr(weight, "to_local") or not weight.numel() for weight in weights):
            self.sharded_head = True
            return
        home = next((weight for weight in weights if weight.is_floating_point()), states)
        if home.shape[-1] != states.shape[-1]:
            return  # a head that stands behind something else
        modes = [(module, module.training) for module in head.modules()]
        try:
            for module, _ in modes:
                module.training = False  # the dropout of an adapter would draw random numbers
            with torch.no_grad(), torch.autocast(states.device.type, enabled=False):
                logits = head(states.to(home))
        finally:
            for module, mode in modes:
                module.training = mode
        self.buffer[-2:] = measure_logsumexp(logits, self.states_real)

    def _take(self, module: Any) -> bool:
        """Returns whether a module is to be measured, which it is once."""
        if not trains_now() or id(module) in self.seen:
            return False
        self.seen.add(id(module))
        return True

    def _see_inputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if trains_now():
            self.real = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _see_attention(
        self, implementation: str, module: Any, query: Tensor, key: Tensor, mask: Any, options: dict
    ) -> None:
        row = self.layers.get(id(module))
        if row is None or not self._take(module):
            return
        bias = options.get("position_bias")
        if implementation not in SHOWN or not matches(query, key, mask, bias):
            self.hidden.add(str(implementation))
            return
        causal = implies_causality(implementation, module, query, mask, options)
        found = measure_attention(query, key, options.get("scaling"), mask, causal, bias, options.get("softcap"))
        self.buffer[2 * row : 2 * row + 2] = found

    def _see_router(self, start: int, place: int) -> Any:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            logits = output[place] if isinstance(output, tuple) else output
            if not isinstance(logits, Tensor) or logits.ndim < 2 or logits.shape[-1] < 2 or not self._take(module):
                return
            same = self.real is not None and self.real.numel() == logits[..., 0].numel()
            self.buffer[start : start + 4] = measure_router(logits, self.real if same else None)

        return see

    def _see_head(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim >= 2 and self._take(module):
            self.buffer[-2:] = measure_logsumexp(*self._sample(output.detach()))

    def _see_backbone(self, module: nn.Module, args: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        if isinstance(states, Tensor) and states.ndim == 3 and self._take(module):
            states, self.states_real = self._sample(states.detach())
            self.states = states.clone()  # a view would keep all of them in memory

    def _sample(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns a few positions of shape (batch, position, feature), and which are no padding, if that is known."""
        picked = pick_positions(states.shape[1]) if states.ndim == 3 else slice(None)
        same = self.real is not None and self.real.shape == states.shape[:-1]
        real = self.real[:SAMPLES, picked].clone() if same and self.real is not None else None
        return states[:SAMPLES, picked] if states.ndim == 3 else states[:SAMPLES], real


def matches(query: Any, key: Any, *masks: Any) -> bool:
    """Returns whether queries and keys have the usual four dimensions, heads the usual groups, and masks, as far as there
    are any, a shape that broadcasts to the scores."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and query.ndim == key.ndim == 4):
        return False
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3] or query.shape[0] != key.shape[0]:
        return False
    given = [mask for mask in masks if mask is not None]
    return all(
        isinstance(mask, Tensor)
        and mask.ndim == 4
        and mask.shape[3] >= key.shape[2]
        and all(size in (1, full) for size, full in zip(mask.shape[:3], query.shape[:3], strict=True))
        for mask in given
    )


def read_probe(probe: AttentionProbe) -> dict[str, dict[str, float]]:
    """Reads what was seen: by noun, the value of every module that was seen. One host read."""
    values = probe.buffer.tolist()
    found: dict[str, dict[str, float]] = {}

    def note(module: str, start: int, **nouns: int) -> None:
        for place, (noun, sign) in enumerate(nouns.items(), start):
            column = found.setdefault(noun, {})
            if values[place] != ABSENT:
                column[module] = sign * values[place]

    for row, name in enumerate(probe.layer_names):
        note(name, 2 * row, attention_score=1, attention_entropy=-1)
    for i, (name, _, _) in enumerate(probe.routers):
        start = 2 * len(probe.layer_names) + 4 * i
        note(name, start, router_entropy=-1, router_load_entropy=-1, router_load=1, router_logit=1)
    note(probe.head_name, len(values) - 2, logsumexp_mean=1, logsumexp=1)
    nouns = ("attention_score", "attention_entropy", "router_entropy", "router_load_entropy", "router_load")
    return {**{noun: {} for noun in nouns}, **found}
