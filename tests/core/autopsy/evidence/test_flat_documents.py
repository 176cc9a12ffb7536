"""Documents that lie one after the other in one entry of a batch are found and cut out."""

import pytest
import torch

from hf_nanguard.core.autopsy.evidence.flat_documents import find_documents


def batch(positions, **more):
    return {"input_ids": torch.arange(len(positions))[None], "position_ids": torch.tensor([positions]), **more}


def test_documents_begin_where_positions_do():
    documents = find_documents(batch([0, 1, 2, 0, 0, 1]))
    assert documents.starts == (0, 3, 4)
    assert [documents.locate(i) for i in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]


def test_documents_are_cut_out_with_their_lengths():
    lengths = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    inputs = batch([0, 1, 2, 0, 0, 1], cu_seq_lens_q=lengths, max_length_q=3, other=torch.ones(3, 2))
    taken = find_documents(inputs).take(inputs, [0, 2])
    assert taken["input_ids"].tolist() == [[0, 1, 2, 4, 5]]
    assert taken["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert (taken["cu_seq_lens_q"].tolist(), taken["cu_seq_lens_q"].dtype) == ([0, 3, 5], torch.int32)
    assert taken["other"] is inputs["other"]
    assert inputs["input_ids"].shape == (1, 6)


@pytest.mark.parametrize(
    "inputs",
    [
        batch([0, 1, 2, 3]),
        batch([1, 1, 0, 1]),
        batch([0, 0, 5]),
        batch([0, 0, 0, 1], attention_mask=torch.tensor([[0, 0, 1, 1]])),
        {"position_ids": torch.zeros(2, 3, dtype=torch.long)},
        {"input_ids": torch.ones(1, 4)},
        torch.ones(1, 4),
    ],
    ids=["one", "begins later", "jumps", "padded", "two entries", "no positions", "no mapping"],
)
def test_other_batches_have_none(inputs):
    assert find_documents(inputs) is None
