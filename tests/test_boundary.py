"""The two directions of the boundary: the host calls the guard, the guard calls code that is not its own."""

from contextlib import contextmanager

import pytest

from hf_nanguard.boundary import Boundary, attempt
from hf_nanguard.errors import NonFiniteError


@contextmanager
def noted(steps, fails):
    """A context that fails where it is told to."""
    if fails == "entered":
        raise MemoryError
    steps.append("entered")
    try:
        yield
    finally:
        steps.append("left")
        if fails == "left":
            raise MemoryError


@pytest.mark.parametrize("fails", ["never", "made", "entered", "left"])
def test_a_context_that_fails_changes_nothing_of_its_block(fails):
    reports, steps = [], []
    boundary = Boundary(reports.append)

    def make():
        return noted(steps, fails) if fails != "made" else 1 / 0

    for _ in range(5):
        with boundary.inside("part", make):
            steps.append("block")
    assert steps.count("block") == 5
    assert len(reports) == (0 if fails == "never" else 3)
    assert steps.count("entered") == steps.count("left")


def test_a_context_is_left_although_its_part_was_turned_off_inside():
    boundary, steps = Boundary(lambda failure: None), []
    with boundary.inside("part", lambda: noted(steps, "never")):
        for _ in range(3):
            boundary.call("part", lambda: 1 / 0)
        assert "part" in boundary.off
    assert steps == ["entered", "left"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_the_block_passes(error):
    steps = []
    with pytest.raises(error), Boundary().inside("part", lambda: noted(steps, "left")):
        raise error
    assert steps == ["entered", "left"]


def test_what_the_guard_raises_on_purpose_passes():
    def make():
        raise NonFiniteError("halted")

    with pytest.raises(NonFiniteError), Boundary().inside("part", make):
        pytest.fail("the block must not run")


def test_foreign_code_may_raise_anything_but_an_interrupt():
    assert attempt(lambda: 7, lambda error: None) == 7
    assert attempt(lambda: 1 / 0, lambda error: type(error)) is ZeroDivisionError
    with pytest.raises(KeyboardInterrupt):
        attempt(lambda: (_ for _ in ()).throw(KeyboardInterrupt), lambda error: None)
