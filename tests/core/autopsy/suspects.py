"""A small model, a held micro-batch and a verdict, for tests of what an autopsy leaves behind."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_nanguard.core.autopsy.evidence.suspect_batch import SuspectBatch
from hf_nanguard.core.autopsy.evidence.verdict import Blame, Verdict
from hf_nanguard.core.autopsy.trace.origin import Origin
from hf_nanguard.core.rerun.micro_batch import MicroBatch
from hf_nanguard.core.rerun.runner import LoopRunner
from hf_nanguard.core.rng import RngState
from hf_nanguard.core.vocabulary import Cause


class Tied(nn.Module):
    """An embedding that is also the head, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.embed(input_ids).mean(1))))


def make_inputs(num_samples: int = 4) -> dict[str, Any]:
    ids = torch.arange(num_samples * 3).view(num_samples, 3) % 16
    return {"input_ids": ids, "labels": ids, "prompts": [f"secret {i}" for i in range(num_samples)], "scale": 0.5}


def make_specimen(inputs: Any, model: nn.Module | None = None, rng: RngState | None = None) -> SuspectBatch:
    model = Tied() if model is None else model
    runner = LoopRunner(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return SuspectBatch(runner, MicroBatch(1, inputs, rng or RngState.capture()), 1.0)


def make_verdict(parameter: str | None = None, **blame: Any) -> Verdict:
    origin = Origin("forward", "nan", Cause.LOG_OF_ZERO, op="aten.log.default", parameter=parameter, leaf=parameter)
    return Verdict(origin, Blame(**blame), num_samples=4, seconds=float("inf"))
