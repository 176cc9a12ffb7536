"""Presets and launcher configs: each is loaded and run, with the values they are known for, and flags win over them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from hf_nanguard import ArgumentError
from hf_nanguard.cli.main import main
from hf_nanguard.cli.shared.recipe_command import PRESETS
from hf_nanguard.examples.recipe import recipe_parser as dialect
from hf_nanguard.examples.recipe.presets import find_configs, list_presets, read_preset
from hf_nanguard.examples.tasks.sums import build_model
from recipes import grpo, sft

from ...distributed.launch import find_free_port
from ...recipes.running import find_exit_code

ROOT = Path(__file__).parents[3]
CONFIGS = find_configs()
FILES = sorted(CONFIGS.rglob("*.yaml"))
KINDS = {"sft": ["sft"], "lora": ["sft", "--use_peft"], "grpo": ["grpo"]}
SCRIPTS = {  # presets of recipes that are no commands, and what makes their runs short
    "distill": ["--teacher_steps", "2", "--num_rows", "16"], "latent": ["--num_rows", "32"], "diffusion": ["--num_rows", "40"],
}  # fmt: skip
SHORT = ["--max_steps", "2", "--disable_tqdm", "true"]


def name_of(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def test_no_file_is_forgotten():
    kinds = {path.parent.name for path in FILES}
    assert kinds == {*KINDS, *SCRIPTS, "accelerate"}
    for kind in kinds - {"accelerate"}:
        assert list_presets(kind) == sorted(PRESETS)
    assert {path.stem for path in FILES if path.parent.name == "accelerate"} == {"single", "ddp", "fsdp2"}


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        ("sft", "balanced", {"max_grad_norm": 1.0, "warmup_steps": 50, "bf16": True, "fp16": False}),
        ("sft", "ultra_conservative", {"learning_rate": 1e-5, "max_grad_norm": 0.5, "bf16": True, "fp16": False}),
        ("lora", "balanced", {"learning_rate": 2e-4, "max_grad_norm": 1.0, "warmup_steps": 50, "bf16": True}),
        ("lora", "ultra_conservative", {"learning_rate": 1e-4, "max_grad_norm": 0.5, "bf16": True}),
        ("grpo", "balanced", {"learning_rate": 1e-5, "max_grad_norm": 1.0, "warmup_steps": 10, "bf16": True,
                              "temperature": 1.0, "nanguard_min_temperature": 0.1}),
        ("grpo", "ultra_conservative", {"learning_rate": 5e-6, "max_grad_norm": 0.5, "nanguard_logits_clip_value": 20.0}),
        ("distill", "balanced", {"student_lr": 1e-5, "temperature": 2.0, "alpha_kd": 0.1, "alpha_ce": 0.9,
                                 "max_grad_norm": 0.5, "nanguard_skip_grad_norm": 2.0}),
        ("distill", "ultra_conservative", {"student_lr": 5e-6, "router_lr": 1e-5, "temperature": 1.5, "alpha_kd": 0.05,
                                           "alpha_ce": 0.95, "max_grad_norm": 0.5, "nanguard_skip_grad_norm": 2.0}),
        ("latent", "balanced", {"learning_rate": 5e-5, "max_grad_norm": 0.5, "warmup_steps": 2000, "lr_scheduler_type": "cosine",
                                "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "text_loss_weight": 1.0,
                                "latent_loss_weight": 0.1, "bf16": True}),
        ("latent", "ultra_conservative", {"learning_rate": 3e-5, "max_grad_norm": 0.3, "gradient_accumulation_steps": 4}),
        ("diffusion", "balanced", {"learning_rate": 1e-5, "lr_scheduler_kwargs": {"min_lr": 1e-6}, "max_grad_norm": 0.5,
                                   "max_weight": 100.0, "bf16": True, "fp16": False}),
        ("diffusion", "ultra_conservative", {"learning_rate": 5e-6, "max_grad_norm": 0.25, "bf16": True}),
    ],
)  # fmt: skip
def test_values_of_the_field_reports(kind, name, values):
    preset = read_preset(kind, name)
    assert {key: preset.get(key) for key in values} == values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs(kind, name, tmp_path, capsys):
    assert main([*KINDS[kind], "--preset", name, "--output_dir", str(tmp_path), *SHORT]) == 0
    told = capsys.readouterr().out
    recipe = grpo if kind == "grpo" else sft
    assert f"keeps its learning_rate of {recipe.EMBEDDED['learning_rate']};" in told
    assert re.search(r"^  events +none$", told, flags=re.MULTILINE)
    assert (tmp_path / ("adapter_model.safetensors" if kind == "lora" else "model.safetensors")).is_file()


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_a_script_runs(kind, name, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location(kind, ROOT / "recipes" / f"{kind}.py")
    recipe = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, kind, recipe)  # its dataclasses look their module up
    spec.loader.exec_module(recipe)
    words = ["--preset", name, "--output_dir", str(tmp_path), "--plant", "none", "--compare", "false"]
    assert find_exit_code(recipe, *words, *SCRIPTS[kind], *SHORT) == 0


def parse_sft(*words: str, config: dict | None = None, folder: Path):
    if config is not None:
        (folder / "mine.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        words = ("--config", str(folder / "mine.yaml"), *words)
    return parse(sft, "--output_dir", str(folder), *words)


def parse(recipe, *words: str) -> SimpleNamespace:
    """Returns what the parser of a recipe made of its words, and its notes."""
    parser = recipe.make_parser()
    _, script, training, model, mixture = parser.parse(words)
    return SimpleNamespace(script=script, training=training, model=model, mixture=mixture, notes=parser.notes)


MODEL = ("--model_name_or_path", "some-model")


def test_what_wins(tmp_path):
    """A flag over the file, the file over the preset, the preset over TRL's default."""
    preset = ("--preset", "ultra_conservative")
    config = {"max_grad_norm": 0.25, "warmup_steps": 7}
    args = parse_sft(*MODEL, *preset, "--warmup_steps", "3", config=config, folder=tmp_path).training
    assert (args.warmup_steps, args.max_grad_norm, args.learning_rate) == (3, 0.25, 1e-5)
    plain = parse_sft(*MODEL, folder=tmp_path).training
    assert (
        plain.learning_rate
        == sft.GuardedSFTConfig(output_dir=str(tmp_path), use_cpu=True).learning_rate
        != args.learning_rate
    )


def test_a_preset_may_be_named_in_the_file(tmp_path):
    args = parse_sft(*MODEL, config={"preset": "ultra_conservative", "warmup_steps": 7}, folder=tmp_path).training
    assert (args.learning_rate, args.warmup_steps) == (1e-5, 7)


@pytest.mark.parametrize("spelling", ["--learning_rate=0.25", "--learning-rate=0.25"])
def test_the_embedded_model_keeps_its_learning_rate_unless_told(spelling, tmp_path):
    kept = parse_sft("--preset", "balanced", folder=tmp_path)
    assert kept.training.learning_rate == sft.EMBEDDED["learning_rate"]
    assert len(kept.notes) == 1
    told = parse_sft("--preset", "balanced", spelling, folder=tmp_path)
    assert (told.training.learning_rate, told.notes) == (0.25, [])
    written = parse_sft("--preset", "balanced", config={"learning_rate": 0.5}, folder=tmp_path)
    assert (written.training.learning_rate, written.notes) == (0.5, [])


def test_a_device_without_bfloat16(tmp_path, monkeypatch):
    """Stands in for hardware that is not here."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(dialect, "is_torch_bf16_gpu_available", lambda: False)
    parsed = parse_sft(*MODEL, "--preset", "balanced", "--use_cpu", "false", folder=tmp_path)
    assert (parsed.training.bf16, parsed.training.fp16) == (False, True)
    assert ["float16" in note for note in parsed.notes] == [False, True]


def test_a_model_without_data_is_trained_on_the_built_in_task_and_the_recipe_says_so(tmp_path):
    [note] = parse_sft(*MODEL, folder=tmp_path).notes
    assert note.startswith("no dataset is given")
    assert parse_sft(*MODEL, "--dataset_name", "mine", folder=tmp_path).notes == []


@pytest.mark.parametrize("words", [["--fp16", "true"], ["--bf16=false"]])
def test_a_precision_that_is_given_rules_out_the_preset_s(words, tmp_path):
    args = parse_sft(*MODEL, "--preset", "balanced", *words, folder=tmp_path).training
    assert (args.bf16, args.fp16) == (False, words[0] == "--fp16")


def test_adapters_have_presets_of_their_own(tmp_path):
    parsed = parse_sft(*MODEL, "--use_peft", "--preset", "balanced", folder=tmp_path)
    assert (parsed.training.learning_rate, parsed.model.use_peft) == (2e-4, True)
    parsed = parse(grpo, "--output_dir", str(tmp_path), *MODEL, "--use_peft", "--preset", "balanced")
    assert (parsed.training.learning_rate, parsed.model.use_peft) == (1e-5, True)


def test_an_unknown_preset():
    with pytest.raises(ArgumentError, match=r"--preset must be one of balanced, ultra_conservative, got 'bold'"):
        read_preset("sft", "bold")


# ---- launchers ----

NAMES = {"fsdp_offload_params": "cpu_offload", "fsdp_version": "fsdp_version"}  # where plugin and file differ


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "accelerate"], ids=name_of)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    kind = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}[path.stem]
    assert (str(config.distributed_type.value), config.num_processes) == (kind, 1 if kind == "NO" else 2)
    assert config.mixed_precision == "no"
    if kind == "FSDP":
        from accelerate import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            **{NAMES.get(name, name.removeprefix("fsdp_")): value for name, value in config.fsdp_config.items()}
        )  # fmt: skip
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is True


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="meant for processes on a CPU")
def test_accelerate_launches_it(name, num_ranks, tmp_path):
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "accelerate" / f"{name}.yaml"),
        "--main_process_port", str(find_free_port()), str(ROOT / "recipes" / "sft.py"), "--config",
        str(CONFIGS / "sft" / "balanced.yaml"), "--output_dir", str(tmp_path / "run"), *SHORT,
    ]  # fmt: skip
    startup = "from tests.distributed.sharding import shard_on_cpu\n\nshard_on_cpu()\n" if name == "fsdp2" else ""
    (tmp_path / "sitecustomize.py").write_text(startup, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the model is sharded" if name == "fsdp2" else "answer rate") == 1
    assert re.search(r"^  events +none$", done.stdout, flags=re.MULTILINE)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert {name: list(each.shape) for name, each in saved.items()} == {
        name: list(each.shape) for name, each in build_model().state_dict().items()
    }
    state = torch.load(tmp_path / "run" / "training_args.bin", weights_only=False)
    assert state.world_size == num_ranks
