"""A run that learns nothing is told once; a loss of zero with a live gradient is not such a run."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_nanguard.hf.rl.equal_rewards import StallWatch

NAMES = ["accuracy", "format"]


def observe(watch, steps, first=0):
    """Feeds (all_equal, grad_norm) pairs; returns the steps at which a message came."""
    return [first + i for i, (equal, norm) in enumerate(steps) if watch.observe(first + i, equal, norm, NAMES)]


@pytest.mark.parametrize("stalled", [(True, 0.0), (True, 0.3), (False, 0.0), (None, 0.0), (True, None)])
def test_a_stall_is_told_once_at_its_length(stalled):
    assert observe(StallWatch(3), [stalled] * 10) == [2]


@pytest.mark.parametrize("healthy", [(False, 0.5), (None, 1e-30), (False, None), (False, float("nan"))])
def test_healthy_steps_are_silent(healthy):
    assert observe(StallWatch(1), [healthy] * 10) == []


@pytest.mark.parametrize("alive", [(False, 0.5), (False, None)])
def test_a_stall_is_told_again_after_it_has_ended(alive):
    stall = [(True, 0.0)]
    assert observe(StallWatch(2), stall * 5 + [alive] + stall + [alive] + stall * 4) == [1, 9]


def test_a_step_without_news_neither_ends_nor_prolongs_it():
    unknown = [(None, None), (None, float("nan")), (None, float("inf"))]
    assert observe(StallWatch(3), [(True, 0.0), *unknown, (True, 0.0), *unknown, (True, 0.0)]) == [8]


def test_steps_that_reuse_completions_go_by_the_rewards_of_their_generation():
    equal, unequal = [(True, 0.2), (None, 0.2)], [(False, 0.2), (None, 0.2)]
    assert observe(StallWatch(4), equal * 2) == [3]
    assert observe(StallWatch(2), unequal * 4) == []
    assert observe(StallWatch(2), [(True, 0.2), (False, 0.2), (None, 0.2), (None, 0.2)]) == []


def test_zero_turns_it_off():
    assert observe(StallWatch(0), [(True, 0.0)] * 50) == []


def test_the_message_names_steps_functions_and_reason():
    watch = StallWatch(2)
    assert watch.observe(7, True, 0.1, NAMES) is None
    message = watch.observe(8, True, 0.1, NAMES, constant={"format"})
    assert "2 optimizer steps in a row, from step 7 to 8" in message
    assert "equal within every group" in message
    assert "exactly zero" not in message
    assert "accuracy, format (constant: format)" in message


def test_a_zero_gradient_is_told_as_such():
    message = StallWatch(1).observe(3, False, 0.0, NAMES, constant=[])
    assert "the gradient was exactly zero" in message
    assert "equal" not in message
    assert "constant" not in message


def test_a_mixed_stall_names_both():
    watch = StallWatch(2)
    watch.observe(0, True, 0.4, NAMES)
    message = watch.observe(1, False, 0.0, NAMES)
    assert "equal within every group or the gradient was exactly zero" in message


STEPS = st.lists(
    st.tuples(st.sampled_from([True, False, None]), st.sampled_from([0.0, 0.5, None, float("nan")])), max_size=12
)


@given(STEPS, STEPS, st.integers(1, 4))
def test_a_checkpoint_changes_nothing(before, after, stall_steps):
    whole, first, second = StallWatch(stall_steps), StallWatch(stall_steps), StallWatch(stall_steps)
    told = observe(whole, before + after)
    told_before = observe(first, before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert told_before + observe(second, after, first=len(before)) == told
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("state", [{}, {**StallWatch(1).state_dict(), "first_step": "x"}])
def test_a_broken_state_is_refused_and_leaves_the_watch_as_it_was(state):
    watch = StallWatch(5)
    watch.observe(3, True, 0.0, NAMES)
    before = watch.state_dict()
    with pytest.raises((KeyError, ValueError)):
        watch.load_state_dict(state)
    assert watch.state_dict() == before
