"""One process alone agrees with itself; several are in tests/distributed."""

import torch

from hf_nanguard.core.ranks import Ranks
from hf_nanguard.testing import OperationCounter


def test_one_process_is_rank_0_of_1():
    ranks = Ranks()
    assert (ranks.size, ranks.rank) == (1, 0)
    assert ranks.device == torch.device("cpu")


def test_alone_ignores_the_others():
    assert Ranks(alone=True).size == 1


def test_a_fact_comes_back_as_it_is_and_costs_nothing():
    fact = {"bad": {"w": "nan"}, "losses_finite": False, "none": None}
    with OperationCounter() as counted:
        assert Ranks().gather(fact) == [fact]
    assert counted.ops == []


def test_alone_any_is_what_is_said():
    assert Ranks(alone=True).any(True) is True
    assert Ranks(alone=True).any(False) is False
