"""Sampled statistics against plain loops in float64, and the rules that judge them on plain numbers."""

import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_nanguard.core.monitors.softmax_collapse import (
    ABSENT,
    MIN_KEYS,
    MIN_TOKENS,
    POSITIONS,
    SAMPLES,
    TOKENS,
    CollapseDetector,
    Rule,
    measure_attention,
    measure_logsumexp,
    measure_router,
    pick_positions,
)

INF, NAN = math.inf, math.nan


def entropy_of(scores):
    """The relative entropy of a softmax, and the log-sum-exp, in plain floats."""
    top = max(scores)
    total = sum(math.exp(score - top) for score in scores)
    shares = [math.exp(score - top) / total for score in scores]
    return -sum(p * math.log(p) for p in shares if p) / math.log(len(scores)), top + math.log(total)


def reference(query, key, scaling, mask=None, causal=False, bias=None, softcap=None):
    """The largest score and the mean relative entropy, by loops."""
    heads, length, per_group = query.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    full = (query.shape[0], heads, length, key.shape[2])
    mask = None if mask is None else mask.expand(full)
    bias = torch.zeros(full) if bias is None else bias.expand(full)
    largest, entropies = -INF, []
    for sample in range(min(query.shape[0], SAMPLES)):
        for head in range(heads):
            for i in range(length)[pick_positions(length)]:
                seen = []
                for j in range(key.shape[2]):
                    place = (sample, head, i, j)
                    score = scaling * float(
                        query[sample, head, i].double() @ key[sample, head // per_group, j].double()
                    )
                    score = score if softcap is None else softcap * math.tanh(score / softcap)
                    score += float(bias[place])
                    if mask is None:
                        hidden = causal and j > i
                    elif mask.dtype == torch.bool:
                        hidden = not mask[place]
                    else:
                        hidden = mask[place] < -9000
                        score += float(mask[place])
                    if not hidden:
                        seen.append(score)
                largest = max([largest, *seen])
                if len(seen) >= MIN_KEYS:
                    entropies.append(entropy_of(seen)[0])
    return largest, sum(entropies) / len(entropies) if entropies else None


def attend(seed, heads=4, groups=2, queries=6, keys=6, batch=3, size=1.0):
    """Random queries and keys."""
    draw = torch.Generator().manual_seed(seed)
    return (
        size * torch.randn(batch, heads, queries, 8, generator=draw),
        size * torch.randn(batch, groups, keys, 8, generator=draw),
        draw,
    )


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([1, 2, 4]),
    queries=st.integers(1, 20),
    more_keys=st.integers(0, 4),
    batch=st.integers(1, 3),
    size=st.sampled_from([0.1, 1.0, 5.0]),
    form=st.sampled_from(["none", "causal", "bool", "added", "infinite"]),
    softcap=st.sampled_from([None, 2.0]),
    biased=st.booleans(),
)
def test_attention_is_as_the_loops_have_it(seed, groups, queries, more_keys, batch, size, form, softcap, biased):
    query, key, draw = attend(seed, 4, groups, queries, queries + more_keys, batch, size)
    seen = torch.rand(batch, 1, queries, queries + more_keys, generator=draw) < 0.7
    mask = {"bool": seen, "added": torch.where(seen, 0.0, torch.finfo(torch.float32).min),
            "infinite": torch.where(seen, 0.0, -INF)}.get(form)  # fmt: skip
    bias = torch.randn(1, 4, queries, queries + more_keys, generator=draw) if biased else None
    options = {"mask": mask, "causal": form == "causal", "bias": bias, "softcap": softcap}
    score, negative = measure_attention(query, key, 0.5, **options).tolist()
    largest, entropy = reference(query, key, 0.5, **options)
    assert score == pytest.approx(largest, rel=1e-4, abs=1e-4)
    assert negative == (ABSENT if entropy is None else pytest.approx(-entropy, abs=1e-4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_are_taken_in_full_precision(dtype):
    """3 features of 200 times 200 are beyond float16, as a product and as a sum."""
    query = torch.full((1, 1, 4, 3), 200.0, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        score, negative = measure_attention(query, query, 0.999).tolist()
    assert score == pytest.approx(3 * 200**2 * 0.999, rel=1e-6)
    assert negative == pytest.approx(-1)


def test_the_default_scaling_is_that_of_the_features():
    query, key, _ = attend(0)
    assert torch.equal(measure_attention(query, key), measure_attention(query, key, 8**-0.5))


def test_nothing_visible_and_too_few_keys_are_absent():
    query, key, _ = attend(0, queries=3, keys=3)
    assert measure_attention(query, key, mask=torch.zeros(1, 1, 1, 3, dtype=torch.bool)).tolist() == [ABSENT, ABSENT]
    score, negative = measure_attention(query, key).tolist()
    assert math.isfinite(score)
    assert negative == ABSENT


def test_one_key_for_each_query_is_no_collapse():
    query, key, _ = attend(0, queries=8, keys=8)
    assert measure_attention(query, key, mask=torch.eye(8, dtype=torch.bool)[None, None])[1] == ABSENT


def test_a_score_that_is_nan_is_the_worst_and_no_entropy():
    query, key, _ = attend(0)
    query[0, 0, 0, 0] = NAN
    assert measure_attention(query, key).tolist() == [INF, ABSENT]


def test_measuring_leaves_no_trace():
    query, key, _ = attend(0)
    query.requires_grad_(), key.requires_grad_()
    before, state = (query.detach().clone(), key.detach().clone()), torch.get_rng_state()
    assert not measure_attention(query, key).requires_grad
    logits = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert not measure_router(logits).requires_grad
    assert not measure_logsumexp(logits).requires_grad
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


@given(st.integers(1, 10**5))
def test_positions_are_few_spread_and_hold_the_last(length):
    picked = list(range(length)[pick_positions(length)])
    assert min(length, POSITIONS // 2) <= len(picked) <= POSITIONS
    assert picked[-1] == length - 1
    assert len({b - a for a, b in pairwise(picked)}) <= 1
    assert picked[0] <= length // len(picked)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6), tokens=st.integers(MIN_TOKENS, 60), experts=st.integers(2, 9),
    size=st.sampled_from([0.1, 1.0, 8.0]), padded=st.booleans(), given_as=st.sampled_from(["logits", "probabilities"]),
)  # fmt: skip
def test_routers_are_as_the_loops_have_them(seed, tokens, experts, size, padded, given_as):
    draw = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(2, tokens, experts, generator=draw)
    logits = logits if given_as == "logits" else logits.softmax(-1)
    real = torch.ones(2, tokens, dtype=torch.long)
    real[1] = 0 if padded else 1
    rows = logits[:1] if padded else logits
    shares = (rows.double().softmax(-1) if given_as == "logits" else rows.double()).flatten(0, 1).tolist()
    mean = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
    firsts = [row.index(max(row)) for row in shares]
    expected = (
        -sum(-p * math.log(p) for row in shares for p in row if p) / len(shares) / math.log(experts),
        sum(p * math.log(p) for p in mean if p) / math.log(experts),
        max(map(firsts.count, range(experts))) / len(shares),
    )
    found = measure_router(logits, real if padded else None).tolist()
    assert found[:3] == pytest.approx(expected, abs=1e-4)
    assert found[3] >= float(rows.max()) - 1e-6


def test_a_router_of_few_tokens_says_nothing():
    assert measure_router(torch.randn(MIN_TOKENS - 1, 4)).tolist() == [ABSENT] * 4
    real = torch.tensor([1] * (MIN_TOKENS - 1) + [0] * 20)
    assert measure_router(torch.randn(MIN_TOKENS + 19, 4), real).tolist() == [ABSENT] * 4


def test_a_router_of_many_tokens_is_sampled_over_all_of_them():
    logits = torch.zeros(4 * TOKENS, 2)
    logits[: 2 * TOKENS, 0], logits[2 * TOKENS :, 1] = 50.0, 50.0
    assert measure_router(logits).tolist() == pytest.approx([0, -1, 0.5, 50], abs=1e-5)


def test_a_router_whose_logits_are_tiny_but_always_in_the_same_order_is_seen_by_its_load():
    token, load, share, largest = measure_router(torch.tensor([[1e-3, 0.0, 0.0, 0.0]]).expand(64, 4)).tolist()
    assert (token, load) == pytest.approx((-1, -1), abs=1e-3)
    assert share == 1
    assert largest == pytest.approx(1e-3)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.sampled_from([-300.0, 0.0, 300.0]), padded=st.booleans())
def test_logsumexp_is_as_the_loops_have_it(seed, shift, padded):
    logits = shift + torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(seed))
    real = torch.tensor([[1, 1, 1], [1, 0, 0]]) if padded else torch.ones(2, 3)
    found = [entropy_of(row)[1] for row, r in zip(logits.flatten(0, 1).tolist(), real.flatten(), strict=True) if r]
    expected = [sum(found) / len(found), max(map(abs, found))]
    assert measure_logsumexp(logits, real if padded else None).tolist() == pytest.approx(expected, rel=1e-4)


# ---- rules ----

FALLS = Rule(rises=False, level=0.05, ratio=0.25)
RISES = Rule(rises=True, level=100.0, ratio=4.0)


def feed(watch, *looks):
    """Feeds values of one module; returns the looks at which something was told."""
    return [i for i, value in enumerate(looks) if watch.observe({"a": value}) is not None]


@pytest.mark.parametrize(
    ("rule", "well", "bad"), [(FALLS, 0.9, 0.01), (FALLS, 0.1, 0.02), (RISES, 4.0, 150.0), (RISES, 60.0, 300.0)]
)
def test_what_stays_bad_is_told_once(rule, well, bad):
    assert feed(CollapseDetector(rule), *[well] * 6, *[bad] * 10) == [8]


@pytest.mark.parametrize(
    ("rule", "well", "other"),
    [(FALLS, 0.9, 0.06), (FALLS, 0.1, 0.03), (FALLS, 0.0, 0.0), (RISES, 4.0, 99.0), (RISES, 60.0, 239.0), (RISES, -5.0, 90.0)],
)  # fmt: skip
def test_beyond_one_bound_only_is_no_news(rule, well, other):
    assert feed(CollapseDetector(rule), *[well] * 6, *[other] * 10) == []


def test_two_looks_in_a_row_are_too_few():
    assert feed(CollapseDetector(FALLS), *[0.9] * 3, *[0.01, 0.01, 0.9] * 5) == []


def test_what_was_bad_from_the_beginning_has_no_level_to_fall_from():
    assert feed(CollapseDetector(FALLS), *[0.01] * 20) == []


def test_the_best_of_the_first_looks_is_the_level():
    assert feed(CollapseDetector(FALLS), 0.9, 0.1, 0.01, *[0.01] * 5) == [5]


def test_it_is_told_again_only_after_a_clear_recovery():
    near, clear = 0.06, 0.2
    assert feed(CollapseDetector(FALLS), *[0.9] * 3, *[0.01] * 3, *[near] * 5, *[0.01] * 5) == [5]
    assert feed(CollapseDetector(FALLS), *[0.9] * 3, *[0.01] * 3, clear, *[0.01] * 5) == [5, 9]


def test_the_worst_module_is_named_and_the_others_are_counted():
    watch = CollapseDetector(FALLS)
    for _ in range(3):
        watch.observe({"a": 0.9, "b": 0.8, "c": 0.9})
    found = [watch.observe({"a": 0.02, "b": 0.01, "c": 0.9}) for _ in range(4)]
    assert [finding is not None for finding in found] == [False, False, True, False]
    assert (found[2].module, found[2].value, found[2].first, found[2].num_modules) == ("b", 0.01, 0.8, 2)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_is_never_let_in(value):
    watch = CollapseDetector(FALLS)
    assert feed(watch, *[value, 0.9] * 3, *[value, 0.01] * 3) == [11]
    assert all(map(math.isfinite, watch.first["a"]))


VALUES = st.lists(st.sampled_from([0.9, 0.3, 0.06, 0.04, 0.01]), max_size=14)


@given(VALUES, VALUES)
def test_a_watch_goes_on_after_a_checkpoint(before, after):
    whole, part, resumed = (CollapseDetector(FALLS) for _ in range(3))
    feed(whole, *before)
    feed(part, *before)
    saved = part.state_dict()
    feed(part, *[0.01] * 9)  # what the watch sees later does not change what was saved
    resumed.load_state_dict(json.loads(json.dumps(saved)))
    assert feed(resumed, *after) == feed(whole, *after)
