"""`training_args.bin` is read without being loaded: every plain argument, and nothing of a hostile file."""

import io
import json
import os
import pickle
import zipfile

import pytest
import torch
import trl
from transformers import TrainingArguments

from hf_nanguard import ArgumentError, GuardedSFTConfig
from hf_nanguard.doctor.config_check import check_config
from hf_nanguard.doctor.facts.saved_arguments import MAX_BYTES, read_saved_arguments

from ...trainers import common_arguments


def save(args, folder):
    folder.mkdir(exist_ok=True)
    torch.save(args, folder / "training_args.bin")
    return folder


@pytest.mark.parametrize(
    "cls", [TrainingArguments, trl.SFTConfig, GuardedSFTConfig, trl.GRPOConfig], ids=lambda cls: cls.__name__
)
def test_every_plain_argument_is_read(cls, tmp_path):
    args = cls(
        **common_arguments(
            tmp_path / "run",
            per_device_train_batch_size=8,
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            optim="adamw_torch",
        )
    )
    name, values = read_saved_arguments(save(args, tmp_path))
    plain = {key: getattr(value, "value", value) for key, value in vars(args).items()}
    left_out = {key for key, value in plain.items() if key not in values or values[key] != value}
    assert name == cls.__name__
    assert left_out == {"accelerator_config", "distributed_state", "_setup_devices"}  # objects of accelerate and torch
    assert values["lr_scheduler_type"] == "constant_with_warmup"


def test_the_folder_of_a_run_is_judged_by_its_arguments(tmp_path):
    args = trl.GRPOConfig(
        **common_arguments(tmp_path, num_generations=2, per_device_train_batch_size=2, temperature=5.0)
    )
    save(args, tmp_path / "checkpoint-9")
    (tmp_path / "checkpoint-12-old").mkdir()
    report = check_config(str(tmp_path))
    assert (report.facts.task, report.facts.learning_rate, report.facts.num_generations) == ("grpo", 1e-2, 2)
    assert "temperature" in [found.rule for found in report.examination.problems]
    assert report.remarks == []


def test_the_folder_of_a_run_without_readable_arguments_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "training_args.bin").write_bytes(b"damaged")
    [remark] = check_config(str(tmp_path)).remarks
    assert "no training_args.bin that can be read" in remark


def test_an_adapter_is_judged_by_its_config(tmp_path):
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 0,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "org/model-1B",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    report = check_config(str(tmp_path))
    assert [found.rule for found in report.examination.problems] == ["adapter-scale"]


def test_a_folder_of_anything_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="must be the folder of a run"):
        check_config(str(tmp_path))


class Hostile:
    """Makes a file when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def pack(content: bytes, name: str = "archive/data.pkl") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def test_nothing_of_a_hostile_file_is_carried_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = TrainingArguments(**common_arguments(tmp_path))
    args.learning_rate, args.extra = Hostile(), [Hostile()]
    found = read_saved_arguments(save(args, tmp_path))
    assert found is not None
    assert "learning_rate" not in found[1]
    assert not (tmp_path / "made-by-a-pickle").exists()
    assert check_config(str(tmp_path)).facts.learning_rate is None


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", pickle.dumps({"learning_rate": 1}), pack(b""), pack(b"\x80\x02."), pack(b"\x80\x02}."), pack(b"\x80\x02h\x05."),
     pack(b"\x80\x02u."), pack(b"\x80\x02(R."), pack(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."), pack(b"I1\n."), pack(b"", "data.txt"),
     pack(pickle.dumps(Hostile())), pack(bytes(2 * MAX_BYTES)), bytes(2 * MAX_BYTES)],
    ids=range(15),
)  # fmt: skip
def test_a_file_that_is_none_of_torch_save_is_not_read(content, tmp_path):
    (tmp_path / "training_args.bin").write_bytes(content)
    assert read_saved_arguments(tmp_path) is None
