"""Micro-batches that run again under DDP."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.guard import Guard

from ..loop import group_of_one


class Branches(nn.Module):
    """The second branch is used only if a batch asks for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(4, 1)
        self.sometimes = nn.Linear(4, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + (self.sometimes(x) if both else 0.0)


PLAIN, BOTH, BAD = "plain", "both", "bad"  # kinds of batches; a bad one uses both branches


def train(groups: list[list[str]], policy: Policy) -> tuple[dict[str, Tensor], list[str]]:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    events: list[dict] = []
    guard = Guard(model, optimizer, policy, max_grad_norm=1.0, on_event=events.append)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))

    def loss_fn(kind: str) -> Tensor:
        loss = model(x, kind != PLAIN).square().mean()
        return loss * torch.nan if kind == BAD else loss

    for group in groups:
        guard.step(loss_fn, group)
    return model.module.state_dict(), [event["action"] for event in events]


@pytest.mark.parametrize(
    "policy", [Policy(), Policy(autopsy=False), Policy(on_nonfinite="skip")], ids=["examined", "unexamined", "skipped"]
)
@pytest.mark.parametrize("after", [PLAIN, BOTH])
def test_what_a_dropped_batch_used_is_forgotten(policy, after):
    """Else DDP fails at the branch without a gradient, or gives it zeros, and AdamW moves it."""
    drops = policy.on_nonfinite == "drop"
    with group_of_one():
        actual, actions = train([[BOTH], [PLAIN, BAD], [after]], policy)
        expected, _ = train([[BOTH], [PLAIN], [after]] if drops else [[BOTH], [after]], policy)
    assert actions == ["dropped" if drops else "skipped"]
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
