"""A group holds its micro-batches by reference."""

import pickle

import pytest
import torch

from hf_nanguard.core.rerun.micro_batch import AccumulationGroup, BatchAction, Finding, MicroBatch
from hf_nanguard.core.rng import RngState
from hf_nanguard.core.vocabulary import Signal
from hf_nanguard.testing import INF, NAN, OperationCounter


def micro(index=0, **fields):
    return MicroBatch(index, {"x": torch.ones(2)}, RngState.capture(), **fields)


@pytest.mark.parametrize(
    ("actions", "dropped"),
    [((), False), (("drop",), True), (("halt",), True), (("repair",), False), (("observe",), False),
     (("suspect",), False), (("removed",), False), (("observe", "drop"), True)],
)  # fmt: skip
def test_only_drop_and_halt_mean_that_it_must_be_dropped(actions, dropped):
    findings = tuple(Finding(Signal.LABELS_MASKED, "masked", BatchAction(action)) for action in actions)
    assert micro(findings=findings).must_be_dropped == dropped


def test_a_finding_travels_from_a_worker_process():
    finding = Finding(Signal.LABELS_MASKED, "masked", BatchAction.SUSPECT, samples=(1,))
    received = pickle.loads(pickle.dumps(finding))
    assert received == finding
    assert received.action is BatchAction.SUSPECT


def test_losses_are_those_that_were_computed_in_order():
    first, last = torch.tensor(1.0), torch.tensor(2.0)
    group = AccumulationGroup(micro_batches=[micro(0, loss=first), micro(1), micro(2, loss=last)])
    assert len(group.losses) == 2
    assert group.losses[0] is first
    assert group.losses[1] is last


def test_the_payload_is_held_by_reference():
    payload = {"x": torch.ones(2)}
    assert MicroBatch(0, payload, RngState.capture()).payload is payload


@pytest.mark.parametrize(("planted", "largest"), [(-3.0, 3.0), (INF, INF), (NAN, NAN)])
def test_watching_keeps_the_largest_magnitude_on_the_device(planted, largest):
    group = AccumulationGroup()
    tensor = torch.tensor([[1.0, planted]], requires_grad=True)
    with OperationCounter() as counted:
        group.watch("encoder", tensor, 5.0)
    [(name, kept, bound)] = group.watched
    assert (name, bound) == ("encoder", 5.0)
    assert torch.equal(kept, torch.tensor(largest)) or (largest != largest and kept.isnan())
    assert counted.reads == []
    assert not kept.requires_grad


def test_groups_do_not_share_their_lists():
    AccumulationGroup().watch("x", torch.ones(1), None)
    assert AccumulationGroup().watched == []
    assert AccumulationGroup().micro_batches == []
