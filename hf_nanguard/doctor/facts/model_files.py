"""Facts from the files of a model on disk: its config and the size of its weights. Nothing is loaded or downloaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ..rules.run_facts import Facts
from .argument_facts import read_dtype
from .json_files import read_json

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def find_model_facts(name: str) -> Facts:
    """Returns what the files of a model say, if they are in a folder or in the hub's cache."""
    folder = Path(name)
    if not folder.is_dir():
        try:
            cached = try_to_load_from_cache(name, "config.json")
        except ValueError:  # not a name of the hub's
            cached = None
        folder = Path(cached).parent if isinstance(cached, str) else folder
    config = read_json(folder / "config.json")
    facts = Facts.of(model_name=name, is_pretrained=True)
    return facts.update(read_model_config(config, folder)) if isinstance(config, Mapping) else facts


def read_model_config(config: Mapping[str, object], folder: Path) -> Facts:
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert isinstance(text, Mapping)
    dtype = read_dtype(config.get("dtype", config.get("torch_dtype")))
    kind = config.get("model_type")
    positions = text.get("max_position_embeddings", text.get("n_positions"))
    return Facts.of(
        model_type=kind if isinstance(kind, str) else None,
        checkpoint_dtype=dtype,
        max_positions=positions if isinstance(positions, int) and positions > 0 else None,
        embedding_rows=text.get("vocab_size") if isinstance(text.get("vocab_size"), int) else None,
        hidden_size=_read_size(text, "hidden_size", "n_embd", "d_model"),
        intermediate_size=_read_size(text, "intermediate_size", "n_inner", "d_ff"),
        num_layers=_read_size(text, "num_hidden_layers", "n_layer", "num_layers"),
        parameters=count_parameters(folder, dtype),
    )


def _read_size(config: Mapping[str, Any], *names: str) -> int | None:
    """Returns a size under one of the names that configs have for it."""
    found = next((config[name] for name in names if isinstance(config.get(name), int)), None)
    return found if found and found > 0 else None


def count_parameters(folder: Path, dtype: str | None) -> int | None:
    """Returns the number of parameters by the size of the weight files."""
    index = read_json(folder / "model.safetensors.index.json")
    total = index.get("metadata", {}).get("total_size") if isinstance(index, Mapping) else None
    file = folder / "model.safetensors"
    if not isinstance(total, int | float):
        total = file.stat().st_size if file.is_file() else None
    return None if total is None else int(total / BYTES[dtype or "float32"])
