"""Checks of a batch where it is made."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from hf_nanguard.core.vocabulary import Cause, Signal
from hf_nanguard.hf.data.batch_limits import UNKNOWN, Limits
from hf_nanguard.hf.data.checked_collator import (
    BatchCheck,
    BatchNote,
    CheckedCollator,
    NotedBatch,
    check_batch,
    name_rows,
)
from hf_nanguard.plain_text import quote_error
from hf_nanguard.testing import INF, NAN, OperationCounter

LM = Limits(num_labels=20, token_labels=True, shifted=True, num_ids=20, num_types=20)
SEQ2SEQ = Limits(num_labels=20, token_labels=True, shifted=False, num_ids=20)
CLASSES = Limits(num_labels=3, num_ids=20)
ANY_LABELS = Limits()
DROP = BatchCheck(LM, "drop")


def lm_batch(**changed):
    ids = torch.arange(12).reshape(3, 4)
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones(3, 4, dtype=torch.long)}
    return batch | changed


def put(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def signals(findings):
    return [finding.signal for finding in findings]


def stack(examples):
    """The user's collator."""
    return {key: torch.tensor([example[key] for example in examples]) for key in examples[0]}


def as_list(examples):
    return [torch.tensor(example["labels"]) for example in examples]


# ---- labels ----


@pytest.mark.parametrize("limits", [LM, SEQ2SEQ, CLASSES, ANY_LABELS])
def test_a_healthy_batch_is_let_through_as_it_is(limits):
    batch = lm_batch(labels=torch.tensor([0, 2, -100])) if limits is CLASSES else lm_batch()
    before = dict(batch)
    assert check_batch(batch, limits, "drop") == []
    assert all(batch[key] is before[key] for key in before)


@pytest.mark.parametrize(
    ("limits", "first_label", "masked"),
    [
        (LM, -100, True),
        (LM, 5, True),
        (SEQ2SEQ, -100, True),
        (SEQ2SEQ, 5, False),
        (CLASSES, -100, False),
        (ANY_LABELS, -100, False),
    ],
)
def test_labels_that_are_all_masked(limits, first_label, masked):
    labels = torch.full((3, 4), -100)
    labels[1, 0] = first_label if limits is not CLASSES else -100
    findings = check_batch(lm_batch(labels=labels), limits, "drop")
    assert signals(findings) == ([Signal.LABELS_MASKED] if masked else [])
    if masked:
        assert findings[0].cause is Cause.ALL_LABELS_MASKED
        assert findings[0].samples == (0, 1, 2)


@pytest.mark.parametrize(
    ("verdict", "becomes"), [("drop", "drop"), ("repair", "drop"), ("halt", "halt"), ("observe", "observe")]
)
def test_a_masked_batch_cannot_be_repaired(verdict, becomes):
    [finding] = check_batch(lm_batch(labels=torch.full((3, 4), -100)), LM, verdict)
    assert finding.action == becomes


def test_one_live_label_is_enough():
    assert check_batch(lm_batch(labels=put(torch.full((3, 4), -100), (2, 3), 1)), LM, "drop") == []


@pytest.mark.parametrize("label", [20, 999, -1, -99, -101, 2**40, -(2**40)])
@pytest.mark.parametrize("limits", [LM, SEQ2SEQ])
def test_a_label_outside_the_vocabulary_is_named_and_masked(label, limits):
    batch = lm_batch()
    given = batch["labels"] = put(batch["labels"], (1, 2), label)
    [finding] = check_batch(batch, limits, "drop")
    assert (finding.signal, finding.cause) == (Signal.LABEL_OUT_OF_RANGE, Cause.LABEL_OUT_OF_RANGE)
    assert (finding.samples, finding.tokens) == ((1,), ((1, 2),))
    assert f"label {label} of sample 1 is outside 0..19" in finding.message
    assert torch.equal(batch["labels"], put(given, (1, 2), -100))
    assert given[1, 2] == label, "the user's own tensor is not written"


@pytest.mark.parametrize("label", [3, -1, 255])
def test_a_class_outside_the_classes(label):
    batch = lm_batch(labels=torch.tensor([0, label, 2]))
    [finding] = check_batch(batch, CLASSES, "drop")
    assert (finding.signal, finding.samples) == (Signal.LABEL_OUT_OF_RANGE, (1,))
    assert batch["labels"].min() >= 0
    assert batch["labels"].max() < 3


def test_labels_of_an_unknown_model_are_not_judged():
    labels = torch.full((2, 8, 8), 255)
    assert check_batch({"labels": labels, "pixel_values": torch.rand(2, 3, 8, 8)}, ANY_LABELS, "drop") == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_small_integers_are_judged_too(dtype):
    labels = torch.tensor([[1, 2, 100]], dtype=dtype)
    assert signals(check_batch({"labels": labels}, LM, "drop")) == [Signal.LABEL_OUT_OF_RANGE]


def test_flags_as_labels_are_healthy():
    assert check_batch({"labels": torch.tensor([True, False])}, CLASSES, "drop") == []


@pytest.mark.parametrize("limits", [CLASSES, ANY_LABELS])
def test_a_regression_target_that_is_nan(limits):
    batch = {"labels": torch.tensor([0.5, NAN, 1e9])}
    [finding] = check_batch(batch, limits, "repair")
    assert (finding.signal, finding.samples) == (Signal.INPUT_NONFINITE, (1,))
    assert torch.equal(batch["labels"], torch.tensor([0.5, 0.0, 1e9]))


# ---- ids ----


@pytest.mark.parametrize("name", ["input_ids", "decoder_input_ids", "token_type_ids"])
@pytest.mark.parametrize("token", [20, -1, -100])
def test_an_id_outside_the_embedding_is_named_and_replaced(name, token):
    batch = lm_batch(**{name: put(torch.ones(3, 4, dtype=torch.long), (2, 0), token)})
    [finding] = check_batch(batch, LM, "drop")
    assert (finding.signal, finding.samples, finding.tokens) == (Signal.INPUT_OUT_OF_RANGE, (2,), ((2, 0),))
    assert f"{name} holds {token} in sample 2" in finding.message
    assert "20 rows" in finding.message
    assert batch[name].min() >= 0
    assert batch[name].max() < 20


def test_placeholders_are_the_model_s_business():
    limits = Limits(num_ids=20, placeholders=(32000, -200))
    ids = torch.tensor([[1, 32000, -200]])
    assert check_batch({"input_ids": ids}, limits, "drop") == []
    [finding] = check_batch({"input_ids": put(ids, (0, 0), 21)}, limits, "drop")
    assert finding.tokens == ((0, 0),)


@pytest.mark.parametrize(("verdict", "length"), [("drop", 3), ("repair", 3), ("observe", 4)])
def test_sequences_longer_than_the_model_has_positions_are_cut(verdict, length):
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    batch = lm_batch(attention_mask=mask)
    [finding] = check_batch(batch, replace(LM, num_positions=3), verdict)
    assert (finding.signal, finding.samples, finding.action) == (Signal.INPUT_OUT_OF_RANGE, (1,), verdict)
    assert "up to 4 tokens, and the model has 3 positions" in finding.message
    assert {name: value.shape[1] for name, value in batch.items()} == dict.fromkeys(batch, length)
    assert (
        check_batch(lm_batch(position_ids=torch.zeros(3, 4, dtype=torch.long)), replace(LM, num_positions=3), "drop")
        == []
    )


def test_ids_of_an_unknown_model_are_not_judged():
    assert check_batch({"input_ids": torch.tensor([[10**6, -5]])}, ANY_LABELS, "drop") == []


# ---- floats ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("value", "kind"), [(NAN, "NaN"), (INF, "inf"), (-INF, "inf")])
def test_a_bad_pixel_is_named_and_filled(dtype, value, kind):
    pixels = put(torch.rand(3, 2, 4, 4).to(dtype), (1, 0, 2, 3), value)
    batch = {"pixel_values": pixels}
    [finding] = check_batch(batch, ANY_LABELS, "repair")
    assert (finding.signal, finding.cause, finding.samples) == (Signal.INPUT_NONFINITE, Cause.INPUT_NONFINITE, (1,))
    assert f"pixel_values holds {kind} in 1 entries of samples [1]" in finding.message
    assert torch.equal(batch["pixel_values"], put(pixels, (1, 0, 2, 3), 0))
    assert batch["pixel_values"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_largest_values_are_healthy(dtype):
    edge = torch.finfo(dtype)
    assert check_batch({"x": torch.tensor([edge.max, edge.min, edge.tiny], dtype=dtype)}, ANY_LABELS, "drop") == []


def test_an_additive_mask_may_hold_minus_inf_only():
    mask = put(torch.zeros(2, 1, 3, 3), (0, 0, 1), -INF)
    assert check_batch({"attention_mask": mask}, LM, "drop") == []
    for bad in (NAN, INF):
        batch = {"attention_mask": put(mask, (1, 0, 0, 0), bad)}
        [finding] = check_batch(batch, LM, "repair")
        assert finding.samples == (1,)
        assert batch["attention_mask"][1, 0, 0, 0] == 0
        assert batch["attention_mask"][0, 0, 1, 0] == -INF, "the mask itself stays"


def test_several_things_wrong_are_all_found():
    batch = lm_batch(x=torch.tensor([[NAN]]))
    batch["labels"] = put(batch["labels"], (0, 1), 77)
    batch["input_ids"] = put(batch["input_ids"], (0, 0), 88)
    assert set(signals(check_batch(batch, LM, "drop"))) == {
        Signal.INPUT_NONFINITE, Signal.LABEL_OUT_OF_RANGE, Signal.INPUT_OUT_OF_RANGE,
    }  # fmt: skip


# ---- what is done ----


@pytest.mark.parametrize("verdict", ["drop", "repair", "halt", "observe"])
def test_a_bad_batch_is_made_safe_unless_it_is_only_observed(verdict):
    given = {
        "labels": put(torch.ones(2, 3, dtype=torch.long), (0, 1), 99),
        "input_ids": put(torch.ones(2, 3, dtype=torch.long), (1, 1), 99),
        "x": torch.tensor([1.0, NAN]),
    }
    batch = dict(given)
    findings = check_batch(batch, LM, verdict)
    floats = "suspect" if verdict == "drop" else verdict
    assert sorted(finding.action for finding in findings) == sorted([verdict, verdict, floats])
    if verdict == "observe":
        assert all(batch[key] is given[key] for key in given)
    elif verdict == "drop":
        assert signals(check_batch(batch, LM, verdict)) == [Signal.INPUT_NONFINITE], "no kernel asserts on NaN"
        assert batch["x"] is given["x"]
    else:
        assert check_batch(batch, LM, verdict) == [], "what is returned is safe"


# ---- masks and lengths ----


@pytest.mark.parametrize(
    ("verdict", "becomes"), [("drop", "suspect"), ("repair", "observe"), ("halt", "halt"), ("observe", "observe")]
)
def test_a_sample_with_nothing_to_attend_to(verdict, becomes):
    batch = lm_batch(attention_mask=put(torch.ones(3, 4, dtype=torch.long), 1, 0))
    [finding] = check_batch(batch, LM, verdict)
    assert (finding.signal, finding.samples, finding.action) == (Signal.INPUT_OUT_OF_RANGE, (1,), becomes)
    assert "attention_mask of samples [1] masks every token" in finding.message


@pytest.mark.parametrize(
    ("verdict", "becomes", "length"),
    [("drop", "drop", 1), ("repair", "drop", 1), ("halt", "halt", 1), ("observe", "observe", 0)],
)
def test_sequences_without_a_token(verdict, becomes, length):
    empty = torch.ones(3, 0, dtype=torch.long)
    batch = {"input_ids": empty, "labels": empty, "attention_mask": empty}
    finding = check_batch(batch, LM, verdict)[0]
    assert (finding.signal, finding.samples, finding.action) == (Signal.INPUT_OUT_OF_RANGE, (0, 1, 2), becomes)
    assert all(value.shape == (3, length) for value in batch.values())


# ---- samples taken out ----


def bad_samples(**changed):
    """Sample 1 has a label out of range, sample 2 a pixel that is NaN."""
    batch = lm_batch(pixel_values=put(torch.rand(3, 2), (2, 0), NAN), **changed)
    batch["labels"] = put(batch["labels"], (1, 2), 99)
    return batch


def collate_as(batch, verdict="drop_samples"):
    """Returns the batch and its note."""
    return CheckedCollator(lambda examples: dict(batch), BatchCheck(LM, verdict))([{}] * 3)


def test_only_the_bad_samples_are_taken_out():
    given = bad_samples()
    batch, note = collate_as(given)
    assert (note.num_samples, note.kept) == (3, (0,))
    assert all(torch.equal(batch[name], given[name][:1]) for name in given)
    assert sorted((finding.signal, finding.samples, finding.action) for finding in note.findings) == [
        (Signal.INPUT_NONFINITE, (2,), "removed"), (Signal.LABEL_OUT_OF_RANGE, (1,), "removed"),
    ]  # fmt: skip


def test_a_fully_masked_sample_is_taken_out_too():
    _, note = collate_as(lm_batch(attention_mask=put(torch.ones(3, 4, dtype=torch.long), 1, 0)))
    assert note.kept == (0, 2)


def test_what_is_left_may_have_no_label():
    labels = torch.full((3, 4), -100)
    labels[1] = torch.tensor([1, 2, 99, 3])
    _, note = collate_as(lm_batch(labels=labels))
    assert [(finding.signal, finding.action) for finding in note.findings] == [
        (Signal.LABEL_OUT_OF_RANGE, "removed"), (Signal.LABELS_MASKED, "drop"),
    ]  # fmt: skip


def test_a_batch_that_cannot_be_taken_apart_goes_whole():
    batch, note = collate_as(bad_samples(patches=torch.ones(7, 2)))
    assert note.kept is None
    assert {finding.action for finding in note.findings} == {"drop"}
    assert len(batch["labels"]) == 3


def test_rows_follow_the_samples():
    _, note = collate_as(bad_samples())
    note, rows = name_rows(note, [40, 41, 42])
    assert rows == [40]
    assert {finding.signal: finding.rows for finding in note.findings} == {
        Signal.LABEL_OUT_OF_RANGE: (41,), Signal.INPUT_NONFINITE: (42,),
    }  # fmt: skip
    assert name_rows(BatchNote(), [7]) == (BatchNote(), [7])
    assert name_rows(collate_as(bad_samples()).note, None)[1] is None


# ---- odd shapes and types ----


@pytest.mark.parametrize("name", ["labels", "input_ids", "x"])
def test_empty_tensors_are_healthy(name):
    assert check_batch({name: torch.empty(0, 4, dtype=torch.long)}, LM, "drop") == []
    assert check_batch({name: torch.empty(0)}, LM, "drop") == []


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("x", torch.tensor(1.0), torch.tensor(NAN)), ("labels", torch.tensor(1), torch.tensor(99)),
     ("input_ids", torch.tensor(1), torch.tensor(99))],
)  # fmt: skip
def test_scalars(name, good, bad):
    assert check_batch({name: good}, LM, "drop") == []
    batch = {name: bad}
    assert len(check_batch(batch, LM, "repair")) == 1
    assert check_batch(batch, LM, "repair") == []


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.ones(4).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.complex64),
     torch.ones(3, requires_grad=True), torch.ones(4, 3).t(), torch.ones(1).expand(5, 4), torch.ones(8)[::2],
     torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)],
    ids=["sparse", "float8", "complex", "with a graph", "transposed", "expanded", "strided", "nested"],
)  # fmt: skip
def test_unusual_tensors_do_no_harm(tensor):
    batch = {"x": tensor}
    assert check_batch(batch, LM, "drop") == []
    assert batch["x"] is tensor


def test_bad_entries_of_expanded_and_strided_tensors_are_found():
    for tensor in (torch.tensor([NAN]).expand(2, 3), put(torch.ones(3, 4), (1, 2), NAN).t()):
        batch = {"x": tensor}
        assert signals(check_batch(batch, ANY_LABELS, "repair")) == [Signal.INPUT_NONFINITE]
        assert batch["x"].isfinite().all()


def test_what_is_no_tensor_is_left_alone():
    batch = {"texts": ["a"], "number": NAN, "none": None, "nested": {"x": torch.tensor([NAN])}}
    assert check_batch(batch, LM, "drop") == []


def test_no_torch_operator_runs_on_a_healthy_batch():
    batch = lm_batch(pixel_values=torch.rand(3, 2), token_type_ids=torch.zeros(3, 4, dtype=torch.long))
    with OperationCounter() as counted:
        assert check_batch(batch, LM, "drop") == []
    assert counted.ops == []


# ---- the collator ----

BAD = [{"labels": [1, 2]}, {"labels": [1, 99]}]
GOOD = [{"labels": [1, 2]}, {"labels": [3, 4]}]


def test_findings_travel_with_the_batch():
    collator = CheckedCollator(stack, DROP)
    assert isinstance(collator(GOOD), dict)
    batch, note = collator(BAD)
    assert signals(note.findings) == [Signal.LABEL_OUT_OF_RANGE]
    assert batch["labels"].tolist() == [[1, 2], [1, -100]]


def test_a_batch_encoding_is_checked_too():
    batch, note = CheckedCollator(lambda examples: BatchEncoding(stack(examples)), DROP)(BAD)
    assert isinstance(batch, BatchEncoding)
    assert signals(note.findings) == [Signal.LABEL_OUT_OF_RANGE]
    assert batch["labels"].tolist() == [[1, 2], [1, -100]]
    assert set(batch.keys()) == {"labels"}


def test_a_batch_that_the_collator_keeps_is_not_changed():
    kept = stack(BAD)
    batch, _ = CheckedCollator(lambda examples: kept, DROP)(BAD)
    assert batch is not kept
    assert kept["labels"].tolist() == [[1, 2], [1, 99]]


def test_a_list_is_passed_through():
    batch = CheckedCollator(as_list, DROP)(BAD)
    assert [tensor.tolist() for tensor in batch] == [[1, 2], [1, 99]]


def test_a_batch_that_cannot_be_checked_is_passed_on():
    class Odd(dict):
        def items(self):
            raise ZeroDivisionError("odd")

    given = Odd(stack(BAD))
    batch, note = DROP(given)
    assert batch is given
    assert note == BatchNote(failure=note.failure)
    assert "hf/data/checked_collator.py" in note.failure
    assert quote_error(ZeroDivisionError("odd")) in note.failure


@pytest.mark.parametrize("verdict", ["drop", "drop_samples", "repair", "halt", "observe"])
def test_nothing_is_judged_where_model_or_loss_are_the_users(verdict):
    batch = lm_batch(labels=torch.full((3, 4), -100), input_ids=torch.full((3, 4), 999), x=torch.full((3,), NAN))
    checked, note = BatchCheck(UNKNOWN, verdict)(batch, [{}] * 3)
    assert all(checked[name] is batch[name] for name in batch)
    assert [(finding.signal, finding.action) for finding in note.findings] == [(Signal.INPUT_NONFINITE, "suspect")]


def test_collator_and_notes_can_be_sent_to_another_process():
    collator = pickle.loads(pickle.dumps(CheckedCollator(stack, DROP)))
    note = collator(BAD).note
    assert pickle.loads(pickle.dumps(note)) == note


def test_spawned_workers_send_their_findings():
    loader = DataLoader(
        [*GOOD, *BAD], batch_size=2, num_workers=1, collate_fn=CheckedCollator(stack, DROP),
        multiprocessing_context="spawn",
    )  # fmt: skip
    good, bad = list(loader)
    assert isinstance(good, dict)
    assert isinstance(bad, NotedBatch)
    assert signals(bad.note.findings) == [Signal.LABEL_OUT_OF_RANGE]
