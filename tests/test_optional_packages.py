"""Without the optional packages a plain Trainer is guarded in full: nothing that it meets imports them."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys

for name in ("trl", "datasets", "peft", "matplotlib", "PIL"):
    sys.modules[name] = None  # an import fails, and the hosts see that it is not installed

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_nanguard import NanGuardCallback, check_config, check_dataset, guarded, prove, read_events
from hf_nanguard.takeover.built_trainers import Takeover


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.linear(x)[:, 0]
        return {"loss": ((out - labels) ** 2 / labels).mean(), "out": out}


def build(trainer_class=Trainer, **more):
    torch.manual_seed(0)
    rows = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(16)]
    rows[5]["labels"] = torch.tensor(0.0)
    args = TrainingArguments(
        sys.argv[1], use_cpu=True, per_device_train_batch_size=2, num_train_epochs=1, report_to=[], save_strategy="no"
    )
    return trainer_class(Net(), args, train_dataset=rows, **more)


def taken_over():
    with Takeover({}, print):
        return build()


ways = {"class": lambda: build(guarded(Trainer)), "callback": lambda: build(callbacks=[NanGuardCallback()])}
trainer = {**ways, "run": taken_over}[sys.argv[2]]()
trainer.train()
assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
[event] = read_events(sys.argv[1])
assert (event["signal"], event["culprit"]["rows"]) == ("loss_nonfinite", [5]), event
if sys.argv[2] == "class":
    check_config(trainer)
    assert check_dataset(trainer).examination is not None
    assert prove(build())
"""


@pytest.mark.parametrize("way", ["class", "callback", "run"])
def test_a_plain_trainer_needs_none_of_them(way, tmp_path):
    words = [sys.executable, "-c", SCRIPT, str(tmp_path), way]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "No module named" not in done.stderr + done.stdout
    assert "guard_failed" not in done.stderr
