"""The random state is kept and put back whole."""

import random

import numpy as np
import pytest
import torch

from hf_nanguard.core.rng import OwnGenerator, RngState, is_generator
from hf_nanguard.testing import OperationCounter


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist(), torch.randperm(5).tolist()


def test_torch_python_and_numpy_go_on_as_if_nothing_had_been_drawn():
    state = RngState.capture()
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first


def test_a_state_can_be_restored_more_than_once():
    state = RngState.capture()
    first = draw()
    for _ in range(2):
        state.restore()
        assert draw() == first


def test_each_generator_alone():
    state = RngState.capture()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.rand(1), random.random(), np.random.rand()
    state.restore()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(np.random.get_state()) == str(before[2])


def test_capturing_draws_nothing_and_reads_nothing_back():
    before = torch.get_rng_state()
    with OperationCounter() as counted:
        RngState.capture()
    assert counted.reads == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kept_state_is_not_moved_by_later_draws():
    state = RngState.capture()
    kept = state.cpu.clone()
    torch.rand(1000)
    assert torch.equal(state.cpu, kept)


def test_two_states_are_equal_unless_something_was_drawn_between():
    for drawn in (lambda: torch.rand(1), random.random, np.random.rand, lambda: np.random.randn(1)):
        state = RngState.capture()
        with OperationCounter() as count:
            assert state == RngState.capture()
        assert (count.num_reads, count.num_ops) == (0, 0)
        drawn()
        assert state != RngState.capture()


@pytest.mark.parametrize(
    ("make", "draw_one"),
    [
        (torch.Generator, lambda generator: torch.rand((), generator=generator).item()),
        (random.Random, lambda generator: generator.random()),
        (np.random.default_rng, lambda generator: generator.random()),
        (lambda: np.random.Generator(np.random.MT19937()), lambda generator: generator.random()),
        (np.random.RandomState, lambda generator: generator.rand()),
    ],
)
def test_a_generator_of_ones_own_goes_on_as_if_nothing_had_been_drawn(make, draw_one):
    generator = make()
    assert is_generator(generator)
    state = OwnGenerator(generator)
    assert not state.is_changed
    first = [draw_one(generator) for _ in range(2)]
    assert state.is_changed
    for _ in range(2):
        state.restore()
        assert not state.is_changed
        assert [draw_one(generator) for _ in range(2)] == first


def test_what_has_no_state_is_no_generator():
    assert not any(map(is_generator, (random.SystemRandom(), random, iter([1]), None, torch.zeros(1))))
