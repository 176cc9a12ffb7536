"""What goes into a bundle, decided by size before anything is written."""

import json
import platform
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from .... import __version__
from ...event import strict
from ...torch_private import plain_name
from ..evidence.suspect_batch import SuspectBatch
from ..evidence.verdict import Verdict
from .packing import Packed, pack_inputs, pack_rng
from .tensor_file import count_bytes, local_of, why_not

SCHEMA = 1
MAX_FACTS = 16 * 2**20
MAX_CULPRIT = 512 * 2**20
MAX_NOTES = 200


@dataclass
class Content:
    """The content of a bundle.

    Args:
        verdict (`Verdict`):
            The verdict, without text if none is to be kept.
        facts (`dict`):
            What becomes `facts.json`.
        files (`dict[str, dict[str, Tensor]]`):
            The tensors of each safetensors file, by reference.
    """

    verdict: Verdict
    facts: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(count_bytes(tensors.values()) for tensors in self.files.values())


@torch.no_grad()
def gather_content(
    suspect: SuspectBatch, verdict: Verdict, facts: dict[str, Any], step: int, weights: str, text: bool, max_bytes: int
) -> Content:
    """Gathers what fits: the inputs first, then the weights that were asked for, or else the parameter to blame."""
    if not text:
        verdict = replace(verdict, blame=replace(verdict.blame, texts={}))
    content = Content(verdict)
    rng = pack_rng(suspect.micro.rng)
    inputs, inputs_are = _choose_inputs(suspect, verdict, text, max_bytes - count_bytes(rng.tensors.values()))
    left_out = inputs.left_out | rng.left_out
    if not text:
        left_out["text"] = "strings are replaced because nanguard_bundle_text is off"
    content.files["inputs.safetensors"] = inputs.tensors | rng.tensors
    saved = _choose_weights(suspect.model, weights, verdict, max_bytes - content.num_bytes, left_out)
    if saved.tensors:
        content.files["weights.safetensors"] = saved.tensors
    given = facts.get("versions")
    content.facts = {
        "schema": SCHEMA,
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "step": step,
        "micro_step": suspect.micro.index,
        "verdict": verdict.as_dict(),
        "facts": strict(facts),
        "inputs": {"are": inputs_are, "samples": verdict.blame.samples if inputs_are == "samples" else None},
        "weights": {"are": saved.kind, "saved": bool(saved.tensors), "aliases": saved.aliases},
        "versions": {
            "hf_nanguard": __version__, "python": platform.python_version(), "torch": torch.__version__,
            **({str(name): str(given[name]) for name in given} if isinstance(given, dict) else {}),
        },
        "left_out": _shorten(left_out),
        "rng": rng.tree,
        "tree": inputs.tree,
    }  # fmt: skip
    return content


def _choose_inputs(suspect: SuspectBatch, verdict: Verdict, text: bool, room: int) -> tuple[Packed, str]:
    """Returns the inputs if they fit, else those of the culprit samples, else nothing."""
    packed = pack_inputs(suspect.runner.inputs_of(suspect.micro), text)
    why = _why_too_large(packed, room)
    if why is None:
        return packed, "all"
    samples = verdict.blame.samples
    if samples and suspect.num_samples:
        part = pack_inputs(suspect.runner.inputs_of(suspect.part(samples)), text)
        if _why_too_large(part, room) is None:
            part.left_out["inputs"] = f"only the samples {samples} were saved because {why}"
            return part, "samples"
    return Packed({"left_out": why}, left_out={"inputs": why}), "none"


def _why_too_large(packed: Packed, room: int) -> str | None:
    size = count_bytes(packed.tensors.values())
    if size > room:
        return f"{format_bytes(size)} do not fit into {format_bytes(room)}"
    size = len(json.dumps(packed.tree))
    return None if size <= MAX_FACTS // 2 else f"{format_bytes(size)} of plain values are too many"


@dataclass
class SavedWeights:
    """The weights that a bundle contains: which kind was asked for and fits, each tensor once, other names of tied ones."""

    kind: str = "none"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, named: dict[str, Any], left_out: dict[str, str]) -> "SavedWeights":
        """Adds the tensors that can be saved, and notes why the others cannot."""
        first: dict[Any, str] = {}
        for name, value in named.items():
            reason = why_not(value) if isinstance(value, Tensor) else f"a {type(value).__name__} is not a tensor"
            if reason is not None:
                left_out[name] = reason
                continue
            part = local_of(value)
            key = (part.device, part.data_ptr(), part.dtype, part.shape, part.stride())
            if first.setdefault(key, name) == name:
                self.tensors[name] = value
            else:
                self.aliases[name] = first[key]
        return self


def _choose_weights(model: nn.Module, kind: str, verdict: Verdict, room: int, left_out: dict[str, str]) -> SavedWeights:
    """Returns the weights that were asked for if they fit, with the parameter or buffer that the verdict names."""
    blamed = None if verdict.origin is None else verdict.origin.parameter
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors = {plain_name(name): tensor for name, tensor in named}
    culprit = None if blamed is None else tensors.get(plain_name(blamed))
    needed = {name: tensor for name, tensor in tensors.items() if tensor is culprit}
    if kind != "none":
        asked = model.state_dict() if kind == "all" else {name: p for name, p in named if p.requires_grad}
        reasons: dict[str, str] = {}
        found = SavedWeights(kind).add({plain_name(name): value for name, value in asked.items()} | needed, reasons)
        size = count_bytes(found.tensors.values())
        if size <= room:
            left_out |= reasons
            found.kind = kind if found.tensors else "none"
            return found
        left_out["weights"] = f"{format_bytes(size)} do not fit into {format_bytes(room)}"
    found = SavedWeights().add(needed, left_out)
    size, limit = count_bytes(found.tensors.values()), min(room, MAX_CULPRIT)
    if size <= limit:
        return found
    left_out |= {name: f"{format_bytes(size)} do not fit into {format_bytes(limit)}" for name in found.tensors}
    return SavedWeights()


def _shorten(left_out: dict[str, str]) -> dict[str, str]:
    shown = dict(list(left_out.items())[:MAX_NOTES])
    return shown if len(shown) == len(left_out) else {**shown, "...": f"and {len(left_out) - len(shown)} more"}


def format_bytes(size: int) -> str:
    """Returns a number of bytes with a unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{max(size, 0)} bytes"
