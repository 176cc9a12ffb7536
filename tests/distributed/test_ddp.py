"""Lockstep (L4) on gloo processes under DDP: 2 and 4 ranks by torchrun, 2 by accelerate."""

import pytest

from .judge import check_scenario
from .launch import Played, play_suite
from .scenario import SUITES, Scenario

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Played:
    return play_suite("two", [s.name for s in SUITES["two"]], tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("scenario", SUITES["two"], ids=lambda s: s.name)
def test_two_ranks(two: Played, scenario: Scenario):
    check_scenario(scenario, two)


def test_two_ranks_exit_in_order(two: Played):
    assert two.codes == [0]
