"""The weights of a model that is built again: from a bundle or from a checkpoint, safetensors only."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import ArgumentError
from ..hf.trainer.trainer_facts import name_state

INDEX = "model.safetensors.index.json"
FACTORY = "Give a model of your own by --factory module:function"


def check_folder(folder: Path) -> tuple[Path, bool]:
    """Returns a checkpoint folder and whether it holds an adapter."""
    if not folder.is_dir():
        raise ArgumentError(
            f"--checkpoint must be a folder, got {str(folder)!r}. Give one with model.safetensors in it."
        )
    if (folder / "adapter_model.safetensors").is_file():
        return folder, True
    if (folder / "model.safetensors").is_file():
        return folder, False
    if (folder / INDEX).is_file():
        check_index(folder / INDEX)
        return folder, False
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    why = f" {pickled[0]} is a pickle, which can run code and is not loaded." if pickled else ""
    raise ArgumentError(
        f"--checkpoint must hold safetensors (model.safetensors, an index of shards, or adapter_model.safetensors), got "
        f"{str(folder)!r}.{why} Save the model once more with save_pretrained."
    )


def check_index(index: Path) -> None:
    """Refuses an index of shards that leads to anything but safetensors beside it."""
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
        wrong = [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"--checkpoint has an index of shards that cannot be read, {str(index)!r}.") from error
    if wrong:
        raise ArgumentError(
            f"--checkpoint must hold safetensors only, but {str(index)!r} leads to {wrong[0]!r}. Save the model once more "
            "with save_pretrained."
        )


def load_weights(model: nn.Module, weights: dict[str, Tensor], strict: bool = True) -> set[int]:
    """Puts weights of a bundle into a model, the parameters staying the objects they are.

    Args:
        model (`nn.Module`):
            The model without wrappers.
        weights (`dict[str, Tensor]`):
            Weights by the names of its parameters and buffers.
        strict (`bool`):
            Whether every name must be known.

    Returns:
        `set[int]`: the ids of the parameters and buffers that were set.
    """
    named = dict(name_state(model))
    done: set[int] = set()
    for name, tensor in weights.items():
        target = named.get(name)
        if target is None or target.shape != tensor.shape:
            if strict or target is not None:
                mine = "has none of that name" if target is None else f"wants {list(target.shape)}"
                raise ArgumentError(
                    f"The bundle's tensor {name!r} of shape {list(tensor.shape)} does not fit the model, which {mine}. "
                    f"{FACTORY}."
                )
            continue
        target.data = tensor.to(target.device)
        done.add(id(target))
    return done


def set_dtypes(model: nn.Module, facts: dict[str, Any]) -> None:
    """Gives parameters and buffers the dtypes they had."""
    main, other = find_dtype(facts.get("dtype")), facts.get("dtypes") or {}
    for name, tensor in name_state(model):
        if tensor.is_floating_point():
            dtype = find_dtype(other[name]) if name in other else main
            if tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)


def set_trainable(model: nn.Module, facts: dict[str, Any]) -> None:
    """Freezes and unfreezes parameters as they were."""
    trainable = facts.get("trainable")
    names = None if trainable is None else set(trainable)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(names is None or name in names)


def find_missing(model: nn.Module, known: set[int]) -> list[str]:
    """Returns the names of parameters without weights."""
    return [name for name, parameter in model.named_parameters() if id(parameter) not in known]


def load_adapter(model: nn.Module, folder: Path, name: str) -> set[int]:
    """Loads the weights of an adapter and returns the ids of its parameters."""
    from peft import set_peft_model_state_dict

    try:
        result: Any = set_peft_model_state_dict(
            model, load_file(folder / "adapter_model.safetensors"), adapter_name=name
        )
    except (SafetensorError, RuntimeError, KeyError, OSError) as error:
        raise ArgumentError(f"--checkpoint {folder} does not hold the adapter of this bundle ({error}).") from error
    missing = set(result.missing_keys)
    parts = f".{name}"
    return {id(p) for n, p in model.named_parameters() if parts in n and n not in missing}


def find_dtype(name: Any) -> torch.dtype:
    """Returns a floating-point dtype by its name."""
    known = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    if name not in known:
        raise ArgumentError(f"The bundle's dtype must be one of {', '.join(known)}, got {name!r}. {FACTORY}.")
    return known[name]
