"""`nanguard doctor --env`: versions, devices, dtypes, and which parts of the guard are active with them."""

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console

from ... import __version__
from ...plain_text import printable
from ..facts.device_facts import find_bf16_support, find_memory

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "datasets",
    "deepspeed",
    "bitsandbytes",
    "vllm",
    "liger-kernel",
    "flash-attn",
)
# Variables by which launchers choose precision, sharding and devices.
VARIABLES = (
    "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU", "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ENABLE_MPS_FALLBACK",
)  # fmt: skip


@dataclass
class Environment:
    """What this machine and its packages allow."""

    versions: dict[str, str] = field(default_factory=dict)  # of packages that are installed
    devices: list[str] = field(default_factory=list)  # a line for each
    dtypes: dict[str, str] = field(default_factory=dict)  # what the device that trains can do in each
    variables: dict[str, str] = field(default_factory=dict)  # of the environment that change a run
    parts: dict[str, str] = field(default_factory=dict)  # of the guard, each with `active` or why it is not

    def as_dict(self) -> dict[str, object]:
        """Returns everything as JSON values."""
        return asdict(self)


def find_environment() -> Environment:
    """Looks at packages, devices and variables. Nothing is trained."""
    versions = {"hf_nanguard": __version__, "python": platform.python_version(), **dict(_find_versions())}
    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return Environment(versions, list(_find_devices(kind)), _find_dtypes(kind), variables, _find_parts(versions, kind))


def _find_versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _find_devices(kind: str) -> Iterator[str]:
    memory = find_memory("cpu")
    yield f"cpu: {platform.machine()}, {os.cpu_count()} cores" + (f", {memory / 2**30:.0f} GiB" if memory else "")
    for index in range(torch.accelerator.device_count() if kind != "cpu" else 0):
        if kind == "cuda":
            properties = torch.cuda.get_device_properties(index)
            yield f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        else:
            yield f"{kind}:{index}"


def _find_dtypes(kind: str) -> dict[str, str]:
    support = find_bf16_support(kind) or "not known"
    half = "with a loss scaler" if kind != "cpu" else "ignored by the Trainer: fp16=True trains in float32 on a CPU"
    return {"float32": "native", "bfloat16": support, "float16": half}


def _find_parts(versions: dict[str, str], kind: str) -> dict[str, str]:
    """Returns the parts of the guard whose activity depends on what is installed or set."""

    def needs(package: str) -> str:
        return "active" if package in versions else f"not active: {package} is not installed"

    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true")
    return {
        "guarded Trainer, attach, NanGuardCallback": needs("transformers"),
        "guarded SFT and GRPO trainers, recipes": needs("trl"),
        "adapters": needs("peft"),
        "sampling guard in transformers": needs("transformers"),
        "sampling guard in vLLM": needs("vllm"),
        "loss scaler of float16": "active" if kind != "cpu" else "not active: there is no accelerator",
        "containment of bad steps": "limited by DeepSpeed, see docs/limits.md" if uses_deepspeed else "active",
    }


def print_environment(console: Console, found: Environment) -> None:
    """Prints everything in lines that can be pasted into an issue."""
    sections = {
        "versions": found.versions, "devices": {line.split(":")[0]: line for line in found.devices}, "dtypes": found.dtypes,
        "variables": found.variables, "guard": found.parts,
    }  # fmt: skip
    for title, values in sections.items():
        console.print(f"{title}{'' if values else ': none'}", style="bold", highlight=False)
        for name, value in values.items():
            line = f"  {value}" if title == "devices" else f"  {name:<42} {value}"
            console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
