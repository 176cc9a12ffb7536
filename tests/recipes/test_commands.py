"""Every command line of the README and of the pages in docs/, run as it is written by a shell."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

from hf_nanguard.examples.tasks.sums import build_model, build_tokenizer

from .markdown import ROOT, find_snippets

README = ROOT / "README.md"

TRAIN = """
import sys

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

if "--help" in sys.argv:
    sys.exit("what this script takes is its own affair")
rows = [{"input_ids": [i % 7, 3, 4], "labels": [i % 7, 3, 4]} for i in range(336)]
rows[20]["labels"] = [-100, -100, -100]
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
torch.manual_seed(0)
arguments = ["--output_dir", "runs/mine", "--per_device_train_batch_size", "8", "--disable_tqdm", "true", "--save_steps", "40"]
arguments += ["--train_sampling_strategy", "sequential", "--use_cpu", "true", "--report_to", "none", *sys.argv[1:]]
[args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)


def mean_of_rows(outputs, labels, num_items_in_batch=None):
    mask = (labels[:, 1:] != -100).float()
    logps = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    return -((logps * mask).sum(1) / mask.sum(1)).mean()


Trainer(LlamaForCausalLM(config), args, train_dataset=rows, compute_loss_func=mean_of_rows).train()
"""
LATE = """
import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from my_package.model import CONFIG

rows = [{"inputs_embeds": torch.full((3, 8), i / 344).tolist(), "labels": [i % 7, 3, 4]} for i in range(344)]
rows[339]["inputs_embeds"][1][0] = float("nan")
torch.manual_seed(0)
args = TrainingArguments(
    "runs/mine", per_device_train_batch_size=8, num_train_epochs=1, save_steps=40, logging_steps=10, train_sampling_strategy="sequential",
    use_cpu=True, report_to="none", disable_tqdm=True,
)
Trainer(LlamaForCausalLM(CONFIG), args, train_dataset=rows).train()
"""
TRAINER = """
from tests.trainers import build as build_trainer


def build():
    return build_trainer("plain", "out", guard=False)
"""
MY_YAML = """
model_name_or_path: my-model
dataset_name: my-data
output_dir: out
learning_rate: 1.0e-3
warmup_steps: 0.1
max_steps: 4
max_length: 32
"""
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)


def build(bundle):
    return LlamaForCausalLM(CONFIG)
"""


def find_commands() -> list[str]:
    """Returns the lines of all shell snippets, and the whole commands inside sentences and tables."""
    pages = [README, *sorted(README.parent.glob("docs/**/*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    lines = [line for text in texts for snippet in find_snippets(text, "sh") for line in snippet.splitlines()]
    inline = [code for text in texts for code in re.findall(r"`((?:nanguard|source) [^`\n]*)`", text)]
    whole = [code for code in inline if any(not word.startswith("-") for word in code.split()[2:])]
    return list(dict.fromkeys(re.sub(r"\s+#.*", "", line) for line in (*lines, *whole)))


INSTALLS = re.compile(r"(make|pip|python -m pip) ")  # what runs these tests, and what needs a network
COMMANDS = [command for command in find_commands() if not INSTALLS.match(command)]


def test_there_are_commands():
    told = {next(word for word in command.split() if "=" not in word) for command in COMMANDS}
    assert told == {"nanguard", "torchrun", "accelerate", "python", "source"}
    assert len(COMMANDS) >= 40


def test_what_installs_is_there():
    """A target of the Makefile, or an extra of the package."""
    extras = metadata("hf-nanguard").get_all("Provides-Extra")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = [command for command in find_commands() if INSTALLS.match(command)]
    assert len(installs) >= 4
    for command in installs:
        *_, last = command.split()
        if command.startswith("make "):
            assert re.search(rf"^{last}:", makefile, flags=re.MULTILINE), command
        else:
            extra = re.fullmatch(r"'?\.(?:\[(\w+)\])?'?", last)
            assert extra, command
            assert extra[1] in (None, *extras), command


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    added = {
        "PATH": path,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=300, cwd=folder, env={**os.environ, **added}
    )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """Everything that the commands name, as a user of the README has it."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("recipes", "configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "my_package" / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "guard.yaml").write_text("nanguard_on_spike: skip\n", encoding="utf-8")
    (folder / "my.yaml").write_text(MY_YAML, encoding="utf-8")
    (folder / "accelerate.yaml").symlink_to(ROOT / "configs" / "accelerate" / "single.yaml")
    (folder / "my_module.py").write_text(TRAINER, encoding="utf-8")
    (folder / "my-data").mkdir()
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(32)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "my-data" / "train.jsonl").write_text(lines, encoding="utf-8")
    build_model().save_pretrained(folder / "my-model")
    build_tokenizer().save_pretrained(folder / "my-model")
    (folder / "model.safetensors").symlink_to(folder / "my-model" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def examined_run(workplace) -> Path:
    """A run with an autopsy of step 42 beside the checkpoint of step 40."""
    (workplace / "late.py").write_text(LATE, encoding="utf-8")
    done = run("nanguard run --nanguard_bundle_weights all late.py", workplace)
    assert done.returncode == 0, done.stderr
    bundle = workplace / "runs" / "mine" / "nanguard" / "autopsy" / "step-42"
    shutil.copytree(bundle, workplace / "step-42")
    return (workplace / "runs" / "mine").rename(workplace / "runs" / "examined")


@pytest.fixture
def fresh(workplace) -> Path:
    """The workplace without the runs of other commands: a run in the same folder leaves out rows that they have quarantined."""
    shutil.rmtree(workplace / "runs" / "mine", ignore_errors=True)
    return workplace


@pytest.fixture
def bundle(fresh, examined_run) -> Path:
    """The examined run where the commands name it; its bundle."""
    shutil.copytree(examined_run, fresh / "runs" / "mine")
    return fresh / "runs" / "mine" / "nanguard" / "autopsy" / "step-42"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs_as_it_is_written(command, fresh, request):
    if "replay" in command or " runs/mine" in command:
        request.getfixturevalue("bundle")
    # TRL's own script refuses its default of bfloat16 where there is no accelerator
    done = run(f"{command} --use_cpu true" if " trl " in command else command, fresh)
    if command.endswith("train.py --help"):
        assert "its own affair" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    if "train.py" in command or "my_package.train" in command:
        assert "event" in done.stderr.splitlines()[-1]
        assert "[loss_nonfinite]" in done.stderr
    if "--json" in command:
        json.loads((fresh / "result.json").read_text() if "result.json" in command else done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_bundle_is_replayed_from_python(workplace, bundle):
    [snippet] = find_snippets((ROOT / "docs" / "autopsy.md").read_text(encoding="utf-8"), "python with-bundle")
    (workplace / "replay.py").write_text(snippet, encoding="utf-8")
    done = run("python replay.py", workplace)
    assert done.stdout.split()[-1] == "input_nonfinite", done.stderr
