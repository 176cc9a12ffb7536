"""The public event schema, in strict JSON."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_nanguard.core.event import Culprit, Event, Remedy, strict
from hf_nanguard.core.vocabulary import Action, Cause, Signal
from hf_nanguard.testing import INF, NAN

KEYS = {
    "schema", "time", "step", "micro_step", "rank", "signal", "action", "message", "values", "culprit", "cause",
    "remedies", "bundle",
}  # fmt: skip
CULPRIT_KEYS = {
    "phase", "module", "op", "source", "parameter", "term", "samples", "rows", "tokens", "reward_function", "prompt",
    "completion",
}  # fmt: skip
SIGNALS = [
    "labels_masked",
    "label_out_of_range",
    "input_nonfinite",
    "input_out_of_range",
    "loss_nonfinite",
    "loss_zero",
    "loss_missing",
    "loss_error",
    "prediction_nonfinite",
    "eval_nonfinite",
    "grad_nonfinite",
    "grad_spike",
    "loss_spike",
    "loss_diverged",
    "activation_nonfinite",
    "activation_headroom",
    "entropy_collapse",
    "param_nonfinite",
    "optimizer_nonfinite",
    "reward_nonfinite",
    "advantage_nonfinite",
    "ratio_overflow",
    "logits_nonfinite",
    "checkpoint_nonfinite",
    "update_stalled",
    "no_learning_signal",
    "run_restarted",
    "rows_quarantined",
    "guard_failed",
]
ACTIONS = ["observed", "repaired", "dropped", "skipped", "clipped", "rewound", "halted", "refused"]
CAUSES = [
    "all_labels_masked",
    "label_out_of_range",
    "input_nonfinite",
    "fp16_overflow",
    "bf16_overflow",
    "fp32_overflow",
    "exp_overflow",
    "log_of_zero",
    "div_by_zero",
    "sqrt_at_zero",
    "norm_at_zero",
    "where_unselected_branch",
    "masked_row_softmax",
    "ctc_target_too_long",
    "norm_overflow",
    "param_nonfinite",
    "uninitialised_weight",
    "optimizer_state",
    "adam_eps_underflow",
    "lr_too_high",
    "reward_nonfinite",
    "ratio_overflow",
    "kl_overflow",
    "rounding_stall",
    "transient",
    "unknown",
]


def event(**fields):
    return Event(42, Signal.GRAD_NONFINITE, Action.SKIPPED, "it went bad", **fields)


def test_the_keys_are_those_of_the_public_schema():
    written = event(culprit=Culprit()).as_dict()
    assert written.keys() == KEYS
    assert written["culprit"].keys() == CULPRIT_KEYS
    assert written["schema"] == 1


def test_a_full_event_reads_back_as_it_was_written():
    culprit = Culprit("backward", "mlp", "aten.exp.default", "m.py:1", "w", "ce", [2], [1017], [[2, 5]], "r", "p", "c")
    written = event(
        micro_step=1, rank=3, values={"loss": 2.31, "grad_norm": INF, "terms": {"ce": 2.3}}, culprit=culprit,
        cause=Cause.FP16_OVERFLOW, remedies=(Remedy("bf16", True, True),), bundle="autopsy/step-42",
        time="2026-11-15T23:00:00Z",
    ).as_dict()  # fmt: skip
    assert json.loads(json.dumps(written, allow_nan=False)) == {
        "schema": 1, "time": "2026-11-15T23:00:00Z", "step": 42, "micro_step": 1, "rank": 3, "signal": "grad_nonfinite",
        "action": "skipped", "message": "it went bad",
        "values": {"loss": 2.31, "grad_norm": "inf", "terms": {"ce": 2.3}},
        "culprit": {"phase": "backward", "module": "mlp", "op": "aten.exp.default", "source": "m.py:1", "parameter": "w",
                    "term": "ce", "samples": [2], "rows": [1017], "tokens": [[2, 5]], "reward_function": "r",
                    "prompt": "p", "completion": "c"},
        "cause": "fp16_overflow", "remedies": [{"name": "bf16", "tried": True, "works": True, "note": None}],
        "bundle": "autopsy/step-42",
    }  # fmt: skip


def test_what_is_not_known_is_null():
    written = event().as_dict()
    assert [written[key] for key in ("micro_step", "culprit", "cause", "bundle")] == [None] * 4
    assert (written["values"], written["remedies"]) == ({}, [])


def test_the_time_is_utc_to_the_second():
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", event().as_dict()["time"])


def test_the_vocabulary_is_the_documented_one():
    assert sorted(Signal) == sorted(SIGNALS)
    assert sorted(Action) == sorted(ACTIONS)
    assert sorted(Cause) == sorted(CAUSES)


@pytest.mark.parametrize(("value", "text"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
def test_nonfinite_numbers_are_strings_however_deep(value, text):
    nested = {"a": value, "b": [value, {"c": (1, value)}], "d": {"e": {"f": [[value]]}}}
    assert strict(nested) == {"a": text, "b": [text, {"c": [1, text]}], "d": {"e": {"f": [[text]]}}}
    assert strict(value) == text


@pytest.mark.parametrize(
    ("value", "written"),
    [(np.float32(NAN), "nan"), (np.float64(INF), "inf"), (np.float32(0.5), 0.5), (np.int64(3), 3),
     (torch.tensor(-INF), "-inf"), (torch.tensor(2), 2), (np.bool_(True), True)],
    ids=repr,
)  # fmt: skip
def test_scalars_of_numpy_and_torch_become_plain_numbers(value, written):
    assert json.loads(json.dumps(strict({"x": value}), allow_nan=False)) == {"x": written}


def test_healthy_values_are_untouched():
    value = {"a": 1.5, "b": [True, None, "nan", 3], "c": ""}
    assert strict(value) == value


def test_keys_become_strings():
    assert strict({1: 2, None: 3, NAN: 4}) == {"1": 2, "None": 3, "nan": 4}


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_like)
def test_anything_json_like_passes_a_strict_writer(value):
    text = json.dumps(strict(value), allow_nan=False)
    assert strict(value) == json.loads(text)
