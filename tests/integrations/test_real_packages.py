"""Other training frameworks, as they are on PyPI: a row that ruins a stock run is survived and named.

Each has its own environment in `.matrix/`, built on first use (gigabytes) and checked: installing this package changes no other, and
`pip check` is clean. `make matrix` and `make slow` run these tests. A row whose text has a "z" makes the loss 0/0, by a patch of the
model that every process of the run imports first.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_nanguard.examples.tasks.sums import build_model, build_tokenizer
from hf_nanguard.report.run_files import read_events

from ..version_matrix import FRAMEWORKS, ROOT, VersionSet

PLANTED = """
import functools

import torch
from transformers.models.llama import modeling_llama

forward = modeling_llama.LlamaForCausalLM.forward


@functools.wraps(forward)  # whose signature tells which columns are kept
def planted(self, *args, **kwargs):
    output = forward(self, *args, **kwargs)
    is_bad = (kwargs["input_ids"] == {token}).any(-1)
    if output.loss is None:  # computed from the logits, as for DPO
        output.logits = torch.where(is_bad[:, None, None], torch.zeros(()) / torch.zeros(()), output.logits)
    elif is_bad.any():
        output.loss = output.loss * (torch.zeros(()) / torch.zeros(()))
    return output


modeling_llama.LlamaForCausalLM.forward = planted
"""
BAD_ROW, NUM_ROWS = 20, 32
TEXTS = [f"{row % 9}+{row % 5}=" for row in range(NUM_ROWS)]
TEXTS[BAD_ROW] = "z" + TEXTS[BAD_ROW]
AXOLOTL = """
base_model: model
datasets: [{path: rows.jsonl, ds_type: json, type: completion, field: text}]
dataset_prepared_path: prepared
dataset_num_proc: 1
val_set_size: 0
output_dir: out
sequence_len: 64
micro_batch_size: 4
gradient_accumulation_steps: 1
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: constant
learning_rate: 0.001
bf16: false
fp16: false
tf32: false
attn_implementation: sdpa
logging_steps: 1
save_strategy: "no"
seed: 42
special_tokens: {pad_token: "<pad>"}
"""
LLAMAFACTORY = """
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset: sums
dataset_dir: .
template: default
cutoff_len: 64
output_dir: out
per_device_train_batch_size: 4
learning_rate: 1.0e-3
num_train_epochs: 1
logging_steps: 1
save_strategy: "no"
report_to: none
use_cpu: true
"""
SWIFT = (
    "swift sft --model model --model_type llama --template dummy --dataset rows.jsonl --tuner_type full --output_dir out "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 1 --num_train_epochs 1 --learning_rate 1e-3 "
    "--save_steps 100 --torch_dtype float32 --split_dataset_ratio 0 --add_version false --report_to none "
    "--attn_impl sdpa --logging_steps 1"
)


DATASETS = {  # of LlamaFactory
    "sums": {"file_name": "rows.json"},
    "others": {"file_name": "others.json"},
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
    },
}


def change(config: str, **changes: str) -> str:
    """Returns a YAML file of one key a line with other values for some keys."""
    kept = [line for line in config.strip().splitlines() if line.partition(":")[0] not in changes]
    return "\n".join([*kept, *(f"{key}: {value}" for key, value in changes.items()), ""])


@dataclass(frozen=True)
class Integrator:
    """A framework: what is installed, the files of a run, and its commands."""

    versions: VersionSet
    stock: str
    guarded: str
    files: dict[str, str] = field(default_factory=dict)
    shuffles: bool = True  # whether rows have other numbers when they reach the trainer than in their file


INTEGRATORS = (
    Integrator(
        FRAMEWORKS[0],
        "python -m axolotl.cli.train stock.yaml",
        "python -m axolotl.cli.train guarded.yaml",
        {
            "stock.yaml": AXOLOTL,
            "guarded.yaml": f"{AXOLOTL}plugins: [hf_nanguard.integrations.axolotl.NanGuardPlugin]\n",
        },
    ),
    Integrator(
        FRAMEWORKS[1],
        "llamafactory-cli train run.yaml",
        "nanguard run llamafactory-cli train run.yaml",
        {
            "run.yaml": LLAMAFACTORY,
            "dataset_info.json": json.dumps(DATASETS),
            "torchaudio/__init__.py": "",  # it is imported and not used
        },
        shuffles=False,
    ),
    Integrator(
        FRAMEWORKS[2],
        SWIFT,
        f"{SWIFT} --external_plugins guard.py --callbacks nanguard",
        {"guard.py": "from hf_nanguard.integrations.ms_swift import register\n\nregister()\n"},
    ),
)


LORA = {"finetuning_type": "lora", "lora_rank": "4", "lora_target": "q_proj,v_proj"}
VARIANTS = {  # other tasks and datasets of the same frameworks: what is put in place of the files or the command, and the file named
    "axolotl-0.19.0-lora-two-datasets": (
        0,
        change(
            INTEGRATORS[0].files["guarded.yaml"],
            datasets="[{path: folder, ds_type: json, type: completion, field: text}, "
            "{path: rows.jsonl, ds_type: json, type: completion, field: text}]",
            adapter="lora", lora_r="4", lora_alpha="8", lora_target_modules="[q_proj, v_proj]",
        ),
        "rows.jsonl",
    ),
    "llamafactory-0.9.5-lora-two-datasets": (1, change(LLAMAFACTORY, dataset="others,sums", **LORA), "rows.json"),
    "llamafactory-0.9.5-dpo": (1, change(LLAMAFACTORY, stage="dpo", dataset="pairs"), "pairs.json"),
    "llamafactory-0.9.5-packed": (1, change(LLAMAFACTORY, packing="true"), "packed from rows.json"),
    "axolotl-0.19.0-packed": (0, change(INTEGRATORS[0].files["guarded.yaml"], sample_packing="true", micro_batch_size="1"), "rows.jsonl"),
    "ms-swift-4.6.0-lora-two-datasets": (
        2,
        INTEGRATORS[2].guarded.replace("rows.jsonl", "others.jsonl rows.jsonl#32").replace(
            "--tuner_type full", "--tuner_type lora --target_modules q_proj v_proj --lora_rank 4"
        ),
        "rows.jsonl",
    ),
    "ms-swift-4.6.0-dpo": (
        2,
        INTEGRATORS[2].guarded.replace("swift sft", "swift rlhf --rlhf_type dpo").replace("rows.jsonl", "pairs.jsonl"),
        "pairs.jsonl",
    ),
}  # fmt: skip


def write_run(folder: Path, integrator: Integrator) -> None:
    """Writes model, rows and the files of a run."""
    tokenizer = build_tokenizer()
    build_model().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    [token] = tokenizer("z", add_special_tokens=False)["input_ids"]
    rows = [
        {"text": text + "7", "instruction": text, "input": "", "output": "7",
         "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "7"}], "doc_id": f"doc-{number}"}
        for number, text in enumerate(TEXTS)
    ]  # fmt: skip
    others = json.loads(json.dumps(rows).replace("z", "").replace("doc-", "other-"))
    pairs = [{**row, "chosen": "7", "rejected": "8", "rejected_response": "8"} for row in rows]
    for name, written in {"rows": rows, "others": others, "pairs": pairs, "folder/others": others}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(written))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (folder / "folder" / "others.json").unlink()
    for name, text in {"sitecustomize.py": PLANTED.format(token=token), **integrator.files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def run(command: str, interpreter: Path, folder: Path) -> subprocess.CompletedProcess:
    added = {
        "PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": f"{folder}", "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, **added}, capture_output=True, text=True, timeout=1700
    )


def find_weights(folder: Path) -> Path:
    return max((folder / "out").rglob("model.safetensors"))


def find_bad_weights(folder: Path) -> list[str]:
    return [name for name, tensor in load_file(find_weights(folder)).items() if not tensor.isfinite().all()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("integrator", INTEGRATORS, ids=lambda each: each.versions.name)
def test_the_planted_row_is_survived_and_named(integrator, tmp_path):
    interpreter = integrator.versions.install()
    for way in ("stock", "guarded"):
        folder = tmp_path / way
        folder.mkdir()
        write_run(folder, integrator)
        done = run(getattr(integrator, way), interpreter, folder)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if "swift" not in integrator.versions.name:  # it drops NaN gradients itself, without a word
        assert find_bad_weights(tmp_path / "stock")
    assert not find_bad_weights(tmp_path / "guarded")
    [row] = find_culprit(tmp_path / "guarded", "rows.json")["rows"]
    assert (row == BAD_ROW) == (not integrator.shuffles)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("integrator", INTEGRATORS, ids=lambda each: each.versions.name)
def test_a_healthy_run_is_identical(integrator, tmp_path):
    weights = {}
    for way in ("stock", "guarded"):
        folder = tmp_path / way
        folder.mkdir()
        write_run(folder, integrator)
        (folder / "sitecustomize.py").write_text("")  # nothing is planted
        done = run(getattr(integrator, way), integrator.versions.install(), folder)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (folder / "printed.txt").write_text(done.stdout + done.stderr)
        weights[way] = load_file(find_weights(folder))
    assert weights["stock"].keys() == weights["guarded"].keys()
    assert all(torch.equal(tensor, weights["guarded"][name]) for name, tensor in weights["stock"].items())
    start = load_file(tmp_path / "stock" / "model" / "model.safetensors")
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights["stock"].items())
    assert list((tmp_path / "guarded" / "out").rglob("events.jsonl")) == []
    logged = [(tmp_path / way / "printed.txt").read_text().count("nanguard/") for way in ("stock", "guarded")]
    assert logged[0] == 0 < logged[1]  # it was guarded


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_planted_row_of_other_tasks_is_named(variant, tmp_path):
    number, given, file = VARIANTS[variant]
    integrator = INTEGRATORS[number]
    is_command = given.startswith("swift")
    files = {} if is_command else {"guarded.yaml": given, "run.yaml": given}
    write_run(tmp_path, replace(integrator, files={**integrator.files, **files}))
    done = run(given if is_command else integrator.guarded, integrator.versions.install(), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    find_culprit(tmp_path, file)


def find_culprit(folder: Path, file: str) -> dict:
    """Returns the culprit of the one event, after checking that the bad row is named by file, row, id and text."""
    [guards] = (folder / "out").rglob("events.jsonl")
    [event] = read_events(guards)
    assert (event["signal"], event["cause"]) == ("loss_nonfinite", "div_by_zero")
    [sample] = event["culprit"]["samples"]
    text = event["values"]["autopsy"]["texts"][f"{sample}"]
    # none of the frameworks keeps id columns or, if it shuffles, row numbers
    assert f"({file}" in text
    assert re.search(rf" row {BAD_ROW}, doc_id: doc-{BAD_ROW}[;)]", text)
    assert TEXTS[BAD_ROW] in text
    assert f"{ROOT}" not in json.dumps(event["culprit"])
    return event["culprit"]
