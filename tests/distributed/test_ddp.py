"""Lockstep (L4) on gloo processes under DDP: 2 ranks by torchrun; slow: 4 ranks, 2 by accelerate."""

import pytest

from .judge import check_scenario
from .launch import Played, accelerate_launch, play_suite
from .scenario import SUITES, Scenario

# One worker for all of them, so that a suite is played once and never beside another.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.xdist_group("distributed")]


def pick(request: pytest.FixtureRequest, suite: str, test: str) -> list[str]:
    """Returns the scenarios whose tests were selected; all of the suite, if only its end is tested."""
    items = [item for item in request.session.items if item.module is request.module and item.originalname == test]
    chosen = {item.callspec.params["scenario"].name for item in items}
    return [s.name for s in SUITES[suite] if s.name in chosen or not chosen]


@pytest.fixture(scope="module")
def two(request, tmp_path_factory) -> Played:
    return play_suite("two", pick(request, "two", "test_two_ranks"), tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("scenario", SUITES["two"], ids=lambda s: s.name)
def test_two_ranks(two: Played, scenario: Scenario):
    check_scenario(scenario, two)


def test_two_ranks_exit_in_order(two: Played):
    two.check_exits()


@pytest.fixture(scope="module")
def variants(request, tmp_path_factory) -> Played:
    names = pick(request, "two_variants", "test_variants_on_two_ranks")
    return play_suite("two_variants", names, tmp_path_factory.mktemp("variants"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SUITES["two_variants"], ids=lambda s: s.name)
def test_variants_on_two_ranks(variants: Played, scenario: Scenario):
    check_scenario(scenario, variants)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Played:
    return play_suite("four", [s.name for s in SUITES["four"]], tmp_path_factory.mktemp("four"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SUITES["four"], ids=lambda s: s.name)
def test_four_ranks(four: Played, scenario: Scenario):
    check_scenario(scenario, four)


@pytest.mark.slow
def test_four_ranks_exit_in_order(four: Played):
    four.check_exits()


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory) -> Played:
    names = [s.name for s in SUITES["accelerate"]]
    return play_suite("accelerate", names, tmp_path_factory.mktemp("accelerate"), 2, accelerate_launch)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SUITES["accelerate"], ids=lambda s: s.name)
def test_accelerate_launch(accelerated: Played, scenario: Scenario):
    check_scenario(scenario, accelerated)


@pytest.mark.slow
def test_accelerate_launch_exits_in_order(accelerated: Played):
    accelerated.check_exits()
