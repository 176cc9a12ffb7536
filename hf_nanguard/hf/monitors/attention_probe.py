"""Measures attention, routers and the head of a transformers model in one training step, on a small sample.

Only the first training forward of a step is measured: not generation or reference models, nor the recomputation of gradient
checkpointing. A layer that is used several times in a forward is measured at its first use.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...boundary import Boundary
from ...core.monitors.base import Hook
from ...core.monitors.module_outputs import Head, apply_head, has_whole_weights
from ...core.monitors.softmax_collapse import (
    ABSENT,
    SAMPLES,
    measure_attention,
    measure_logsumexp,
    measure_router,
    pick_positions,
)
from ..compat.attention import find_routers, implies_causality, observed_attention

SHOWN = ("eager", "sdpa")  # implementations whose masks are plain tensors

# What is measured of each, in the order of the measurement; -1 if larger is better, because the buffer keeps maxima.
LAYER = {"attention_score": 1, "attention_entropy": -1}
ROUTER = {"router_entropy": -1, "router_load_entropy": -1, "router_load": 1, "router_logit": 1}
HEAD = {"logsumexp_mean": 1, "logsumexp": 1}

Measured = dict[str, dict[str, float]]  # by noun, the value of each module


def trains_now() -> bool:
    """Returns whether a training forward runs in Python; inside of a compiled graph, measuring would become part of it."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def find_head(model: nn.Module) -> Head | None:
    """Returns the output embeddings of a transformers model, also of one inside an adapter; `None` without any."""
    named = dict(model.named_modules())
    inner = next((module for module in named.values() if isinstance(module, PreTrainedModel)), None)
    head = None if inner is None else inner.get_output_embeddings()
    name = next((name for name, module in named.items() if module is head), None)
    return Head(name, head, inner.base_model) if inner is not None and head is not None and name is not None else None


class AttentionProbe:
    """Hooks that measure one step of a model without DDP wrapper until `hooks` is closed, and the measurements in one buffer on
    the device."""

    def __init__(self, model: nn.Module, device: torch.device, boundary: Boundary, hooks: ExitStack):
        named = list(model.named_modules())
        self.columns: list[tuple[str, str, int]] = []  # module, noun and sign of each value in the buffer
        # An attention layer has children, its projections. Which modules with children compute attention is known only
        # once they do, and not on every rank alike, but the buffer needs the same shape on all.
        self.layers = {
            id(module): self._reserve(name, LAYER)
            for name, module in named
            if next(module.children(), None) is not None
        }
        routers = [(self._reserve(name, ROUTER), router, place) for name, router, place in find_routers(model)]
        self.head = find_head(model)
        self.head_start = self._reserve("head" if self.head is None else self.head.name, HEAD)
        self.buffer = torch.full((len(self.columns),), ABSENT, device=device)
        self.seen: set[int] = set()
        self.real: Tensor | None = None  # which tokens are not padding
        self.states: Tensor | None = None  # a few of the hidden states that a fused head receives
        self.states_real: Tensor | None = None
        self.hidden: set[str] = set()  # implementations whose masks are not accessible
        self.sharded_head = False
        safe = partial(boundary.wrapped, "attention hooks")
        hooks.enter_context(model.register_forward_pre_hook(Hook(safe(self._see_inputs)), with_kwargs=True))
        for start, router, place in routers:
            hooks.enter_context(router.register_forward_hook(Hook(safe(self._see_router(start, place)))))
        if self.head is not None:
            hooks.enter_context(self.head.module.register_forward_hook(Hook(safe(self._see_head))))
            hooks.enter_context(self.head.backbone.register_forward_hook(Hook(safe(self._see_backbone))))
        hooks.enter_context(observed_attention(self._see_attention, boundary))

    def _reserve(self, module: str, nouns: dict[str, int]) -> int:
        """Reserves a place in the buffer for the measurements of a module; returns where it begins."""
        start = len(self.columns)
        self.columns += [(module, noun, sign) for noun, sign in nouns.items()]
        return start

    def finish(self) -> None:
        """Applies the head to a few of its hidden states if it was not called itself; the hooks must be gone."""
        states, head, self.states = self.states, self.head, None
        if states is None or head is None or id(head.module) in self.seen:
            return
        self.sharded_head = not has_whole_weights(head.module)
        logits = apply_head(head.module, states)
        if logits is None:
            return
        self._write(self.head_start, measure_logsumexp(logits, self.states_real))

    def read(self) -> Measured:
        """Returns by noun the value of every module that was measured. One host read."""
        found: Measured = {noun: {} for noun in (*LAYER, *ROUTER, *HEAD)}
        for value, (module, noun, sign) in zip(self.buffer.tolist(), self.columns, strict=True):
            if value != ABSENT:
                found[noun][module] = sign * value
        return found

    def _write(self, start: int, values: Tensor) -> None:
        self.buffer[start : start + len(values)] = values

    def _is_first(self, module: nn.Module) -> bool:
        """Returns whether a module is called for the first time in a training forward of the step."""
        if not trains_now() or id(module) in self.seen:
            return False
        self.seen.add(id(module))
        return True

    def _see_inputs(self, module: nn.Module, args: object, kwargs: dict[str, object]) -> None:
        mask = kwargs.get("attention_mask")
        if trains_now():
            self.real = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _see_attention(
        self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        start = self.layers.get(id(module))
        if start is None or not self._is_first(module):
            return
        bias = options.get("position_bias")
        if implementation not in SHOWN or not matches(query, key, mask, bias):
            self.hidden.add(str(implementation))
            return
        causal = implies_causality(implementation, module, query, mask, options)
        scaling, softcap = options.get("scaling"), options.get("softcap")
        self._write(start, measure_attention(query, key, scaling, mask, causal, bias, softcap))

    def _see_router(self, start: int, place: int) -> Callable[..., None]:
        def see(module: nn.Module, args: object, output: object) -> None:
            logits = output[place] if isinstance(output, tuple) else output
            if not isinstance(logits, Tensor) or logits.ndim < 2 or logits.shape[-1] < 2 or not self._is_first(module):
                return
            same = self.real is not None and self.real.numel() == logits[..., 0].numel()
            self._write(start, measure_router(logits, self.real if same else None))

        return see

    def _see_head(self, module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim >= 2 and self._is_first(module):
            self._write(self.head_start, measure_logsumexp(*self._sample(output.detach())))

    def _see_backbone(self, module: nn.Module, args: object, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        if isinstance(states, Tensor) and states.ndim == 3 and self._is_first(module):
            states, self.states_real = self._sample(states.detach())
            self.states = states.clone()  # a view would keep all of them in memory

    def _sample(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns a few positions of states (batch, position, feature), and which of them are not padding, if known."""
        picked = pick_positions(states.shape[1]) if states.ndim == 3 else slice(None)
        same = self.real is not None and self.real.shape == states.shape[:-1]
        real = self.real[:SAMPLES, picked].clone() if same and self.real is not None else None
        return states[:SAMPLES, picked] if states.ndim == 3 else states[:SAMPLES], real


def matches(query: object, key: object, *masks: object) -> bool:
    """Returns whether queries and keys have the usual four dimensions, heads the usual groups, and masks, if any, a shape
    that broadcasts to the scores."""
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
