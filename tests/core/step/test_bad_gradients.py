"""Which gradients are bad, and what is said about them."""

import pytest
import torch

from hf_nanguard.core.event import strict
from hf_nanguard.core.step.bad_gradients import (
    SHOWN,
    Census,
    describe,
    format_bad_gradients,
    judge,
    take_census,
)
from hf_nanguard.testing import INF, NAN

NAMES = [f"layer.{index}.weight" for index in range(6)]


def gradients(**bad):
    return [(name, torch.tensor([1.0, bad.get(f"at{index}", 2.0)])) for index, name in enumerate(NAMES)]


@pytest.mark.parametrize(("value", "kind", "word"), [(NAN, "nan", "NaN"), (INF, "inf", "inf"), (-INF, "inf", "inf")])
@pytest.mark.parametrize(("place", "neighbours"), [(0, [1]), (2, [1, 3]), (5, [4])])
def test_a_single_bad_parameter(value, kind, word, place, neighbours):
    census = take_census(gradients(**{f"at{place}": value}))
    assert census.bad == {NAMES[place]: kind}
    assert census.suspect == NAMES[place]
    assert census.neighbours == [NAMES[index] for index in neighbours]
    assert census.good == [name for name in NAMES if name != NAMES[place]]
    assert describe(census) == f"gradient of {NAMES[place]} became {word} (1 of 6)"


def test_several_bad_parameters_the_one_nearest_the_loss_is_the_suspect():
    census = take_census(gradients(at1=INF, at3=NAN))
    assert census.bad == {NAMES[1]: "inf", NAMES[3]: "nan"}
    assert census.suspect == NAMES[3]
    assert census.neighbours == [NAMES[0], NAMES[2], NAMES[4]]
    assert describe(census) == f"gradient of {NAMES[3]} became NaN (2 of 6 gradients are bad)"


def test_all_bad_blames_no_parameter():
    census = take_census(gradients(**{f"at{index}": NAN for index in range(6)}))
    assert census.suspect is None
    assert (census.good, census.neighbours) == ([], [])
    assert describe(census) == "all 6 gradients are bad"


def test_none_bad():
    census = take_census(gradients())
    assert census == Census({}, NAMES, [])
    assert census.suspect is None
    assert describe(census) == "all 6 gradients are finite"


def test_gradients_that_an_engine_keeps_elsewhere_are_not_called_finite():
    census = take_census([])
    assert describe(census).startswith("the gradient norm is not finite, and no parameter holds a gradient")
    assert "every gradient is finite" not in format_bad_gradients(3, NAN, census, 0, 0)


def test_a_model_of_one_parameter_can_be_blamed():
    assert take_census([("only", torch.tensor([NAN]))]).suspect == "only"


def test_judge_keeps_model_order_whatever_the_order_of_the_news():
    assert list(judge(NAMES, {NAMES[4]: "nan", NAMES[0]: "inf"}).bad) == [NAMES[0], NAMES[4]]


def test_values_are_cut_to_a_readable_length_near_the_loss():
    names = [str(index) for index in range(40)]
    values = judge(names, dict.fromkeys(names[:30], "nan")).as_values()
    assert values["num_bad_parameters"] == 30
    assert values["num_good_parameters"] == 10
    assert list(values["bad_parameters"]) == names[30 - SHOWN : 30]
    assert values["good_neighbours"] == ["30"]
    assert strict(values) == values


def test_the_incident_names_every_bad_parameter_with_its_kind():
    text = format_bad_gradients(7, NAN, take_census(gradients(at1=INF, at3=NAN)), 5, 9)
    lines = text.splitlines()
    assert "step 7" in lines[0]
    assert "nan" in lines[1]
    assert "NaN in 1 parameters (5 so far), inf in 1 (9 so far)" in lines[2]
    assert [line.strip() for line in lines if "bad:" in line] == [
        f"bad:  {NAMES[1]} (inf)", f"bad:  {NAMES[3]} (NaN)",
    ]  # fmt: skip
    assert [line.split()[1] for line in lines if "good:" in line] == [NAMES[0], NAMES[2], NAMES[4]]


def test_the_incident_of_an_overflowing_norm_blames_nobody():
    text = format_bad_gradients(7, INF, take_census(gradients()), 0, 0)
    assert "no parameter is to blame" in text
    assert "bad:" not in text


def test_the_incident_says_how_many_it_leaves_out():
    names = [str(index) for index in range(40)]
    text = format_bad_gradients(1, NAN, judge(names, dict.fromkeys(names[:30], "nan")), 30, 0)
    assert f"... {30 - SHOWN} more bad parameters" in text
    assert text.count("bad:") == SHOWN
