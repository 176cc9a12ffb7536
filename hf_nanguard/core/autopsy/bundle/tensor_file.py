"""Saves tensors of any kind to a safetensors file, exact to the bit, and loads them from a file that anybody may have
written."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ....safe_files import open_to_read
from ...finite import is_sharded, local
from ...torch_private import inner_tensors

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
MAX_HEADER = 16 * 2**20
MAX_DIMS = 64
MAX_EMPTY = 2**20  # largest dimension of an empty tensor, which the size of the file does not limit


def why_not(tensor: object) -> str | None:
    """Returns why a tensor cannot be saved, `None` if it can."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__} is not a tensor"
    if is_sharded(tensor):
        replicated = all(placement.is_replicate() for placement in tensor.placements)  # type: ignore[attr-defined]
        if not replicated and tensor.device_mesh.size() > 1:  # type: ignore[attr-defined]
            return "it is sharded over ranks"
        tensor = local(tensor)
    if inner_tensors(tensor):
        return f"a {type(tensor).__name__} is not a plain tensor"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "it is not dense"
    return None if tensor.dtype in DTYPES.values() else f"safetensors has no {tensor.dtype}"


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the size of tensors in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes tensors for which `why_not` returns `None`. Tensors that share memory are each written in full."""
    plain: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = local(tensor).detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        storage = value.untyped_storage().data_ptr()
        plain[name] = value.clone() if storage in storages else value
        storages.add(storage)
    try:
        save_file(plain, path)
    except SafetensorError as err:  # raised for a full disk
        raise OSError(f"{path.name} could not be written: {err}") from err


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Loads a file of tensors to the CPU; for a damaged or hostile one, a `ValueError` says why in a clause."""
    with open_to_read(path) as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER:
            raise ValueError(f"{path.name} has a header of more than {MAX_HEADER // 2**20} MiB")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                entry = file.get_slice(name)
                _check_entry(name, entry.get_shape(), entry.get_dtype(), path.name)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, RuntimeError) as err:
        raise ValueError(f"{path.name} is damaged or cut short ({err})") from err
    for name, tensor in found.items():
        if tensor.numel() and tensor.data_ptr() % tensor.element_size():
            raise ValueError(f"{path.name} contains {name[:80]!r} at a misaligned address")
        if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise ValueError(f"{path.name} contains {name[:80]!r} with booleans other than 0 and 1")
    return found


def _check_entry(name: str, shape: list[int], dtype: str, file_name: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{file_name} contains {name[:80]!r} with the unknown dtype {dtype}")
    if len(shape) > MAX_DIMS or (0 in shape and max(shape) > MAX_EMPTY):
        raise ValueError(f"{file_name} contains {name[:80]!r} with an impossible shape")
