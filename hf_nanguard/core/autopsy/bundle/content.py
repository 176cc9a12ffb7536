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
from .packing import REDACTED, Packed, pack_inputs, pack_rng
from .tensor_file import count_bytes, local_of, why_not

SCHEMA = 1
MAX_FACTS = 16 * 2**20
MAX_LEVELS = 100
MAX_NEEDED = 512 * 2**20
MAX_NOTES = 200
TEXT_KEYS = ("prompt", "completion", "text", "prompts", "completions", "texts")


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
        """How much room the tensors take."""
        return sum(count_bytes(tensors.values()) for tensors in self.files.values())


@torch.no_grad()
def gather_content(
    suspect: SuspectBatch, verdict: Verdict, facts: dict[str, Any], step: int, weights: str, text: bool, max_bytes: int
) -> Content:
    """Gathers what fits: the inputs first, then the parameter the verdict names, then the weights."""
    if not text:
        verdict = replace(verdict, blame=replace(verdict.blame, texts={}))
        facts = redact(facts)
    content = Content(verdict)
    rng = pack_rng(suspect.micro.rng)
    inputs, inputs_are = _choose_inputs(suspect, verdict, text, max_bytes - count_bytes(rng.tensors.values()))
    left_out = inputs.left_out | rng.left_out
    if not text:
        left_out["text"] = "decoded text was not to be kept; strings are replaced"
    content.files["inputs.safetensors"] = inputs.tensors | rng.tensors
    saved = _choose_weights(suspect.model, weights, verdict, content, max_bytes, left_out)
    given = facts.get("versions")
    content.facts = {
        "schema": SCHEMA,
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "step": step,
        "micro_step": suspect.micro.index,
        "verdict": verdict.as_dict(),
        "facts": strict(facts),
        "inputs": {"are": inputs_are, "samples": verdict.blame.samples if inputs_are == "samples" else None},
        "weights": saved,
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
            part.left_out["inputs"] = f"only the samples {samples} are inside: {why}"
            return part, "samples"
    return Packed({"left_out": why}, left_out={"inputs": why}), "none"


def _why_too_large(packed: Packed, room: int) -> str | None:
    size = count_bytes(packed.tensors.values())
    if size > room:
        return f"{show_bytes(size)} do not fit into {show_bytes(room)}"
    size = len(json.dumps(packed.tree))
    return None if size <= MAX_FACTS // 2 else f"{show_bytes(size)} of plain values are too many"


def _choose_weights(
    model: nn.Module, which: str, verdict: Verdict, content: Content, max_bytes: int, left_out: dict[str, str]
) -> dict[str, Any]:
    """Adds the weights that are asked for and fit, and returns what a reader must know about them."""
    room = max_bytes - content.num_bytes
    name, needed, ties = _find_needed(model, verdict)
    size = 0 if needed is None else count_bytes([needed])
    why = None if needed is None else why_not(needed)
    if needed is not None and why is None and size > min(room, MAX_NEEDED):
        why = f"{show_bytes(size)} do not fit into {show_bytes(min(room, MAX_NEEDED))}"
    aliases: dict[str, str] = {}
    tensors, reasons = _name_weights(model, which, aliases)
    total = count_bytes(tensors.values())
    if total > room:
        left_out["weights"] = f"{show_bytes(total)} do not fit into {show_bytes(room)}"
        tensors, which, reasons = {}, "none", {}
        aliases.clear()
    left_out |= reasons
    if tensors:
        content.files["weights.safetensors"] = tensors
    held = name in tensors or name in aliases
    if needed is not None and not held and why is None:
        content.files["needed.safetensors"] = {name: needed}
        aliases |= {tie: name for tie in ties if tie not in tensors}
    elif needed is not None and not held and why is not None:
        left_out[name] = why
    return {"are": which if tensors else "none", "needed": "needed.safetensors" in content.files, "aliases": aliases}


def _find_needed(model: nn.Module, verdict: Verdict) -> tuple[str, Tensor | None, list[str]]:
    """Returns the parameter or buffer that the verdict names, and by which other names the model knows it."""
    wanted = (
        None if verdict.origin is None or verdict.origin.parameter is None else plain_name(verdict.origin.parameter)
    )
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    needed = next((tensor for name, tensor in named if plain_name(name) == wanted), None)
    ties = [plain_name(name) for name, tensor in named if tensor is needed and plain_name(name) != wanted]
    return wanted or "", needed, ties


def _name_weights(model: nn.Module, which: str, aliases: dict[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the weights that can be saved, each once (other names go to `aliases`), and why the others cannot."""
    if which == "none":
        return {}, {}
    named: Any = model.state_dict().items()
    if which == "trainable":
        named = ((name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)
    tensors: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    first: dict[Any, str] = {}
    for long_name, value in named:
        name = plain_name(long_name)
        reason = why_not(value) if isinstance(value, Tensor) else f"a {type(value).__name__} is not a tensor"
        if reason is not None:
            reasons[name] = reason
            continue
        part = local_of(value)
        key = (part.device, part.data_ptr(), part.dtype, part.shape, part.stride())
        if first.setdefault(key, name) == name:
            tensors[name] = value
        else:
            aliases[name] = first[key]
    return tensors, reasons


def redact(value: Any, key: str = "") -> Any:
    """Returns nested facts with every value replaced whose key says that it is text."""
    if key in TEXT_KEYS and value is not None:
        return REDACTED
    if isinstance(value, dict):
        return {name: redact(item, str(name)) for name, item in value.items()}
    return [redact(item) for item in value] if isinstance(value, (list, tuple)) else value


def _shorten(left_out: dict[str, str]) -> dict[str, str]:
    shown = dict(list(left_out.items())[:MAX_NOTES])
    return shown if len(shown) == len(left_out) else {**shown, "...": f"and {len(left_out) - len(shown)} more"}


def show_bytes(size: int) -> str:
    """Returns a number of bytes for a person."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{max(size, 0)} bytes"


def measure_depth(value: Any) -> int:
    """Returns how deep JSON values are nested, without recursion."""
    depth, level = 0, [value]
    while level and depth <= MAX_LEVELS:
        depth += 1
        parts = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for part in parts for item in part]
    return depth
