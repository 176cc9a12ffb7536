"""The trainers that the scenarios run: tiny models, real classes, one epoch with an uneven tail."""

from typing import Any

import torch
import trl
from torch import nn
from transformers import Trainer, TrainingArguments

import hf_nanguard
from hf_nanguard import GuardArguments
from tests.laws.ways import WAYS
from tests.models import VOCAB, text_rows, tiny_llama, tiny_tokenizer, token_dataset

from .scenario import GRPO, MEAN, NORM, OWN, SFT, Scenario
from .stock import StopAt, never_had, zeroed

NAMES = {
    SFT: "SFT",
    GRPO: "GRPO",
}  # of what TRL has, which is imported when it is needed: older versions lack parts of it


class OwnBackward(Trainer):
    """Passes by the accelerator."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.current_gradient_accumulation_steps
        loss.backward()
        return loss.detach()


FIRST_WORD = 7


def find_class(host: str, guarded: bool) -> type[Trainer]:
    """Returns the trainer of a host, stock or guarded."""
    if host == OWN:
        return hf_nanguard.guarded(OwnBackward) if guarded else OwnBackward
    name = f"{NAMES.get(host, '')}Trainer"
    if guarded:
        return getattr(hf_nanguard, f"Guarded{name}")
    return getattr(trl, name) if host in NAMES else Trainer


def find_config(host: str) -> type[TrainingArguments]:
    """Returns the arguments that a host takes."""
    return getattr(trl, f"{NAMES[host]}Config") if host in NAMES else TrainingArguments


class NormNet(nn.Module):
    """A plain module with running statistics and dropout; its loss is a per-batch mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(8, 1)

    def forward(self, x, labels):
        out = self.last(self.dropout(torch.relu(self.norm(self.first(x)))))[:, 0]
        return {"loss": ((out - labels) ** 2).mean(), "out": out}


def reward(completion_ids, **kwargs):
    """A reward that tells completions apart."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def num_rows(scenario: Scenario, world: int) -> int:
    """Three whole steps and a tail of two micro-batches, the last of them short of a sample."""
    batch_size = scenario.options.get("per_device_train_batch_size", 2)
    return batch_size * world * (scenario.accumulation * 3 + min(2, scenario.accumulation)) - 1


def make_data(scenario: Scenario, world: int) -> Any:
    """Rows whose first entry tells their number."""
    count = num_rows(scenario, world)
    if scenario.host in (NORM, OWN):
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(count, 5, generator=generator)
        return [{"x": torch.cat([noise[i, 1:], torch.tensor([float(i)])]), "labels": noise[i, 0]} for i in range(count)]
    if scenario.host == GRPO:
        return [{"prompt": f"w{i} {row['text'].split()[0]}"} for i, row in enumerate(text_rows(16))]
    if count > VOCAB - 3:
        raise ValueError(f"{count} rows cannot be told apart by {VOCAB - 3} tokens")
    return token_dataset(count)


def rows_of(inputs: dict) -> list[int]:
    """Returns the dataset rows of a batch, read off the batch itself."""
    if "prompt_ids" in inputs:
        return (inputs["prompt_ids"][:, 0] - FIRST_WORD).tolist()
    if "x" in inputs:
        return inputs["x"][:, -1].int().tolist()
    return (inputs["input_ids"][:, 0] - 3).tolist()


def make_arguments(scenario: Scenario, folder: str) -> TrainingArguments:
    """The arguments of both runs."""
    common: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 2, "num_train_epochs": 1, "seed": 7,
        "gradient_accumulation_steps": scenario.accumulation, "learning_rate": 1e-2, "weight_decay": 0.1,
        "lr_scheduler_type": "linear", "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "ddp_timeout": 20, "bf16": False,
    }  # fmt: skip
    if scenario.host == SFT:
        common |= {"max_length": None, "gradient_checkpointing": False}
    if scenario.host == GRPO:
        common |= {"num_generations": 2, "max_completion_length": 4, "max_steps": 4, "gradient_checkpointing": False}
    return find_config(scenario.host)(**{**common, **scenario.options})


def make_trainer(scenario: Scenario, folder: str, world: int, guarded: bool) -> Any:
    """Builds the guarded trainer, or the stock one it must equal."""
    args = make_arguments(scenario, folder)
    chosen = {
        "autopsy_seconds": 1e-3,
        **scenario.guard,
    }  # the origin is what ranks could quarrel about, so no more than that
    settings = GuardArguments(**{f"nanguard_{name}": value for name, value in chosen.items()})
    host = scenario.host
    model = NormNet() if host in (NORM, OWN) else tiny_llama()
    parts: dict[str, Any] = {"model": model, "args": args, "train_dataset": make_data(scenario, world)}
    if host in (SFT, GRPO):
        parts["processing_class"] = tiny_tokenizer()
    if host == GRPO:
        from datasets import Dataset

        parts["reward_funcs"] = reward
        parts["train_dataset"] = Dataset.from_list(parts["train_dataset"])
    if guarded:
        trainer = WAYS[scenario.way](lambda is_guarded, **more: find_class(host, is_guarded)(**parts, **more), settings)
    else:
        trainer_class = find_class(host, False)
        if scenario.gone:
            trainer_class = never_had(trainer_class, scenario.gone)
        if scenario.zeroed is not None:
            trainer_class = zeroed(trainer_class, *scenario.zeroed)
        callbacks = [StopAt(scenario.stops_at)] if scenario.stops_at is not None else []
        trainer = trainer_class(**parts, callbacks=callbacks)
    if host == MEAN:
        trainer.model_accepts_loss_kwargs = False
    return trainer
