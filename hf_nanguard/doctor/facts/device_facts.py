"""Facts about the device that will train: its kind, its memory, and whether it has bfloat16."""

import logging
import os

import torch

from ..rules.run_facts import Facts

logger = logging.getLogger("hf_nanguard")


def find_accelerator_facts() -> Facts:
    """Returns what is known about the accelerator of this machine; nothing if it has none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Facts() if device is None else find_device_facts(device.type)


def find_device_facts(kind: str) -> Facts:
    """Returns what is known about a kind of device (`cpu`, `cuda`)."""
    return Facts.of(device_type=kind, bf16_support=find_bf16_support(kind), device_memory=find_memory(kind))


def choose_precision(use_cpu: bool) -> dict[str, bool]:
    """Returns the arguments `bf16` and `fp16` for the device that will train, and logs why."""
    support = None if use_cpu or not torch.accelerator.is_available() else find_accelerator_facts().bf16_support
    if support is None:
        chosen, why = "float32", "there is no accelerator whose precision is known"
    elif support == "native":
        chosen, why = "bf16", "this device computes in bfloat16, which has the range of float32"
    else:
        chosen, why = (
            "fp16",
            f"bfloat16 is {support} on this device; a loss scaler keeps gradients in the range of float16",
        )
    logger.info("hf_nanguard: nanguard_precision='auto' chose %s because %s.", chosen, why)
    return {"bf16": chosen == "bf16", "fp16": chosen == "fp16"}


def find_bf16_support(kind: str) -> str | None:
    """Returns `native`, `emulated` or `absent`; `None` if it is not known. A CPU computes in bfloat16, if slowly."""
    if kind == "cpu":
        return "native"
    if kind != "cuda":
        return None
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "native"
    return "emulated" if torch.cuda.is_bf16_supported() else "absent"


def find_memory(kind: str) -> int | None:
    """Returns the memory of the device in bytes, all of it."""
    if kind == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if kind == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
