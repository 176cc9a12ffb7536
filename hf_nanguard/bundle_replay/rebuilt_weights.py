"""The weights of a rebuilt model: from a bundle or from a checkpoint, safetensors only."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..core.autopsy.bundle.reader import Bundle
from ..core.event import parse_strict
from ..errors import ArgumentError
from ..hf.trainer.trainer_facts import named_tensors
from ..safe_files import read_file
from .untrusted_facts import Facts, needs_factory, take, take_names

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
MAX_INDEX = 64 * 2**20
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def check_folder(folder: Path) -> Path:
    """Returns a checkpoint folder if the weights in it are safetensors."""
    if not folder.is_dir():
        raise ArgumentError(f"--checkpoint must be a folder with model.safetensors in it, got {str(folder)!r}.")
    if (folder / INDEX).is_file():
        check_index(folder / INDEX)
    elif not any((folder / name).is_file() for name in (ADAPTER, "model.safetensors")):
        pickled = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")
        )
        why = f" {pickled[0]} is a pickle, which can run code and is not loaded." if pickled else ""
        raise ArgumentError(
            f"--checkpoint must contain safetensors (model.safetensors, an index of shards, or {ADAPTER}), got "
            f"{str(folder)!r}.{why} Save the model again with save_pretrained."
        )
    return folder


def check_index(index: Path) -> None:
    """Refuses an index of shards that refers to anything but safetensors beside it."""
    try:
        files = set(parse_strict(read_file(index, MAX_INDEX))["weight_map"].values())
        wrong = [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"--checkpoint has an index of shards that cannot be read, {str(index)!r}.") from error
    if wrong:
        raise ArgumentError(
            f"--checkpoint must contain safetensors only, but {str(index)!r} refers to {wrong[0]!r}. Save the model again "
            "with save_pretrained."
        )


def load_adapter(model: nn.Module, folder: Path, name: str) -> set[int]:
    """Loads the weights of an adapter and returns the ids of its parameters."""
    from peft import set_peft_model_state_dict

    try:
        result: Any = set_peft_model_state_dict(model, load_file(folder / ADAPTER), adapter_name=name)
    except (SafetensorError, RuntimeError, KeyError, OSError) as error:
        raise ArgumentError(f"--checkpoint {folder} does not fit the adapter of this bundle ({error}).") from error
    missing = set(result.missing_keys)
    return {id(p) for n, p in model.named_parameters() if f".{name}" in n and n not in missing}


def fill_model(model: nn.Module, bundle: Bundle, facts: Facts, known: set[int]) -> None:
    """Loads the bundle's weights into a rebuilt model and sets dtypes and trainable parameters as recorded in its facts.

    `known` are the ids of parameters whose weights came from a checkpoint. An [`ArgumentError`] says that a parameter has no
    weights.
    """
    known = known | load_weights(model, bundle.read_weights())
    named = dict(model.named_parameters())
    missing = [name for name, parameter in named.items() if id(parameter) not in known]
    if missing:
        raise ArgumentError(
            f"The bundle lacks {len(missing)} of the model's {len(named)} parameters (the first is {missing[0]}). Give them "
            "by --checkpoint FOLDER, or set nanguard_bundle_weights='all' in the run for the next bundle."
        )
    main, others = find_dtype(facts.get("dtype")), take(facts, "dtypes", dict) or {}
    for name, tensor in named_tensors(model):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(find_dtype(others[name]) if name in others else main)
    trainable = take_names(facts, "trainable")
    for name, parameter in named.items():
        parameter.requires_grad_(trainable is None or name in trainable)


def load_weights(model: nn.Module, weights: dict[str, Tensor], strict: bool = True) -> set[int]:
    """Loads weights, by name, into the existing parameters and buffers of a model without wrappers, and returns the ids of
    those that were set. If `strict`, every name must be known."""
    named = dict(named_tensors(model))
    if not strict:
        weights = {name: tensor for name, tensor in weights.items() if name in named}
    for name, tensor in weights.items():
        target = named.get(name)
        if target is None or target.shape != tensor.shape:
            has = "has no tensor of that name" if target is None else f"has shape {list(target.shape)} there"
            raise needs_factory(
                f"The bundle's tensor {name!r} of shape {list(tensor.shape)} does not fit the model, which {has}"
            )
        target.data = tensor.to(target.device)
    return {id(named[name]) for name in weights}


def find_dtype(name: object) -> torch.dtype:
    """Returns a floating-point dtype by its name."""
    if not isinstance(name, str) or name not in DTYPES:
        raise needs_factory(f"The bundle's dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]
