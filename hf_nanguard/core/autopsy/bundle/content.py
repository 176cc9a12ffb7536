"""What goes into a bundle, decided by size before anything is written."""

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .... import __version__
from ....plain_text import show
from ...event import JsonObject, strict
from ...finite import local
from ...rerun.nested_inputs import HOST_NAMES
from ...torch_private import plain_name
from ..evidence.suspect_batch import SuspectBatch
from ..evidence.verdict import Verdict
from .packing import Packed, pack_inputs, pack_rng
from .tensor_file import why_not

SCHEMA = 1
MAX_FACTS = 16 * 2**20
MAX_CULPRIT = 512 * 2**20
MAX_NOTES = 200


@torch.no_grad()
def gather_content(
    suspect: SuspectBatch, verdict: Verdict, facts: JsonObject, step: int, weights: str, text: bool, max_bytes: int
) -> tuple[JsonObject, dict[str, dict[str, Tensor]]]:
    """Gathers what fits: the inputs first, then the weights that were asked for, or else the parameter to blame.

    Returns what becomes `facts.json`, and the tensors of each safetensors file, by reference.
    """
    rng = pack_rng(suspect.micro.rng)
    inputs, inputs_are = _choose_inputs(suspect, verdict, text, max_bytes - rng.num_bytes)
    redacted = {} if text else {"text": "strings and keys of the data are replaced because nanguard_bundle_text is off"}
    room = max_bytes - rng.num_bytes - inputs.num_bytes
    saved, weights_are = _choose_weights(suspect.model, weights, verdict, room)
    files = {"inputs.safetensors": inputs.tensors | rng.tensors, "weights.safetensors": saved.tensors}
    given = facts.get("versions")
    document = {
        "schema": SCHEMA,
        "time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "step": step,
        "micro_step": suspect.micro.index,
        "verdict": verdict.as_dict(),
        "facts": show(strict(facts), text),
        "inputs": {"are": inputs_are, "samples": verdict.blame.samples if inputs_are == "samples" else None},
        "weights": {"are": weights_are, "saved": bool(saved.tensors), "aliases": saved.tree},
        "versions": {
            "hf_nanguard": __version__, "python": platform.python_version(), "torch": torch.__version__,
            **({str(name): str(given[name]) for name in given} if isinstance(given, dict) else {}),
        },
        "left_out": _shorten(inputs.left_out | rng.left_out | redacted | saved.left_out),
        "rng": rng.tree,
        "tree": inputs.tree,
    }  # fmt: skip
    return document, {name: tensors for name, tensors in files.items() if tensors}


def _choose_inputs(suspect: SuspectBatch, verdict: Verdict, text: bool, room: int) -> tuple[Packed, str]:
    """Returns the inputs if they fit, else those of the culprit samples, else nothing."""
    names = HOST_NAMES | _find_arguments(suspect.model)
    packed = pack_inputs(suspect.runner.inputs_of(suspect.micro), text, names)
    why = _why_too_large(packed, room)
    if why is None:
        return packed, "all"
    samples = verdict.blame.samples
    if samples and suspect.num_samples:
        part = pack_inputs(suspect.runner.inputs_of(suspect.part(samples)), text, names)
        if _why_too_large(part, room) is None:
            part.left_out["inputs"] = f"only the samples {samples} were saved because {why}"
            return part, "samples"
    return Packed({"left_out": why}, left_out={"inputs": why}), "none"


def _find_arguments(model: nn.Module) -> set[str]:
    """Returns the names of the arguments that a model takes."""
    try:
        return set(signature(model.forward).parameters)
    except (TypeError, ValueError):  # e.g. a scripted module
        return set()


def _why_too_large(packed: Packed, room: int) -> str | None:
    if packed.num_bytes > room:
        return _describe_excess(packed.num_bytes, room)
    size = len(json.dumps(packed.tree))
    return None if size <= MAX_FACTS // 2 else f"{format_bytes(size)} of plain values are too many"


def _pack_weights(named: Mapping[str, Any]) -> Packed:
    """Returns each tensor once; the tree has the other names of tied ones."""
    aliases: dict[str, str] = {}
    first: dict[tuple, str] = {}
    packed = Packed(aliases)
    for name, value in named.items():
        if (reason := why_not(value)) is not None:
            packed.left_out[name] = reason
            continue
        part = local(value)
        key = (part.device, part.data_ptr(), part.dtype, part.shape, part.stride())
        if first.setdefault(key, name) == name:
            packed.tensors[name] = value
        else:
            aliases[name] = first[key]
    return packed


def _choose_weights(model: nn.Module, kind: str, verdict: Verdict, room: int) -> tuple[Packed, str]:
    """Returns the weights that were asked for if they fit, with the parameter or buffer that the verdict names."""
    blamed = None if verdict.origin is None else verdict.origin.parameter
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = {plain_name(name): tensor for name, tensor in named}
    culprit = None if blamed is None else tensors.get(plain_name(blamed))
    needed = {name: tensor for name, tensor in tensors.items() if tensor is culprit}
    too_large: dict[str, str] = {}
    if kind != "none":
        asked = model.state_dict() if kind == "all" else {name: p for name, p in named if p.requires_grad}
        packed = _pack_weights({plain_name(name): value for name, value in asked.items()} | needed)
        if packed.num_bytes <= room:
            return packed, kind if packed.tensors else "none"
        too_large["weights"] = _describe_excess(packed.num_bytes, room)
    packed, limit = _pack_weights(needed), min(room, MAX_CULPRIT)
    if packed.num_bytes > limit:
        too_large |= dict.fromkeys(packed.tensors, _describe_excess(packed.num_bytes, limit))
        packed = Packed({}, left_out=packed.left_out)
    return replace(packed, left_out=too_large | packed.left_out), "none"


def _describe_excess(size: int, room: int) -> str:
    return f"{format_bytes(size)} do not fit into {format_bytes(room)}"


def _shorten(left_out: dict[str, str]) -> dict[str, str]:
    shown = dict(list(left_out.items())[:MAX_NOTES])
    return shown if len(shown) == len(left_out) else {**shown, "...": f"and {len(left_out) - len(shown)} more"}


def format_bytes(size: int) -> str:
    """Returns a number of bytes with a unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{max(size, 0)} bytes"
