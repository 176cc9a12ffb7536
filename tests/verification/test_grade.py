"""The verdict on what was measured: each figure alone decides as the rules say."""

import json
import math

import pytest

from hf_nanguard.verification.grade import CHECKS, Verification


def healthy(**changes) -> Verification:
    """A trial in which nothing was wrong, but for `changes`."""
    figures = {
        "num_steps": 20, "num_done": 20, "num_forwards": 30, "norms": [0.5, 3.0, 2.0], "norms_after": [0.5, 1.0, 1.0],
        "max_grad_norm": 1.0, "num_seen": 40, "num_used": 40, "before": 4.0, "after": 3.0, "memory": 2**30,
        "memory_kind": "cuda:0 memory",
    }  # fmt: skip
    return Verification(**{**figures, **changes})


def test_a_healthy_trial_is_best_without_reasons():
    found = healthy()
    assert (found.verdict, found.reasons) == ("best", [])


@pytest.mark.parametrize(
    ("changes", "verdict", "name"),
    [
        ({"num_done": 19}, "failed", "completion"),
        ({"error": "RuntimeError: out of memory"}, "failed", "completion"),
        ({"memory_limit": 2**30 - 1}, "failed", "memory peak"),
        ({"bad_weights": {"lm_head.weight": "nan"}}, "failed", "completion"),
        ({"num_bad_forwards": 1}, "acceptable", "logits"),
        ({"num_bad_steps": 1, "num_nan_gradients": 3}, "acceptable", "gradients"),
        ({"norms_after": [0.5, 3.0, 1.0]}, "failed", "clipping"),
        ({"norms_after": [0.5, 1.02, 1.0]}, "failed", "clipping"),
        ({"num_used": 36}, "acceptable", "success rate"),  # 90 % is not over 90 %
        ({"num_used": 34}, "failed", "success rate"),  # 85 %
        ({"num_seen": 0, "num_used": 0}, "failed", "success rate"),
        ({"after": 4.0}, "acceptable", "held-out loss"),
        ({"after": 4.07}, "acceptable", "held-out loss"),
        ({"after": 4.09}, "failed", "held-out loss"),
        ({"after": math.nan}, "failed", "held-out loss"),
        ({"before": math.inf}, "failed", "held-out loss"),
        ({"measure": "reward", "after": 1.0}, "acceptable", "held-out reward"),
        ({"measure": "reward", "after": math.nan}, "failed", "held-out reward"),
    ],
    ids=str,
)
def test_one_figure_decides(changes, verdict, name):
    found = healthy(**changes)
    assert found.verdict == verdict
    [reason] = found.reasons
    assert reason.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_used": 37},
        {"memory_limit": 2**30},
        {"measure": "reward", "after": 5.0},
        {"measure": "reward", "after": 4.0},
        {"norms_after": [0.5, 1.005, 1.0]},
    ],
    ids=str,
)
def test_what_is_still_best(changes):
    assert healthy(**changes).verdict == "best"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_forwards": 0}, "logits"),
        ({"max_grad_norm": 0.0}, "clipping"),
        ({"norms": [0.5], "norms_after": [0.5]}, "clipping"),
        ({"after": None}, "held-out loss"),
        ({"memory": None}, "memory peak"),
    ],
    ids=str,
)
def test_what_was_not_measured_is_said_and_does_not_count(changes, name):
    found = healthy(**changes)
    assert found.verdict == "best"
    assert [check.name for check in found.checks if check.verdict == "not measured"] == [name]


def test_the_worst_decides_and_all_reasons_are_given():
    found = healthy(num_bad_forwards=1, num_used=20)
    assert found.verdict == "failed"
    assert [reason.split(":")[0] for reason in found.reasons] == ["logits", "success rate"]


def test_it_is_strict_json():
    found = healthy(after=math.nan, norms=[math.inf, 1.0, 1.0])
    read = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (read["verdict"], read["after"], read["norms"]) == ("failed", "nan", ["inf", 1.0, 1.0])
    assert [check["name"] for check in read["checks"]] == [check(found).name for check in CHECKS]
