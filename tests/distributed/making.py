"""Faults that strike while completions are made and scored."""

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hf_nanguard.testing import Fault

KINDS = ("sampling", "policy", "reward", "reward_error")


def plant_in_making(trainer: Any, faults: list[Fault], struck: list[Fault]) -> None:
    """Plants the faults of these kinds in a trainer; those that came to pass are added to `struck`."""
    for fault in faults:
        if fault.kind in ("sampling", "policy"):
            _plant_in_sampling(trainer, fault, struck)
        elif fault.kind in KINDS:
            _plant_in_reward(trainer, fault, struck)


def _is_due(trainer: Any, fault: Fault) -> bool:
    return trainer.model.training and trainer.state.global_step == fault.step


def _plant_in_sampling(trainer: Any, fault: Fault, struck: list[Fault]) -> None:
    bare = trainer.accelerator.unwrap_model(trainer.model)
    named = dict(bare.named_parameters())

    def hook(module: Any, args: tuple, output: Tensor) -> Tensor:
        if torch.is_grad_enabled() or args[0].shape[1] == 1 or not _is_due(trainer, fault):
            return output
        if fault not in struck:
            struck.append(fault)
        if fault.kind == "policy":
            named[fault.parameter].data.view(-1)[0] = fault.value
            return output
        output = output.clone()
        output[0] = fault.value
        return output

    bare.get_input_embeddings().register_forward_hook(hook)


def _plant_in_reward(trainer: Any, fault: Fault, struck: list[Fault]) -> None:
    [original] = trainer.reward_funcs

    @wraps(original)
    def reward(completion_ids: list, **kwargs: Any) -> list:
        rewards = original(completion_ids=completion_ids, **kwargs)
        if not _is_due(trainer, fault):
            return rewards
        struck.append(fault)
        if fault.kind == "reward":
            return [fault.value, *rewards[1:]]
        if fault.value is None:
            return [None] * len(rewards)
        raise KeyError("planted error")

    trainer.reward_funcs = [reward]
