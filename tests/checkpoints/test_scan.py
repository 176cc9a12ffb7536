"""A planted fault in a file is found, and no other; damaged and hostile files are findings; healthy files are silent."""

import json
import math
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from hf_nanguard import ArgumentError, scan_checkpoint
from hf_nanguard.checkpoints.scan_result import Problem
from hf_nanguard.checkpoints.tensor_check import HUGE
from hf_nanguard.checkpoints.tensor_extents import PART, ROW, build_pool, find_extents

INF, NAN = float("inf"), float("nan")


def healthy() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(8, 4),
        "lm_head.weight": torch.randn(8, 4),
        "norm.bias": torch.zeros(4),
    }


def save_shards(content: dict, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        dcp.save(content, checkpoint_id=str(folder), no_dist=True)


def problems(path: Path, **options) -> list[tuple[str, str | None]]:
    return [(str(finding.problem), finding.tensor) for finding in scan_checkpoint(path, **options).findings]


def planted(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, 32).reshape(8, 4)
    weight[5, 2] = value
    return weight.to(dtype)


FAULTS = {
    "nan": (planted(NAN), {}, "nan"),
    "nan in bfloat16": (planted(NAN, torch.bfloat16), {}, "nan"),
    "nan in float8": (planted(NAN, torch.float8_e4m3fn), {}, "nan"),
    "nan in float64": (planted(NAN, torch.float64), {}, "nan"),
    "inf": (planted(INF), {}, "inf"),
    "-inf": (torch.randn(8, 4).index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(-INF)), {}, "inf"),
    "huge": (planted(-1e20), {}, "huge"),
    "near the limit of float16": (planted(60000, torch.float16), {}, "near_limit"),
    "near the limit of float32": (planted(3e38), {}, "near_limit"),
    "all zero": (torch.zeros(8, 4), {}, "all_zero"),
    "overflow": (planted(1e5), {"as_dtype": "float16"}, "overflow"),
    "underflow": (torch.full((8, 4), 1e-9), {"as_dtype": "float16"}, "underflow"),
    "denormal numbers": (torch.full((8, 4), 1e-40), {"deep": True}, "denormal"),
    "a row that was never written": (torch.ones(8, 4).index_fill_(0, torch.tensor(3), 1e6), {"deep": True}, "uninitialized_rows"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_and_no_other_is_found(name, suffix, tmp_path):
    weight, options, problem = FAULTS[name]
    tensors = {**healthy(), "mlp.weight": weight}
    path = tmp_path / f"model.{suffix}"
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    assert problems(path, **options) == [(problem, "mlp.weight")]
    result = scan_checkpoint(path, **options)
    assert result.exit_code == 1
    assert result.is_good == (problem not in ("nan", "inf"))


def test_rows_and_counts_are_named(tmp_path):
    save_file({"w": planted(NAN)}, tmp_path / "model.safetensors")
    [finding] = scan_checkpoint(tmp_path).findings
    assert str(finding) == "model.safetensors: w contains NaN in 1 of 32 entries (row 5)"


crf = torch.randn(5, 5)
crf[:, 0] = crf[1, :] = -INF
NORMAL = {
    "biases and norms of zero": {"norm.weight": torch.zeros(8), "q_proj.bias": torch.zeros(8), "embed.bias": torch.zeros(2, 3)},
    "LoRA begins at zero": {"layers.0.q_proj.lora_A.weight": torch.randn(2, 8), "layers.0.q_proj.lora_B.weight": torch.zeros(8, 2)},
    "an attention mask": {"attn.mask": torch.full((4, 4), -INF).triu(1), "causal": torch.full((4, 4), -3.4028234663852886e38).triu(1)},
    "a mask of -1e9": {"masked_bias": torch.tensor(-1e9), "bias_mask": torch.full((4, 4), -1e9).tril(-1)},
    "forbidden transitions of a CRF": {"crf.transitions": crf},
    "integers and quantized weights": {"q.weight": torch.full((4, 4), 255, dtype=torch.uint8), "ids": torch.arange(4), "flags": torch.ones(3, dtype=torch.bool)},
    "an empty tensor and a scalar": {"empty": torch.zeros(0, 4), "scale": torch.tensor(3.0)},
    "weights of float16": {"w": (0.02 * torch.randn(64, 64)).half()},
    "a padding row of zero": {"embed_tokens.weight": torch.randn(8, 4).index_fill_(0, torch.tensor(0), 0.0)},
    "float8 at its limit": {"w": torch.full((4, 4), 448.0).to(torch.float8_e4m3fn)},
}  # fmt: skip


@pytest.mark.parametrize("name", NORMAL)
def test_what_is_normal_is_no_finding(name, tmp_path):
    save_file(NORMAL[name], tmp_path / "model.safetensors")
    result = scan_checkpoint(tmp_path, deep=True)
    assert result.findings == []
    assert result.exit_code == 0


SPARSE = [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("make", SPARSE)
def test_sparse_tensors_are_checked(make, tmp_path):
    torch.save({"good": make(torch.eye(3)), "w": make(torch.eye(3).fill_diagonal_(NAN))}, tmp_path / "model.bin")
    assert problems(tmp_path, deep=True) == [("nan", "w")]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_float8_is_checked(dtype, suffix, tmp_path):
    tensors = {"good": torch.ones(4, 4).to(dtype), "w": planted(NAN).to(dtype)}
    path = tmp_path / f"model.{suffix}"
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    assert problems(path, deep=True, as_dtype="float16") == [("nan", "w")]


def test_an_inf_of_float8_is_found(tmp_path):
    save_file({"w": planted(INF).to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    assert problems(tmp_path) == [("inf", "w")]


def test_what_torch_can_only_store_is_a_note(tmp_path):
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"packed": packed, "w": torch.ones(2, 2)}, tmp_path / "model.bin")
    result = scan_checkpoint(tmp_path)
    assert result.findings == []
    assert "1 tensors have a dtype" in result.notes[0]
    assert "packed" in result.notes[0]


def test_a_file_of_one_tensor_has_no_name_for_it(tmp_path):
    torch.save(planted(NAN), tmp_path / "weight.pt")
    assert str(scan_checkpoint(tmp_path / "weight.pt").findings[0]).startswith("weight.pt contains NaN")


def test_optimizer_state_may_be_zero_and_large_but_not_nan(tmp_path):
    state = {"step": torch.tensor(7.0), "exp_avg": torch.zeros(4, 4), "exp_avg_sq": torch.full((4, 4), 1e12)}
    torch.save({"state": {0: state}, "param_groups": [{"lr": 0.1, "eps": 1e-8}]}, tmp_path / "optimizer.pt")
    assert problems(tmp_path) == []
    state["exp_avg"] = planted(NAN)
    torch.save({"state": {0: state}, "param_groups": [{"lr": NAN}]}, tmp_path / "optimizer.pt")
    assert problems(tmp_path) == [("nan", "state.0.exp_avg"), ("nan", "param_groups.0.lr")]


def test_a_scheduler_may_hold_an_inf(tmp_path):
    torch.save({"best": INF, "_last_lr": [0.1]}, tmp_path / "scheduler.pt")
    assert problems(tmp_path) == []


# ---- files that somebody has damaged ----


def header(entries: dict | str, data: bytes = b"", length: int | None = None) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DAMAGED = {
    "empty": b"",
    "one byte": b"x",
    "truncated header": header({"w": entry(0, 16, [4])})[:20],
    "truncated data": header({"w": entry(0, 16, [4])}, bytes(8)),
    "huge header": header("{}", length=2**62),
    "header of 90 MB that is not there": header("{}", length=90_000_000),
    "offsets out of range": header({"w": entry(0, 1600, [400])}, bytes(16)),
    "negative offsets": header({"w": entry(-16, 0, [4])}, bytes(16)),
    "overlapping offsets": header({"w": entry(0, 16, [4]), "v": entry(8, 24, [4])}, bytes(24)),
    "shape larger than data": header({"w": entry(0, 16, [2**40, 2**40])}, bytes(16)),
    "unknown dtype": header({"w": entry(0, 16, [4], "F99")}, bytes(16)),
    "duplicate keys": header('{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}', bytes(32)),
    "nested too deep": header('{"w":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "not JSON": header("{not json"),
    "a number": header("3"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_safetensors_file_is_reported(name, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[name])
    result = scan_checkpoint(tmp_path)
    assert [str(finding.problem) for finding in result.findings] == ["damaged"]
    assert result.exit_code == 2


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.system, exec, eval, os.mkdir])
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_hostile_pickle_is_reported_and_not_run(function, is_zip, tmp_path):
    target = tmp_path / "hacked"
    argument = {os.system: f"touch {target}", os.mkdir: str(target)}.get(function, f"open({str(target)!r}, 'w')")
    content = {"w": torch.ones(2, 2), "x": Attack(function, argument)}
    torch.save(content, tmp_path / "model.bin", _use_new_zipfile_serialization=is_zip)
    result = scan_checkpoint(tmp_path)
    assert not target.exists()
    assert [str(finding.problem) for finding in result.findings] in (["damaged"], ["foreign_objects"])
    assert function.__name__ in str(result.findings[0])


def test_a_plain_pickle_is_reported_and_not_run(tmp_path):
    target = tmp_path / "hacked"
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Attack(os.mkdir, str(target))))
    assert scan_checkpoint(tmp_path).exit_code == 2
    assert not target.exists()


def test_compressed_parts_are_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    [finding] = scan_checkpoint(tmp_path).findings
    assert (finding.problem, "compressed" in finding.message) == ("damaged", True)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_was_not_downloaded_is_called_so(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134515008\n")
    [finding] = scan_checkpoint(tmp_path).findings
    assert (finding.problem, "not downloaded" in finding.message) == ("damaged", True)


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_what_is_no_file_is_not_read(target, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model.safetensors").symlink_to(target)
    [finding] = scan_checkpoint(tmp_path / "model.safetensors").findings
    assert (finding.problem, "not a regular file" in finding.message) == ("damaged", True)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.95])
def test_a_truncated_torch_file_is_reported(keep, tmp_path):
    torch.save({"w": torch.ones(64, 64)}, tmp_path / "model.bin")
    content = (tmp_path / "model.bin").read_bytes()
    (tmp_path / "model.bin").write_bytes(content[: int(keep * len(content))])
    assert scan_checkpoint(tmp_path).exit_code == 2


def test_a_tensor_that_claims_to_be_huge_costs_nothing(tmp_path):
    torch.save({"w": torch.ones(1).expand(10**15), "v": torch.full((1,), NAN).expand(2**40)}, tmp_path / "model.pt")
    assert problems(tmp_path) == [("nan", "v")]


def test_names_cannot_manipulate_a_terminal(tmp_path):
    save_file({"\x1b[2Jweight": planted(NAN)}, tmp_path / "model.safetensors")
    assert "\x1b" not in str(scan_checkpoint(tmp_path).findings[0])


def test_the_old_format_of_torch_is_read(tmp_path):
    torch.save({"w": planted(NAN)}, tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    assert problems(tmp_path) == [("nan", "w")]


# ---- folders ----


def test_a_missing_shard_is_reported(tmp_path):
    save_file({"a": torch.ones(2, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    [finding] = scan_checkpoint(tmp_path).findings
    assert finding.problem == "incomplete"
    assert "model-00002-of-00002.safetensors" in finding.message
    save_file({"b": torch.ones(2, 2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert scan_checkpoint(tmp_path).exit_code == 0


@pytest.mark.parametrize("total", [1, 2])
def test_shards_without_an_index_are_reported(total, tmp_path):
    save_file({"a": torch.ones(2, 2)}, tmp_path / f"model-00001-of-{total:05}.safetensors")
    [finding] = scan_checkpoint(tmp_path).findings
    assert finding.problem == "incomplete"
    assert ("has only 1 of 2 shards" if total == 2 else "model.safetensors.index.json") in finding.message


def test_shards_that_count_from_zero_are_not_too_few(tmp_path):
    for number in range(3):
        save_file({f"w{number}": torch.ones(2, 2)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    [finding] = scan_checkpoint(tmp_path).findings
    assert "has no model.safetensors.index.json" in finding.message


def test_an_index_may_name_a_state_that_is_no_tensor(tmp_path):
    content = {"w": torch.randn(2, 2), "layer._extra_state": None}
    torch.save(content, tmp_path / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(content, "pytorch_model-00001-of-00001.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert scan_checkpoint(tmp_path).is_good


def test_an_index_that_names_a_tensor_of_no_shard_is_reported(tmp_path):
    for number, name in enumerate("ab", start=1):
        save_file({name: torch.ones(2, 2)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}  # b is in another one
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**shards, "c": "model-00002-of-00002.safetensors"}}))
    [finding] = scan_checkpoint(tmp_path).findings
    assert (finding.problem, finding.message) == ("incomplete", "names c, which no shard holds")
    index.write_text(json.dumps({"weight_map": shards}))
    assert scan_checkpoint(tmp_path).is_good


def test_the_shards_of_a_part_of_a_pipeline_are_checked_too(tmp_path):
    """Of a pipeline, or of a folder without weights of its own."""
    part, stem = tmp_path / "unet", "diffusion_pytorch_model"
    (tmp_path / "vae").mkdir()
    save_file({"c": torch.ones(2, 2)}, tmp_path / "vae" / f"{stem}.safetensors")
    part.mkdir()
    for number, name in enumerate("ab", start=1):
        save_file({name: torch.ones(2, 2)}, part / f"{stem}-0000{number}-of-00002.safetensors")
    shards = {name: f"{stem}-0000{number}-of-00002.safetensors" for number, name in enumerate("ab", start=1)}
    index = part / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert scan_checkpoint(tmp_path).is_good
    index.write_text(json.dumps({"weight_map": {**shards, "c": shards["a"]}}))  # which another part has
    assert [each.message for each in scan_checkpoint(tmp_path).findings] == ["names c, which no shard holds"]
    index.write_text(json.dumps({"weight_map": shards}))
    (part / shards["b"]).unlink()
    [finding] = scan_checkpoint(tmp_path).findings
    assert finding.message == f"has no {shards['b']}, which unet/{index.name} names"
    index.unlink()
    [finding] = scan_checkpoint(tmp_path).findings
    assert finding.message == f"has only 1 of 2 shards unet/{stem}-*.safetensors"


def spoil_index(folder):
    """Shards that an index names were not downloaded."""
    shard = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))


def spoil_shards(folder):
    """Shards without an index."""
    for number in (1, 2):
        save_file({"w": torch.ones(2)}, folder / f"model-0000{number}-of-00002.safetensors")


def spoil_names(folder):
    """A tensor that no shard holds."""
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"v": "model.safetensors"}}))


@pytest.mark.parametrize(("spoil", "num_notes"), [(spoil_index, 1), (spoil_shards, 1), (spoil_names, 0)])
def test_a_copy_in_a_sub_folder_does_not_make_a_complete_model_bad(spoil, num_notes, tmp_path):
    (tmp_path / "original").mkdir()
    spoil(tmp_path / "original")
    save_file(healthy(), tmp_path / "model.safetensors")
    result = scan_checkpoint(tmp_path)
    assert (result.is_good, result.exit_code, result.findings) == (True, 0, [])
    assert len([note for note in result.notes if "original/" in note]) == len(result.notes) == num_notes
    (tmp_path / "model_index.json").write_text("{}")
    assert not scan_checkpoint(tmp_path).is_good
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    assert not scan_checkpoint(tmp_path).is_good


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_path_that_is_not_utf8_is_read(value, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    save_file({"w": planted(value)}, tmp_path / "model.safetensors")
    os.rename(tmp_path / "model.safetensors", folder / "model.safetensors")
    torch.save({"w": planted(value)}, folder / "other.bin")
    found = problems(folder)
    assert found == ([("nan", "w")] * 2 if math.isnan(value) else [])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}', "[" * 100_000]
)
def test_a_bad_index_is_reported(text, tmp_path):
    save_file({"a": torch.ones(2, 2)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert [str(finding.problem) for finding in scan_checkpoint(tmp_path).findings] == ["incomplete"]


def test_a_tied_head_that_differs_is_reported(tmp_path):
    save_file(healthy(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert problems(tmp_path) == []
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    assert problems(tmp_path) == [("untied_head", "lm_head.weight")]
    same = {**healthy(), "lm_head.weight": healthy()["model.embed_tokens.weight"]}
    save_file(same, tmp_path / "model.safetensors")
    assert problems(tmp_path) == []


def test_shards_of_fsdp_are_checked(tmp_path):
    content = {"model": {"w": planted(NAN), "v": torch.ones(3)}, "steps": 3}
    folder = tmp_path / "pytorch_model_fsdp_0"
    save_shards(content, folder)
    assert problems(tmp_path) == [("nan", "model.w")]
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    assert scan_checkpoint(tmp_path).exit_code == 2


def test_an_index_of_fsdp_is_not_run(tmp_path):
    folder, target = tmp_path / "pytorch_model_fsdp_0", tmp_path / "hacked"
    save_shards({"w": torch.ones(3)}, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(os.mkdir, str(target))))
    assert scan_checkpoint(tmp_path).exit_code == 2
    assert not target.exists()


def test_deepspeed_objects_are_not_imported_and_their_tensors_are_checked(tmp_path, monkeypatch):
    import sys
    import types

    module = types.ModuleType("deepspeed.runtime")
    scaler = type("LossScaler", (), {"__module__": "deepspeed.runtime", "__qualname__": "LossScaler"})
    module.LossScaler = scaler  # type: ignore[attr-defined]
    folder = tmp_path / "global_step4"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
        patch.setitem(sys.modules, "deepspeed.runtime", module)
        holder = scaler()
        holder.fp32 = planted(NAN)
        torch.save({"optimizer_state_dict": holder}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        torch.save({"module": {"w": torch.ones(2, 2)}, "scaler": scaler()}, folder / "mp_rank_00_model_states.pt")
    assert problems(tmp_path) == [("nan", "optimizer_state_dict.state.fp32")]


def test_a_run_is_scanned_checkpoint_by_checkpoint(tmp_path):
    for step in (10, 20):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"w": planted(NAN if step == 20 else 1.0)}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text('{"global_step": 4}')
    assert [finding.file for finding in scan_checkpoint(tmp_path).findings] == ["checkpoint-20/model.safetensors"]


def test_bad_arguments(tmp_path):
    with pytest.raises(ArgumentError, match="No such file or folder"):
        scan_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match="float16"):
        scan_checkpoint(tmp_path, as_dtype="int4")
    assert scan_checkpoint(tmp_path).exit_code == 2  # nothing to scan


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("position", [0, PART - 1, PART, 2 * PART])
def test_every_part_of_a_large_tensor_counts(position, is_exact):
    large = torch.ones(2 * PART + 1, dtype=torch.bfloat16)
    large[position] = NAN
    with build_pool() as pool:
        found = find_extents({"w": large, "v": torch.ones(3)}, pool, lambda num_bytes: None, is_exact)
    assert all(map(math.isnan, found.pop("w")))
    assert found == ({"v": (1.0, 1.0)} if is_exact else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e11, -1e11, 3e38])
@pytest.mark.parametrize("size", [67, 2 * ROW + 67])
def test_no_position_hides_a_bad_entry(size, value, dtype):
    """The kernels treat whole vectors and the entries that are left over differently, and so does the check."""
    positions = [*range(67), *range(ROW - 2, ROW + 2), *range(2 * ROW - 2, 2 * ROW + 2), size - 1]
    with build_pool() as pool:
        for position in (each for each in positions if each < size):
            weight = torch.linspace(-1.0, 1.0, size).to(dtype)
            weight[position] = value
            assert "w" in find_extents({"w": weight}, pool, lambda num_bytes: None, is_exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absurd_entries_of_both_signs_do_not_hide_each_other(dtype):
    noise = torch.randn(3 * ROW, generator=torch.Generator().manual_seed(0)).to(dtype)
    two = torch.zeros(ROW, dtype=dtype)
    two[7], two[8] = torch.tensor([1.0, -1.01]) * 2 * HUGE
    with build_pool() as pool:
        found = find_extents(
            {"good": noise, "absurd": noise * 1e12, "two": two}, pool, lambda num_bytes: None, is_exact=False
        )
    assert set(found) == {"absurd", "two"}


def make_engine_checkpoint(folder, num_ranks=3):
    """A checkpoint as the Trainer and DeepSpeed (ZeRO 3) leave it."""
    inner = folder / "global_step4"
    inner.mkdir(parents=True)
    (folder / "latest").write_text("global_step4")
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    save = {"global_steps": 4, "weight": torch.randn(4)}
    for rank in range(num_ranks):
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
        for kind in ("model", "optim"):
            torch.save(save, inner / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    return folder


ENGINE_DAMAGE = {
    "no latest": (lambda folder: (folder / "latest").unlink(), "no file latest"),
    "another latest": (lambda folder: (folder / "latest").write_text("global_step3"), "no global_step3, which"),
    "a path in latest": (lambda folder: (folder / "latest").write_text("../global_step4"), "which the file latest names"),
    "no model states": (
        lambda folder: (
            save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors"),
            [path.unlink() for path in (folder / "global_step4").glob("*_model_states.pt")],
        ),
        "no model states in global_step4",
    ),
    "no shard": (lambda folder: next((folder / "global_step4").glob("*_rank_1_*optim*")).unlink(), "shards of rank 1"),
    "no last shard": (lambda folder: next((folder / "global_step4").glob("*_rank_2_*model*")).unlink(), "shards of rank 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINE_DAMAGE)
def test_a_deepspeed_checkpoint_that_was_not_saved_to_the_end_is_incomplete(name, tmp_path):
    damage, expected = ENGINE_DAMAGE[name]
    folder = make_engine_checkpoint(tmp_path / "checkpoint-4")
    assert scan_checkpoint(folder).is_good
    damage(folder)
    [finding] = scan_checkpoint(folder).findings
    assert finding.problem is Problem.INCOMPLETE
    assert expected in finding.message
