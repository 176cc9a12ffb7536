"""Detects softmaxes that collapse: attention that becomes one-hot, routers that use one expert, logits that drift away.

Everything is measured on a small sample, without gradients or random numbers, and stays on the device. Larger is worse in all
measurements (entropies are negated), so that micro-batches and ranks are combined by their maximum; `ABSENT` means that there
was nothing to measure. Entropies are relative: 1 is uniform, 0 is one-hot, however many keys or experts there are. It does
not see single heads (a layer is the mean of its heads) nor what happens between two checks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..event import JsonObject

SAMPLES = 2  # of a micro-batch
POSITIONS = 8  # of a sample, evenly spread
TOKENS = 512  # of a router
MIN_KEYS = 4  # a query that sees fewer keys is always nearly one-hot
MIN_TOKENS = 16  # fewer say nothing about the load of experts
HIDDEN = -9e3  # additive masks use -1e4 or less; position biases stay above
ABSENT = -math.inf
CHECKS = 3  # how many checks define the initial level, of which the best counts, and how many in a row a collapse


def pick_positions(length: int) -> slice:
    """Returns at most `POSITIONS` places, evenly spread over a length, including the last one."""
    stride = -(-length // POSITIONS) if length else 1
    return slice((length - 1) % stride, None, stride)


def _stack(values: list[Tensor], nan: float = ABSENT) -> Tensor:
    """Returns scalars as one float32 tensor, with `nan` in place of NaN."""
    stacked = torch.stack([value.float() for value in values])
    return torch.where(stacked.isnan(), nan, stacked)


@torch.no_grad()
def measure_attention(
    query: Tensor,
    key: Tensor,
    scaling: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Measures an attention layer on a few queries of one or two samples.

    Returns the largest score before the softmax, and minus the mean relative entropy of queries that see at least `MIN_KEYS`
    keys. Queries have the shape (batch, heads, queries, features), keys (batch, groups, keys, features), where each group
    serves the same number of heads. Scores are multiplied by `scaling` (by default one over the root of the features) and
    squashed to `softcap`; then the `mask` (true where a query sees a key, or a number to add) and the `bias`, which hides
    nothing, apply. Without a mask, `causal` lets query i see the keys up to i only.
    """
    length, num_keys = query.shape[2], key.shape[2]
    picked = pick_positions(length)
    wide = torch.promote_types(query.dtype, torch.float32)

    def cut(rows: Tensor) -> Tensor:
        rows = rows[:SAMPLES, :, :, :num_keys]
        return rows[:, :, picked] if rows.shape[2] == length else rows

    with torch.autocast(query.device.type, enabled=False):
        queries, keys = query[:SAMPLES, :, picked].to(wide), key[:SAMPLES].to(wide)
        shape = queries.shape[:3]
        grouped = queries.reshape(shape[0], keys.shape[1], -1, queries.shape[3])
        scores = (grouped @ keys.transpose(2, 3)).reshape(*shape, num_keys)
        scores = scores * (query.shape[3] ** -0.5 if scaling is None else scaling)
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = scores if bias is None else scores + cut(bias)
        visible = torch.ones((), dtype=torch.bool, device=query.device)
        if mask is not None and mask.dtype == torch.bool:
            visible = cut(mask)
        elif mask is not None:
            visible = cut(mask) > HIDDEN
            scores = scores + cut(mask)
        elif causal:
            places = torch.arange(max(length, num_keys), device=query.device)
            visible = places[:num_keys] <= places[:length][picked, None]
        visible = visible.expand_as(scores)
        scores = scores.masked_fill(~visible, -math.inf)
        count = visible.sum(-1)
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1) / count.clamp(min=2).log()
        enough = count >= MIN_KEYS
        mean = torch.where(enough, entropy, 0.0).sum() / enough.sum()  # NaN if there is none
        return torch.cat([_stack([scores.amax()], math.inf), _stack([-mean])])


@torch.no_grad()
def measure_router(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Measures a router on up to `TOKENS` tokens: minus the mean relative entropy of a token's distribution, minus the relative
    entropy of the mean distribution, the share of the expert that is the first choice of most tokens, and the largest logit.

    Logits have the shape (..., experts); probabilities, which some routers return, are recognized by their sums. `real` says
    which tokens are not padding.
    """
    rows = logits.detach().flatten(0, -2)
    stride = max(1, -(-rows.shape[0] // TOKENS))
    rows = rows[::stride].float()
    weight = torch.ones_like(rows[:, 0]) if real is None else real.flatten()[::stride].to(rows)
    given = (rows >= 0).all() & ((rows.sum(-1) - 1).abs() < 1e-2).all()
    probabilities = torch.where(given, rows, rows.softmax(-1))
    total, most = weight.sum(), math.log(rows.shape[-1])
    used = weight > 0
    token = torch.where(used, torch.special.entr(probabilities).sum(-1), 0.0).sum() / total / most
    mean = torch.where(used[:, None], probabilities, 0.0).sum(0) / total
    load = torch.special.entr(mean).sum() / most
    experts = torch.arange(rows.shape[-1], device=rows.device)
    share = ((rows.argmax(-1, keepdim=True) == experts) & used[:, None]).sum(0).amax() / total
    found = _stack([-token, -load, share, rows.amax()])
    return torch.where(total >= MIN_TOKENS, found, ABSENT)


@torch.no_grad()
def measure_logsumexp(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Returns the mean and the largest magnitude of the log-sum-exp of logits of shape (..., vocabulary), over the
    positions that are `real` (all, if that is not known)."""
    found = logits.detach().float().logsumexp(-1).flatten()
    used = torch.ones_like(found, dtype=torch.bool) if real is None else real.flatten().bool()
    mean = torch.where(used, found, 0.0).sum() / used.sum()
    return _stack([mean, torch.where(used, found.abs(), ABSENT).amax()])


@dataclass(frozen=True)
class Rule:
    """When a value of a module has collapsed: beyond a level, and by a ratio away from its initial value.

    The farther of the two bounds counts.
    """

    rises: bool  # whether large values are bad; else small ones
    level: float
    ratio: float

    def bound(self, first: float) -> float:
        """Returns the bound for a module whose initial value was `first`."""
        return max(self.level, self.ratio * first) if self.rises else min(self.level, self.ratio * first)

    def is_bad(self, value: float, first: float) -> bool:
        """Returns whether the value is beyond its bound."""
        return value > self.bound(first) if self.rises else value < self.bound(first)

    def is_recovered(self, value: float, first: float) -> bool:
        """Returns whether the value is clear of its bound by a factor of 2."""
        return 2 * value < self.bound(first) if self.rises else value > 2 * self.bound(first)


# Heads that attend to the first token bring healthy layers down to 0.1; a router may be confident as long as all
# experts are used; scores in the hundreds and log-sum-exps in the tens occur in healthy large models.
RULES = {
    "attention_entropy": Rule(rises=False, level=0.05, ratio=0.25),
    "attention_score": Rule(rises=True, level=1000.0, ratio=4.0),
    "router_balance": Rule(rises=False, level=0.2, ratio=0.25),
    "logsumexp": Rule(rises=True, level=100.0, ratio=4.0),
}


@dataclass(frozen=True)
class Finding:
    """The worst of the modules that have collapsed."""

    module: str
    value: float
    first: float
    num_modules: int


class CollapseDetector:
    """Follows one value of many modules and reports once when some of them have collapsed."""

    def __init__(self, rule: Rule):
        self.rule = rule
        self.first: dict[str, list[float]] = {}
        self.in_a_row: dict[str, int] = {}
        self.collapsed: set[str] = set()
        self.reported = False

    def observe(self, values: dict[str, float]) -> Finding | None:
        """Adds the values of one check, non-finite ones left out; returns what is to be reported."""
        finite = {module: value for module, value in values.items() if math.isfinite(value)}
        for module, value in finite.items():
            early = self.first.setdefault(module, [])
            if len(early) < CHECKS:
                early.append(value)
                continue
            first = self._initial(module)
            self.in_a_row[module] = self.in_a_row.get(module, 0) + 1 if self.rule.is_bad(value, first) else 0
            if self.in_a_row[module] >= CHECKS:
                self.collapsed.add(module)
            elif self.rule.is_recovered(value, first):
                self.collapsed.discard(module)
        measured = self.collapsed & finite.keys()
        if not self.collapsed:
            self.reported = False
        if self.reported or not measured:
            return None
        self.reported = True
        worst = (max if self.rule.rises else min)(sorted(measured), key=finite.__getitem__)
        return Finding(worst, finite[worst], self._initial(worst), len(self.collapsed))

    def _initial(self, module: str) -> float:
        return (min if self.rule.rises else max)(self.first[module])

    def state_dict(self) -> JsonObject:
        first = {module: list(early) for module, early in self.first.items()}
        collapsed = sorted(self.collapsed)
        return {"first": first, "in_a_row": dict(self.in_a_row), "collapsed": collapsed, "reported": self.reported}

    def load_state_dict(self, state: JsonObject) -> None:
        self.first = {module: [float(value) for value in early] for module, early in state["first"].items()}
        self.in_a_row = {module: int(count) for module, count in state["in_a_row"].items()}
        self.collapsed, self.reported = set(state["collapsed"]), bool(state["reported"])
