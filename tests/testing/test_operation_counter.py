"""The counter of host reads and operations, which the other tests rely on."""

import numpy as np
import pytest
import torch

from hf_nanguard.testing import OperationCounter

READS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "tolist of a scalar": lambda x: x.sum().tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "numpy of a list": lambda x: np.asarray(x),
    "int": lambda x: int(x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("how", READS)
def test_each_way_to_read_counts_once(how):
    x = torch.ones(3)
    with OperationCounter() as counted:
        READS[how](x)
    assert len(counted.reads) == 1


def test_work_on_the_device_is_no_read():
    x = torch.ones(3)
    with OperationCounter() as counted:
        x.add(1).sum()
    assert counted.reads == []
    assert len(counted.ops) == 2


def test_reads_and_other_operations_are_counted_apart():
    with OperationCounter() as counted:
        total = torch.ones(3).add(1).add(1).sum()
        total.item()
        total.tolist()
        torch.equal(total, total)
    assert (counted.num_reads, counted.num_ops) == (3, 4)
    assert counted.op_counts["aten.add.Tensor"] == 2


def test_nothing_is_counted_or_patched_outside_the_block():
    methods = [torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy]
    with pytest.raises(KeyError), OperationCounter() as counted:
        raise KeyError
    torch.ones(3).add(1).tolist()
    assert (counted.ops, counted.reads) == ([], [])
    assert [torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy] == methods
