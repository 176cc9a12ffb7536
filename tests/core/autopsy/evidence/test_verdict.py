"""What was found, as it is logged."""

import json

import pytest

from hf_nanguard.core.autopsy.evidence.verdict import Blame, Verdict, format_verdict
from hf_nanguard.core.autopsy.trace.origin import Origin
from hf_nanguard.core.event import Culprit, Remedy
from hf_nanguard.core.vocabulary import Cause

ORIGIN = Origin(
    "forward", "inf", Cause.FP16_OVERFLOW, op="aten.mm.default", module="model.layers.3.mlp.up_proj",
    source="modeling_llama.py:164", text="down_proj = ...", dtype="float16", largest=301.5, limit=65504.0,
)  # fmt: skip
REMEDIES = (
    Remedy("float32", True, True),
    Remedy("upcast_module", True, False),
    Remedy("bfloat16", False, None, "no time left"),
)


def _verdict(**fields):
    blame = Blame("samples", [2], [[2, 5], [2, 6]], [1017], {2: "the text"})
    return Verdict(ORIGIN, blame, True, REMEDIES, 4, 9, 1.5, "autopsy/step-42", **fields)


def test_the_block_says_what_where_whose_why_and_what_works():
    block = format_verdict(_verdict(), 42, 1)
    lines = {line.split(":")[0].strip(): line for line in block.splitlines()[1:]}
    assert "step 42" in block.splitlines()[0]
    assert "aten.mm.default turned finite inputs into inf" in lines["what"]
    assert "float16" in lines["what"]
    assert "301.5" in lines["what"]
    assert "6.55e+04" in lines["what"]
    assert "model.layers.3.mlp.up_proj, modeling_llama.py:164" in lines["where"]
    assert "sample 2 of 4, dataset row 1017, tokens (2, 5), (2, 6)" in lines["whose"]
    assert "the text" in lines["text"]
    assert "fp16_overflow" in lines["why"]
    assert "every replay was non-finite" in lines["why"]
    assert "float32" in lines["works"]
    assert "upcast_module" in lines["fails"]
    assert "bfloat16" in lines["untried"]
    assert "autopsy/step-42" in lines["bundle"]
    assert len(block.splitlines()) <= 15


@pytest.mark.parametrize(
    ("blame", "words"),
    [
        (Blame("every_sample", [0, 1, 2, 3], None, [3, 4, 5, 6]), "all 4 samples; the data is probably not the cause"),
        (Blame("batch", None, None, None), "only the batch as a whole"),
        (Blame("untried", [1], [[1, 0]], [9]), "not tested; seen in sample 1 of 4, dataset row 9"),
        (Blame("untried"), "not tested"),
        (
            Blame("only_sample", [0], None, [9]),
            "the only sample, dataset row 9; whether others are finite with these weights is not known",
        ),
        (Blame("samples", list(range(9)), None, list(range(9))), "samples 0, 1, 2, 3, 4, 5, ..."),
    ],
)
def test_the_samples_are_named_with_what_was_tested(blame, words):
    assert words in format_verdict(Verdict(ORIGIN, blame, num_samples=4), 1, 0)


@pytest.mark.parametrize(
    ("blame", "samples"),
    [
        (Blame("every_sample", [0, 1], None, [5, 6]), None),
        (Blame("only_sample", [0], None, [5]), None),
        (Blame("samples", [1], None, [6]), [1]),
        (Blame("untried", [1], None, [6]), [1]),
    ],
)
def test_a_culprit_has_samples_only_if_they_stand_out(blame, samples):
    culprit = Verdict(ORIGIN, blame).explain(Culprit(rows=[5, 6]))
    assert (culprit.samples, culprit.rows) == (samples, blame.rows)


@pytest.mark.parametrize(("num_samples", "others"), [(4, "the other samples"), (1, "other micro-batches")])
def test_rows_that_overflow_are_blamed_with_a_reservation(num_samples, others):
    """A model that diverges overflows on some rows first, also if each micro-batch has one row."""
    assert f"; {others} are finite" in format_verdict(
        Verdict(ORIGIN, Blame("samples", [0]), num_samples=num_samples), 1, 0
    )


def test_a_fault_that_does_not_come_back_is_transient():
    gone = Verdict(None)
    assert gone.cause is Cause.TRANSIENT
    assert "transient" in format_verdict(gone, 1, 0)
    once = Verdict(ORIGIN, reproducible=False)
    assert once.cause is Cause.TRANSIENT
    assert "not every replay was non-finite" in format_verdict(once, 1, 0)
    assert Verdict(ORIGIN).cause is Cause.FP16_OVERFLOW


def test_a_leaf_and_a_backward_node_are_named_as_such():
    leaf = Origin("input", "nan", Cause.INPUT_NONFINITE, op="aten.add.Tensor", leaf="pixel_values", num_bad=3, dtype="float32")  # fmt: skip
    assert "input pixel_values contains NaN in 3 entries" in format_verdict(Verdict(leaf), 1, 0)
    back = Origin("backward", "inf", Cause.SQRT_AT_ZERO, op="aten.div.Tensor", node="SqrtBackward0", source="loss.py:3")
    block = format_verdict(Verdict(back), 1, 0)
    assert "aten.div.Tensor in SqrtBackward0 turned finite inputs into inf" in block
    assert "backward of the loss, outside the model, loss.py:3" in block


def test_it_is_strict_json_and_explains_a_culprit():
    verdict = _verdict()
    text = json.dumps(verdict.as_dict(), allow_nan=False)
    assert json.loads(text)["cause"] == "fp16_overflow"
    json.dumps(verdict.as_values(), allow_nan=False)
    culprit = verdict.explain(Culprit(phase="loss", rows=[1, 2, 3, 1017], parameter="lm_head.weight"))
    assert culprit == Culprit(
        "forward", "model.layers.3.mlp.up_proj", "aten.mm.default", "modeling_llama.py:164", "lm_head.weight", None,
        [2], [1017], [[2, 5], [2, 6]],
    )  # fmt: skip
    assert Verdict(None).explain(culprit) is culprit
