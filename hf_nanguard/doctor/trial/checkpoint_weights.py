"""The weights of a model beside those of the checkpoint folder it was loaded from."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ...boundary import attempt
from ...core.torch_private import plain_name
from ...hf.compat.model_config import plain_adapter_name
from .trial_bench import ADAPTERS

MAX_COPIED = 2e9  # parameters of a model that is loaded a second time
GENERATORS = (
    "CausalLM",
    "LMHead",
    "ConditionalGeneration",
    "MaskedLM",
)  # parts of the names of models whose head is pretrained
OPTIONAL = ("pooler", "masked_spec_embed", "mask_token", "parametrizations")  # weights that checkpoints often lack
SMALL = 1e-3  # a share of all weights that does not count


@dataclass
class Comparison:
    """What became of the weights of a checkpoint.

    Args:
        folder (`str`):
            The name of its folder.
        equal (`list[str]`):
            Weights of the model that are those of the checkpoint.
        different (`dict[str, float]`):
            Weights that have other values, each with the largest difference.
        unused (`list[str]`):
            Weights of the checkpoint that the model does not have.
        new (`list[str]`):
            Weights of the model that the checkpoint does not have.
        lost (`list[str]`):
            Those of them that a checkpoint of this model should have.
        lost_inside (`bool`):
            Whether some of these are of the model itself, not of its head.
    """

    folder: str
    equal: list[str] = field(default_factory=list)
    different: dict[str, float] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    lost_inside: bool = False


def compare_with_checkpoint(model: Any, is_adapted: bool = False) -> Comparison | None:
    """Returns how a model differs from the folder with safetensors files it was loaded from, `None` if there is none.

    Weights are compared by name; those of adapters (`is_adapted`) are left out. If some have no counterpart, because names are translated when a model is loaded or because
    weights are missing, the model is loaded once more, and the loader says which are which.
    """
    path = Path(str(getattr(model, "name_or_path", "") or ""))
    files = sorted(path.glob("*.safetensors")) if path.name and path.is_dir() else []
    if not files:
        return None
    own = {
        _plain(name): tensor
        for name, tensor in model.state_dict().items()
        if not (is_adapted and any(part in name for part in ADAPTERS))
    }
    found, known = Comparison(path.name), set()
    for name, saved in _read_tensors(files):
        same = _find_same(own, name, saved, model)
        if same is None:
            found.unused.append(name)
        else:
            known.add(own[same].data_ptr())  # also of what is tied to it
            _note(found, same, own[same], saved)
    rest = {name: tensor for name, tensor in own.items() if tensor.data_ptr() not in known}
    if rest and isinstance(model, PreTrainedModel) and sum(p.numel() for p in model.parameters()) <= MAX_COPIED:
        attempt(
            lambda: _load_again(model, path, rest, found), lambda error: None
        )  # its class may take arguments of its own
    return found


def _load_again(model: PreTrainedModel, path: Path, rest: dict[str, Tensor], found: Comparison) -> None:
    torch.manual_seed(1)
    cls: Any = type(model)
    loaded, info = cls.from_pretrained(str(path), dtype=model.dtype, output_loading_info=True)
    missing, again = set(info["missing_keys"]), loaded.state_dict()
    for name, tensor in rest.items():
        other = again.get(name)
        if name in missing or other is None or other.shape[1:] != tensor.shape[1:]:
            found.new.append(name)
        else:  # an embedding may have got rows, or lost some
            rows = min(len(tensor), len(other)) if tensor.ndim else 0
            _note(found, name, tensor[:rows] if tensor.ndim else tensor, other[:rows] if tensor.ndim else other)
    found.unused = sorted(info["unexpected_keys"])
    _find_lost(model, rest, found)


def _find_lost(model: PreTrainedModel, rest: dict[str, Tensor], found: Comparison) -> None:
    prefix = f"{model.base_model_prefix}."
    has_head = any(name.startswith(prefix) for name in model.state_dict())
    total = sum(p.numel() for p in model.parameters())
    inside = [
        n for n in found.new if (n.startswith(prefix) or not has_head) and not any(part in n for part in OPTIONAL)
    ]
    is_generator = any(part in type(model).__name__ for part in GENERATORS)
    head = [n for n in found.new if is_generator and has_head and not n.startswith(prefix)]
    found.lost_inside = sum(rest[name].numel() for name in inside) > SMALL * total
    found.lost = [*(inside if found.lost_inside else ()), *head]


def _note(found: Comparison, name: str, tensor: Tensor, saved: Tensor) -> None:
    if torch.equal(tensor.cpu(), saved.to(tensor.dtype)):
        found.equal.append(name)
    else:
        found.different[name] = float((tensor.cpu().float() - saved.float()).abs().max())


def _read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - no dictionary
                yield name, content.get_tensor(name)


def _plain(name: str) -> str:
    return plain_adapter_name(plain_name(name))


def _find_same(own: dict[str, Tensor], name: str, saved: Tensor, model: object) -> str | None:
    prefix = getattr(model, "base_model_prefix", "")
    for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if each in own and own[each].shape == saved.shape:
            return each
    return None
