"""A held micro-batch that is run again, whole or in part."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_nanguard.core.autopsy.evidence.suspect_batch import SuspectBatch, count_entries, take_entries
from hf_nanguard.core.rerun.micro_batch import MicroBatch
from hf_nanguard.core.rerun.runner import LoopRunner
from hf_nanguard.core.rng import RngState


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    note: str = "kept"


def _specimen(loss_fn, inputs, model, rows=None):
    runner = LoopRunner(model, torch.optim.SGD(model.parameters(), lr=0.1))
    runner.loss_fn = loss_fn
    return SuspectBatch(runner, MicroBatch(0, inputs, RngState.capture(), row_numbers=rows), 1.0)


def test_what_has_one_entry_per_sample_is_cut_and_the_rest_is_kept():
    inputs = {
        "x": torch.arange(6).view(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0), "table": torch.zeros(5, 2),
        "pair": Pair(torch.arange(3), torch.arange(3)), "many": (torch.arange(3), torch.arange(4)),
    }  # fmt: skip
    cut = take_entries(inputs, {3: [0, 2]})
    assert cut["x"].tolist() == [[0, 1], [4, 5]]
    assert cut["names"] == ["a", "c"]
    assert cut["pair"].x.tolist() == [0, 2]
    assert cut["pair"].note == "kept"
    assert [t.tolist() for t in cut["many"]] == [[0, 2], [0, 1, 2, 3]]
    assert cut["scale"] is inputs["scale"]
    assert cut["table"] is inputs["table"]
    assert inputs["x"].shape == (3, 2)
    assert len(inputs["names"]) == 3


def test_ids_tell_the_number_of_samples_before_anything_else():
    assert count_entries({"image": torch.zeros(9, 2), "kwargs.input_ids": torch.zeros(3, 2)}) == 3
    assert count_entries({"a": torch.zeros(()), "b": torch.zeros(4)}) == 4
    assert count_entries({}) is None


def test_rows_of_a_preference_batch_stand_for_two_entries_each():
    seen = []
    model = nn.Linear(2, 1)
    inputs = {"input_ids": torch.arange(12.0).view(6, 2)}

    def loss_fn(batch):
        seen.append(batch["input_ids"][:, 0].tolist())
        return model(batch["input_ids"]).sum()

    suspect = _specimen(loss_fn, inputs, model, rows=[5, 6, 7])
    assert (suspect.num_samples, suspect.num_entries, suspect.rows) == (3, 6, [5, 6, 7])
    suspect.run([1])
    assert seen == [[2.0, 8.0]]


def test_what_is_known_of_a_pair_is_cut_with_it():
    """Reference log-probabilities that were computed before come once a pair."""
    model = nn.Linear(2, 1)
    inputs = {"input_ids": torch.arange(8.0).view(4, 2), "ref_chosen_logps": torch.tensor([0.0, float("nan")])}

    def loss_fn(batch):
        chosen, _ = model(batch["input_ids"]).view(2, -1)
        return (chosen - batch["ref_chosen_logps"]).sum()

    suspect = _specimen(loss_fn, inputs, model, rows=[5, 6])
    assert suspect.run([0]).healthy
    assert not suspect.run([1]).healthy


def test_a_run_repeats_the_random_state_and_tells_what_is_bad():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1))
    drawn = []

    def loss_fn(batch):
        out = model(batch["x"])
        drawn.append(out.detach().clone())
        return (out * batch["scale"]).sum()

    suspect = _specimen(loss_fn, {"x": torch.ones(4, 8), "scale": torch.ones(4, 1)}, model)
    assert suspect.run().healthy
    torch.rand(7)
    outcome = suspect.run()
    assert torch.equal(drawn[0], drawn[1])
    assert outcome.bad == {}
    bad = _specimen(
        loss_fn, {"x": torch.ones(4, 8), "scale": torch.tensor([[1.0], [float("nan")], [1.0], [1.0]])}, model
    )
    outcome = bad.run()
    assert not outcome.healthy
    assert outcome.bad == {"1.weight": "nan", "1.bias": "nan"}
    assert bad.run([0, 2, 3]).healthy
    assert bad.num_runs == 2


def test_a_compiled_model_is_replayed_as_it_was_written():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    suspect = _specimen(lambda batch: compiled(batch).log().sum(), torch.full((2, 4), -1.0), compiled)
    model[0].weight.data.fill_(1.0)  # everything below zero: ReLU gives zeros, their log is -inf
    origin = suspect.find_origin()
    assert origin is not None
    assert origin.op == "aten.log.default"
    assert suspect.model is model
    model[0].weight.data[0, 0] = float("nan")
    origin = suspect.find_origin()
    assert origin is not None
    assert (origin.module, origin.parameter) == ("0", "0.weight")


def test_a_sample_alone_is_bad_where_the_batch_was():
    """It is cut out before the trace begins, or the cut would be taken for the first to touch the bad number."""
    model = nn.Linear(2, 1)
    inputs = {"x": torch.ones(2, 2), "weight": torch.tensor([float("inf"), 1.0])}
    suspect = _specimen(lambda batch: (model(batch["x"])[:, 0] * batch["weight"]).mean(), inputs, model)
    whole, alone = suspect.find_origin(), suspect.find_origin([0])
    assert (whole.phase, whole.leaf) == ("input", "weight")
    assert (alone.phase, alone.leaf, alone.op, alone.source) == (whole.phase, whole.leaf, whole.op, whole.source)
    assert suspect.find_origin([1]) is None
