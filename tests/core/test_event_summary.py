"""Events by what they have in common."""

from dataclasses import replace

import pytest

from hf_nanguard.core.event import Culprit, Event, Remedy
from hf_nanguard.core.event_summary import MAX_KINDS, EventSummary
from hf_nanguard.core.vocabulary import Action, Cause, Signal


def summary_of(*events):
    summary = EventSummary()
    for event in events:
        summary.add(event.as_dict())
    return summary


def overflow(step, rows=(1, 2), **fields):
    fields = {"module": "layers.3.mlp", **fields}
    remedies = (Remedy("bf16", True, True), Remedy("smaller_lr", True, False), Remedy("other", False))
    culprit = Culprit(rows=list(rows), **fields)
    return Event(step, Signal.GRAD_NONFINITE, Action.SKIPPED, "x", culprit=culprit, cause=Cause.FP16_OVERFLOW,
                 remedies=remedies)  # fmt: skip


def observed(step, signal=Signal.LOSS_SPIKE):
    return Event(step, signal, Action.OBSERVED, "x")


def test_what_bad_steps_have_in_common():
    other = Event(6, Signal.LABELS_MASKED, Action.DROPPED, "x", cause=Cause.ALL_LABELS_MASKED)
    summary = summary_of(overflow(1), overflow(5), overflow(7, rows=[3]), other, observed(7))
    assert summary.describe_common(5) == (
        "2 of these 3 bad steps: fp16_overflow in layers.3.mlp. The examined batch was finite with bf16."
    )
    assert summary.describe_common(0).startswith("3 of these 4 bad steps")
    assert summary.describe_common(8) == ""


def test_a_row_that_is_in_all_of_them_is_named():
    summary = summary_of(overflow(5, rows=[17]), overflow(6, rows=[17]))
    assert "Each has dataset row 17." in summary.describe_common(0)


def test_rows_of_a_batch_whose_samples_all_fail_are_not_named():
    event = replace(overflow(5, rows=[17]), values={"autopsy": {"scope": "every_sample"}})
    summary = summary_of(event, overflow(6, rows=[17]))
    assert "17" not in summary.describe_common(0)
    [line] = summary.format()
    assert line.endswith(" (all samples alike; the data is probably not the cause); works: bf16")


def test_several_events_of_a_step_are_one_bad_step():
    assert "2 of these 2 bad steps" in summary_of(overflow(5), overflow(5), overflow(6)).describe_common(0)


def test_without_a_cause_the_signal_is_named():
    event = Event(2, Signal.LOSS_NONFINITE, Action.SKIPPED, "x")
    assert summary_of(event).describe_common(0) == "1 of these 1 bad steps: loss_nonfinite."


def test_lines_of_a_run():
    lines = summary_of(observed(9), overflow(1), overflow(5, rows=range(20))).format()
    assert lines == [
        "2 x grad_nonfinite skipped at steps 1 and 5: fp16_overflow in layers.3.mlp (dataset rows 0, 1, 2, 3, 4, 5, 6, 7, ...); works: bf16",
        "1 x loss_spike observed at step 9",
    ]
    assert summary_of().format() == []
    [line] = summary_of(overflow(1), overflow(5), overflow(9)).format()
    assert "at steps 1 to 9:" in line


@pytest.mark.parametrize("num", [MAX_KINDS, MAX_KINDS + 3])
def test_only_a_few_lines(num):
    lines = summary_of(*(observed(1, signal) for signal in list(Signal)[:num])).format()
    assert len(lines) == min(num, MAX_KINDS + 1)


def test_the_line_of_code_says_more_than_the_parameter_whose_gradient_is_bad():
    event = overflow(5, module=None, parameter="norm.weight", source="train.py:32")
    assert ": fp16_overflow in train.py:32 (" in summary_of(event).format()[0]
    event = overflow(5, module=None, parameter="norm.weight")
    assert ": fp16_overflow in norm.weight (" in summary_of(event).format()[0]


def test_a_cause_that_repeats_the_signal_is_not_said_twice():
    culprit = Culprit(reward_function="score")
    event = Event(1, Signal.REWARD_NONFINITE, Action.DROPPED, "x", culprit=culprit, cause=Cause.REWARD_NONFINITE)
    assert summary_of(event).format() == ["1 x reward_nonfinite dropped at step 1 in score"]


def test_the_end_says_what_to_do_next():
    assert summary_of(observed(1)).format_end("my runs/a").endswith("\n  more: nanguard report 'my runs/a'")
    assert summary_of().format_end("runs") is None


@pytest.mark.parametrize("field", ["culprit", "values", "remedies", "cause", "step", "signal"])
@pytest.mark.parametrize("value", ["x", 1, [1], {"rows": "x", "source": [1]}, [{"name": []}], None])
def test_an_event_of_another_shape_is_counted_by_what_it_has(field, value):
    summary = EventSummary()
    summary.add({**overflow(5).as_dict(), field: value})
    assert field == "step" or summary.format()[0].startswith("1 x ")


def test_rows_that_a_rewind_leaves_out_are_not_named():
    event = replace(overflow(5, rows=[17]), action=Action.REWOUND)
    assert "17" not in summary_of(event).format()[0]
