"""The counter that the other tests trust."""

import pytest
import torch

from tests.core.counting import Counting

READS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "tolist of a scalar": lambda x: x.sum().tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("how", READS)
def test_each_way_to_read_counts_once(how):
    x = torch.ones(3)
    with Counting() as counted:
        READS[how](x)
    assert len(counted.reads) == 1


def test_work_on_the_device_is_no_read():
    x = torch.ones(3)
    with Counting() as counted:
        x.add(1).sum()
    assert counted.reads == []
    assert len(counted.ops) == 2
