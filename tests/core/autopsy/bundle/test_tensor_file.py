"""Tensors come back from a file with every bit, and files that nobody vouches for are checked."""

import json
import struct

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hf_nanguard.core.autopsy.bundle.tensor_file import DTYPES, count_bytes, load_tensors, save_tensors, why_not


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


def write_raw(path, header, data=b"", pad=True):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if pad else (1 - len(text)) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype="F32", shape=(1,), size=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, size]}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path, dtype):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    save_tensors(tmp_path / "x.safetensors", {"x": tensor})
    [found] = load_tensors(tmp_path / "x.safetensors").values()
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert bits(found) == raw.tolist()


def test_layouts_and_shared_memory(tmp_path):
    base = torch.randn(6, 4)
    tensors = {
        "base": base,
        "transposed": base.t(),
        "row": base[2],
        "same": base.view(24),
        "expanded": torch.tensor([1.5, float("nan")]).expand(3, 2),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "empty_too": torch.empty(2, 0, dtype=torch.int32),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch._neg_view(torch.randn(3)),
        "trained": torch.randn(2, requires_grad=True),
    }
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    save_tensors(tmp_path / "x.safetensors", tensors)
    found = load_tensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in before.items():
        assert found[name].shape == tensor.shape
        assert found[name].dtype == tensor.dtype
        assert bits(found[name]) == bits(tensor.resolve_conj().resolve_neg())
    assert count_bytes([tensors["expanded"], tensors["empty"]]) == 24


@pytest.mark.parametrize("name", ["a/b", "..", "a..b", "ü", "%41", "a\\b", "__metadata__x", "a b\n", ""])
def test_names_of_any_kind_come_back(tmp_path, name):
    save_tensors(tmp_path / "x.safetensors", {name: torch.ones(1)})
    assert list(load_tensors(tmp_path / "x.safetensors")) == [name]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "dense"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2), None),
        (torch.nn.Parameter(torch.zeros(2)), None),
    ],
    ids=["meta", "sparse", "complex128", "plain", "parameter"],
)
def test_what_cannot_be_saved_is_known_before(tensor, reason):
    assert why_not(tensor) is None if reason is None else reason in why_not(tensor)


class FakeMesh:
    def __init__(self, size):
        self.num = size

    def size(self):
        return self.num


class FakeSharded(torch.Tensor):
    """What is asked of a DTensor, without the processes."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("placement", "size", "saved"), [(Shard(0), 2, False), (Replicate(), 2, True), (Shard(0), 1, True)]
)
def test_a_shard_is_saved_only_if_it_is_the_whole(tmp_path, placement, size, saved):
    tensor = torch.arange(3.0).as_subclass(FakeSharded)
    tensor.placements, tensor.device_mesh = (placement,), FakeMesh(size)
    assert (why_not(tensor) is None) == saved
    if saved:
        save_tensors(tmp_path / "x.safetensors", {"x": tensor})
        assert load_tensors(tmp_path / "x.safetensors")["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "damaged"),
        (b"[" * 5000, b"", "damaged"),
        ({"x": entry()}, b"ab", "damaged"),
        ({"x": entry()}, b"abcdefgh", "damaged"),
        ({"x": entry(shape=[2])}, b"abcd", "damaged"),
        ({"x": entry(shape=[2**32, 2**32])}, b"abcd", "damaged"),
        ({"x": entry(shape=[2**62, 0], size=0)}, b"", "shape"),
        ({"x": entry(shape=[1] * 100)}, b"abcd", "shape"),
        ({"x": entry("F4", [2], 1)}, b"a", "dtype"),
        ({"x": entry("BOOL", [2], 2)}, b"\x01\x07", "booleans"),
    ],
)
def test_hostile_files_are_refused(tmp_path, header, data, message):
    write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ValueError, match=message):
        load_tensors(tmp_path / "x.safetensors")


def test_the_raw_files_above_would_load_if_they_were_honest(tmp_path):
    write_raw(tmp_path / "x.safetensors", {"x": entry()}, struct.pack("<f", 1.5))
    assert load_tensors(tmp_path / "x.safetensors")["x"].tolist() == [1.5]


def test_a_huge_header_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 90 * 2**20) + b"{}")
    with pytest.raises(ValueError, match="header of more than"):
        load_tensors(path)


def test_data_at_an_odd_address_is_refused(tmp_path):
    write_raw(tmp_path / "x.safetensors", {"x": entry(shape=[2], size=8)}, struct.pack("<ff", 1.5, 2.5), pad=False)
    with pytest.raises(ValueError, match=r"address|damaged"):
        load_tensors(tmp_path / "x.safetensors")


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"x": torch.arange(4), "y": torch.ones(2)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"damaged|header"):
            load_tensors(path)


def test_a_disk_that_refuses_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"x\.safetensors could not be written"):
        save_tensors(tmp_path / "missing" / "x.safetensors", {"x": torch.ones(2)})
