"""A model with running statistics, under the plain Trainer."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardedTrainer

from ..reference import without
from ..trainers import common_arguments


class NormNet(nn.Module):
    """A regression with BatchNorm whose loss is a mean over the batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x, labels):
        out = self.body(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Points(Dataset):
    """Random points."""

    def __init__(self, size: int = 64):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(size, 4, generator=generator), torch.randn(size, generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


def build_batchnorm(output_dir, trainer_class=GuardedTrainer, **overrides):
    torch.manual_seed(0)
    args = TrainingArguments(**common_arguments(output_dir, per_device_train_batch_size=4, **overrides))
    return trainer_class(NormNet(), args, train_dataset=Points())


def reference_batchnorm(output_dir, *places, **overrides):
    return build_batchnorm(output_dir, without(Trainer, *places), **overrides)
