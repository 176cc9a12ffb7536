"""The health of softmaxes: attention that turns one-hot, routers that use one expert, logits that drift away.

Everything is measured on a small sample, without a gradient and without random numbers, and stays on the device. All
measurements are turned so that larger is worse, so that parts, micro-batches and ranks are combined by their maximum;
`ABSENT` says that there was nothing to measure. Entropies are relative: 1 is uniform, 0 is one-hot, however many keys or
experts there are. What it does not see: single heads (a layer is the mean of its heads) and what lies between two looks.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLES = 2  # of a micro-batch
POSITIONS = 8  # of a sample, evenly spread
TOKENS = 512  # of a router
MIN_KEYS = 4  # a query that sees fewer keys is one-hot, or nearly, by nature
MIN_TOKENS = 16  # fewer say nothing about the load of experts
HIDDEN = -9e3  # additive masks hide by -1e4 or less; position biases stay above
ABSENT = -math.inf
LOOKS = 3


def pick_positions(length: int) -> slice:
    """Returns `POSITIONS` places, or fewer, evenly spread over a length, the last one among them."""
    stride = -(-length // POSITIONS) if length else 1
    return slice((length - 1) % stride, None, stride)


def worse_of(values: list[Tensor], instead: float = ABSENT) -> Tensor:
    """Returns scalars as one float32 tensor, with `instead` for those that are NaN."""
    stacked = torch.stack([value.float() for value in values])
    return torch.where(stacked.isnan(), instead, stacked)


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

    Args:
        query (`Tensor`):
            Of shape (batch, heads, queries, features).
        key (`Tensor`):
            Of shape (batch, groups, keys, features); each group serves the same number of heads.
        scaling (`float`, *optional*):
            What scores are multiplied by; one over the root of the features by default.
        mask (`Tensor`, *optional*):
            True where a query sees a key, or a number that is added to the score; of a shape that broadcasts.
        causal (`bool`, *optional*, defaults to `False`):
            Whether, without a mask, query i sees the keys up to i only.
        bias (`Tensor`, *optional*):
            Is added to the scores, and hides nothing.
        softcap (`float`, *optional*):
            What scaled scores are squashed to, before masks and biases.

    Returns:
        `Tensor`: the largest score before the softmax, and minus the mean relative entropy of queries that see at least
        `MIN_KEYS` keys.
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
        return torch.cat([worse_of([scores.amax()], math.inf), worse_of([-mean])])


@torch.no_grad()
def measure_router(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Measures a router on up to `TOKENS` tokens.

    Args:
        logits (`Tensor`):
            Of shape (..., experts); probabilities, which some routers give, are known by their sums.
        real (`Tensor`, *optional*):
            Which tokens are no padding, as many as there are tokens.

    Returns:
        `Tensor`: minus the mean relative entropy of a token's distribution, minus the relative entropy of the mean
        distribution, the share of the expert that is the first choice of most tokens, and the largest logit.
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
    found = worse_of([-token, -load, share, rows.amax()])
    return torch.where(total >= MIN_TOKENS, found, ABSENT)


@torch.no_grad()
def measure_logsumexp(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Returns the mean and the largest magnitude of the log-sum-exp of logits of shape (..., vocabulary), over the
    positions that are `real` (all, if that is not known)."""
    found = logits.detach().float().logsumexp(-1).flatten()
    used = torch.ones_like(found, dtype=torch.bool) if real is None else real.flatten().bool()
    mean = torch.where(used, found, 0.0).sum() / used.sum()
    return worse_of([mean, torch.where(used, found.abs(), ABSENT).amax()])


@dataclass(frozen=True)
class Rule:
    """When a number of a module has gone bad: beyond a level, and by a ratio away from where it was at first.

    Args:
        rises (`bool`):
            Whether it is bad above; else below.
        level (`float`), ratio (`float`):
            The two bounds, of which the farther one counts.
    """

    rises: bool
    level: float
    ratio: float

    def bound(self, first: float) -> float:
        """Returns where bad begins for a module that was at `first`."""
        return max(self.level, self.ratio * first) if self.rises else min(self.level, self.ratio * first)

    def is_bad(self, value: float, first: float) -> bool:
        """Returns whether the value is bad."""
        return value > self.bound(first) if self.rises else value < self.bound(first)

    def is_well(self, value: float, first: float) -> bool:
        """Returns whether a module that was bad has recovered, clear of the bound by a factor of 2."""
        return 2 * value < self.bound(first) if self.rises else value > 2 * self.bound(first)


# Heads that rest on the first token bring healthy layers down to a tenth; a router may be confident as long as all
# experts are used; scores in the hundreds and log-sum-exps in the tens are seen in healthy large models.
RULES = {
    "attention_entropy": Rule(rises=False, level=0.05, ratio=0.25),
    "attention_score": Rule(rises=True, level=1000.0, ratio=4.0),
    "router_balance": Rule(rises=False, level=0.2, ratio=0.25),
    "logsumexp": Rule(rises=True, level=100.0, ratio=4.0),
}


@dataclass(frozen=True)
class Finding:
    """The worst module of those that have gone bad."""

    module: str
    value: float
    first: float
    num_modules: int


class CollapseWatch:
    """Follows one number of many modules and tells, once, when some have gone bad and stayed so.

    Args:
        rule (`Rule`):
            What bad means.
        looks (`int`, *optional*, defaults to `3`):
            How many looks make the first level, of which the best counts, and how many in a row make it bad.
    """

    def __init__(self, rule: Rule, looks: int = LOOKS):
        self.rule = rule
        self.looks = looks
        self.first: dict[str, list[float]] = {}
        self.in_a_row: dict[str, int] = {}
        self.sick: set[str] = set()
        self.told = False

    def observe(self, values: dict[str, float]) -> Finding | None:
        """Takes one look's values in, those that are not finite left out; returns what is to be told."""
        finite = {module: value for module, value in values.items() if math.isfinite(value)}
        for module, value in finite.items():
            early = self.first.setdefault(module, [])
            if len(early) < self.looks:
                early.append(value)
                continue
            first = self._first(module)
            self.in_a_row[module] = self.in_a_row.get(module, 0) + 1 if self.rule.is_bad(value, first) else 0
            if self.in_a_row[module] >= self.looks:
                self.sick.add(module)
            elif self.rule.is_well(value, first):
                self.sick.discard(module)
        seen = self.sick & finite.keys()
        if not self.sick:
            self.told = False
        if self.told or not seen:
            return None
        self.told = True
        worst = (max if self.rule.rises else min)(sorted(seen), key=finite.__getitem__)
        return Finding(worst, finite[worst], self._first(worst), len(self.sick))

    def _first(self, module: str) -> float:
        return (min if self.rule.rises else max)(self.first[module])

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs."""
        first = {module: list(early) for module, early in self.first.items()}
        return {"first": first, "in_a_row": dict(self.in_a_row), "sick": sorted(self.sick), "told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the watch of a checkpoint."""
        self.first = {module: [float(value) for value in early] for module, early in state["first"].items()}
        self.in_a_row = {module: int(count) for module, count in state["in_a_row"].items()}
        self.sick, self.told = set(state["sick"]), bool(state["told"])
