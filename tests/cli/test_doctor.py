"""`nanguard doctor` as a user runs it: findings, a verdict, an exit code, nothing of theirs touched."""

import io
import json
import re

import pytest
import yaml
from rich.console import Console

from hf_nanguard.cli import doctor
from hf_nanguard.cli.main import main
from hf_nanguard.doctor.command.checkup import STAGES
from hf_nanguard.doctor.command.printed_report import print_grade
from hf_nanguard.hf.data.quarantine_file import read_quarantine
from hf_nanguard.verification.grade import Verification

from ..recipes.test_sft import save_model, save_rows

CHECKS = (
    "completion", "logits", "gradients", "gradient norms", "clipping", "success rate", "held-out loss", "memory peak", "events",
)  # fmt: skip


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The system's temporary folder and the current folder are below the test's own, where what stays can be seen."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def stays(temporary):
    assert list(temporary.iterdir()) == []
    return [path.relative_to(temporary.parent) for path in temporary.parent.glob("nanguard-doctor-*")]


def test_the_embedded_task(temporary, capsys):
    assert main(["doctor", "--steps", "6", "--use_cpu"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert re.search(r"^verdict: sound \(2 notes\)$", output, flags=re.MULTILINE)
    shown = [
        line
        for line in output.splitlines()
        if re.match(r"  .{16} (best|acceptable|failed|not measured|measured) ", line)
    ]
    assert tuple(line[2:18].strip() for line in shown) == CHECKS
    assert stays(temporary) == []


def test_json_of_grpo_and_nothing_else(tmp_path, temporary, capsys):
    words = [
        "--task",
        "grpo",
        "--steps=3",
        "--json",
        "--use_cpu",
        "--per_device_train_batch_size",
        "16",
        "--num_generations",
        "8",
        "--log_completions",
        "--skip",
        "laws",
    ]
    code = main(["doctor", *words, "--output_dir", str(tmp_path / "trial")])
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [stage["name"] for stage in result["stages"]] == [name for name in STAGES if name != "laws"]
    found = result["stages"][-1]["measurements"]
    assert (found["num_done"], found["num_steps"], found["measure"]) == (3, 3, "reward")
    assert found["verdict"] in ("best", "acceptable")
    assert found["output_dir"] == str(tmp_path / "trial")
    assert {check["name"] for check in found["checks"]} == {*CHECKS, "held-out reward"} - {"held-out loss"}


def test_a_configuration_that_fails(tmp_path, temporary, capsys):
    own = tmp_path / "own"
    own.mkdir()
    (own / "model.safetensors").write_text("precious")
    config = {"output_dir": str(own), "learning_rate": 5.0, "max_steps": 1000, "max_grad_norm": 0.3, "save_steps": 1,
              "nanguard_skip_grad_norm": 1e-9, "nanguard_max_bad_steps": 4, "use_cpu": True}  # fmt: skip
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["doctor", "--config", str(file), "--steps", "6", "--skip", "laws"]) == 1
    output = capsys.readouterr().out
    assert "learning_rate is 5, too high" in output
    assert re.search(
        r"error +In 3 measured steps, completion is failed.  \[completion\]\n +why: 3 of 6 steps, then NonFiniteError",
        output,
    )
    assert re.search(r"completion +failed", output)
    assert re.search(r"success rate +failed +0.0%", output)
    [folder] = stays(temporary)  # there are events to look at
    assert f"Events and autopsies: {folder / 'nanguard'}." in output
    assert [path.name for path in own.iterdir()] == ["model.safetensors"]
    assert (own / "model.safetensors").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "1"], ["--steps", "'1'", "2"]),
        (["--steps"], ["--steps"]),
        (["--memory_limit", "0"], ["--memory_limit", "'0'", "GB"]),
        (["--memory_limit", "2GB"], ["--memory_limit", "'2GB'"]),
        (["--task", "gpt"], ["--task", "'gpt'", "sft", "grpo"]),
        (["--task", "dpo"], ["dpo", "--trainer"]),
        (["--only", "rule"], ["--only", "'rule'", "rules"]),
        (["--skip", "rules,all"], ["--skip", "'all'", "precision"]),
        (["--only", "steps", "--skip", "steps"], ["--only", "--skip"]),
        (["--trainer", "my_module"], ["--trainer", "'my_module'", "my_module:build"]),
        (["--trainer", "no_such_module:build"], ["--trainer", "no_such_module", "ModuleNotFoundError"]),
        (["--trainer", "json:dumps"], ["--trainer", "json:dumps", "TypeError"]),
        (["--trainer", "os:getcwd"], ["--trainer", "os:getcwd", "must return a Trainer", "str"]),
        (["--json=yes"], ["--json"]),
        (["--learning_rated", "1"], ["--learning_rated", "--learning_rate"]),
        (["--config", "missing.yaml"], ["missing.yaml", "YAML"]),
        (["missing.yaml"], ["missing.yaml", "YAML"]),
        (["--compare"], ["--compare", "nanguard sft --compare"]),
        (["--preset", "bold"], ["--preset", "bold", "balanced"]),
        (["--dataset_name", "data"], ["--model_name_or_path", "data"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_arguments(words, told, temporary, capsys):
    assert main(["doctor", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert [part for part in told if part not in output.err] == []
    assert stays(temporary) == []


@pytest.mark.parametrize("error", [None, "ValueError: [/] is no tag [bold]"])
def test_a_terminal_gets_a_table(error):
    found = Verification(4, 4, error, num_seen=4, num_used=4)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    print_grade(console, found)
    output = console.file.getvalue()
    assert "\x1b[" in output
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert all(check.name in plain and check.text in plain for check in found.checks)


def test_a_stream(tmp_path, temporary, capsys):
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(8)] * 3
    model, data = save_model(tmp_path / "model"), save_rows(tmp_path / "data", rows)
    words = ["--model_name_or_path", model, "--dataset_name", data, "--dataset_streaming", "true", "--use_cpu"]
    main(["doctor", *words, "--steps", "2", "--json", "--skip", "laws"])
    found = json.loads(capsys.readouterr().out)["stages"][-1]["measurements"]
    assert (found["num_done"], found["error"]) == (2, None)
    assert found["after"] is not None, "rows of the stream were held out"


def test_what_was_found_sound_is_listed_once(tmp_path, capsys):
    """Rules judge the file, then the trainer that was built from it."""
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(8)]
    file = tmp_path / "my.yaml"
    paths = {"model_name_or_path": save_model(tmp_path / "model"), "dataset_name": save_rows(tmp_path / "data", rows)}
    file.write_text(yaml.safe_dump({**paths, "use_cpu": True, "max_grad_norm": 0}))
    main(["doctor", str(file), "--only", "rules,data", "--json"])
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["name"] for stage in stages] == ["rules", "rules", "data"]
    assert "clipping" in stages[0]["findings"]
    assert (stages[0]["sound"], "learning-rate" in stages[1]["sound"]) == ([], True)


def test_several_processes(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor"]) == 2
    assert "must run in one process, got WORLD_SIZE=2" in capsys.readouterr().err


def test_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["doctor", "--output_dir", str(tmp_path / "file")]) == 2
    assert f"--output_dir must be a writable folder, got {str(tmp_path / 'file')!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "own", "others"),
    [
        (["--steps", "5", "--lora_r", "8"], {"steps": 5}, ["--lora_r", "8"]),
        (["a.yaml", "b.yaml", "--bf16", "true", "--only", "rules"], {"files": ["a.yaml", "b.yaml"], "only": ("rules",)}, ["--bf16", "true"]),
        (["--lora_r=8", "--config", "a.yaml", "--json"], {"config": "a.yaml", "json": True}, ["--lora_r=8"]),
        (["--task=grpo", "--reward_funcs", "a", "b", "--beta", "-1"], {"task": "grpo"}, ["--reward_funcs", "a", "b", "--beta", "-1"]),
        (["--output-dir", "x", "--output_dir=y", "--step", "3"], {"output_dir": "y", "steps": 20}, ["--step", "3"]),
    ],
    ids=str,
)  # fmt: skip
def test_words_go_where_they_belong(words, own, others, monkeypatch):
    seen = []
    monkeypatch.setattr(doctor, "run", seen.append)
    main(["doctor", *words])
    [arguments] = seen
    assert {name: vars(arguments)[name] for name in own} == own
    assert arguments.words == others


THREE = {"learning_rate": "2e-3", "max_grad_norm": 0, "warmup_step": 10}  # each is a mistake


def test_three_mistakes_give_three_findings(tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text(
        yaml.safe_dump({"model_name_or_path": "Qwen/Qwen2.5-7B", "dataset_name": "trl-lib/Capybara", **THREE})
    )
    assert main(["doctor", str(file)]) == 1
    output = capsys.readouterr().out
    assert re.findall(r"^  (error|warning|note) .*\[(.*)\]$", output, flags=re.MULTILINE) == [
        ("error", "learning-rate"), ("error", "unknown-arguments"), ("warning", "clipping"),
    ]  # fmt: skip
    assert "did you mean warmup_steps?" in output
    assert "steps  0.0 s  could not run: " in output
    assert "verdict: unsound (2 errors, 1 warning)" in output


def test_rules_alone_build_nothing(tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text(
        yaml.safe_dump({"model_name_or_path": "no/such-model", "dataset_name": "no-data", "warmup_steps": 10})
    )
    assert main(["doctor", str(file), "--only", "rules", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["findings"]) == ("sound", [])
    assert {"clipping", "learning-rate", "unknown-arguments"} <= set(result["stages"][0]["sound"])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            {"base_model": "no/such-model", "learning_rate": 1e-5, "max_grad_norm": 1.0},
            "a trainer from a file of axolotl",
        ),
        ({"desirable_weight": 1.0, "max_grad_norm": 0.0}, "sft and grpo only, not of kto"),
    ],
)
def test_a_file_whose_trainer_cannot_be_built_is_judged_by_rules(content, told, tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(content))
    assert main(["doctor", str(file)]) == 0
    output = capsys.readouterr()
    [note] = [line for line in output.out.splitlines() if line.startswith("note: ")]
    assert told in note
    assert "--trainer MODULE:FUNCTION" in note
    assert "verdict: " in output.out
    assert main(["doctor", str(file), "--only", "steps"]) == 2
    assert told in capsys.readouterr().err


def test_a_flag_takes_precedence_over_the_file(tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({"model_name_or_path": "no/such-model", "max_grad_norm": 0}))
    assert main(["doctor", str(file), "--only", "rules"]) == 1
    assert main(["doctor", str(file), "--only", "rules", "--max_grad_norm", "1.0"]) == 0
    assert main(["doctor", str(file), "--only=rules", "--skip", "clipping"]) == 0


OWN = """
from pathlib import Path
from tests.trainers import build as build_trainer
def build():
    return build_trainer("dpo", Path("out"), guard=False, max_grad_norm=1000.0)
"""


def test_a_trainer_of_ones_own(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_module.py").write_text(OWN)
    assert main(["doctor", "--trainer", "my_module:build", "--only", "rules", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"clipping"} <= {found["rule"] for found in result["findings"]}  # a note: the model is not a pretrained one
    assert {source["name"]: source["verdict"] for source in result["precision"]}["model weights"] == "aligned"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise KeyError('no data')", "failed (KeyError: 'no data')"),
        ("raise SystemExit(3)", "it called sys.exit(3)"),
        ("return 5", "got int"),
    ],
)
def test_a_function_that_returns_no_trainer(body, told, tmp_path, capsys, monkeypatch):
    name = f"builder_{len(body)}"
    (tmp_path / f"{name}.py").write_text(f"def build():\n    {body}\n")
    assert main(["doctor", "--trainer", f"{name}:build", "--only", "rules"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--trainer {name}:build" in line
    assert told in line


def test_a_name_that_nothing_has_comes_with_the_one_that_was_meant(tmp_path, capsys):
    assert main(["doctor", "--skip", "clippng"]) == 2
    assert capsys.readouterr().err.endswith("got 'clippng'. Did you mean clipping?\n")


def test_rows_are_shown_with_what_is_learned(tmp_path, capsys):
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(8)]
    model, data = save_model(tmp_path / "model"), save_rows(tmp_path / "data", rows)
    words = [
        "--model_name_or_path",
        model,
        "--dataset_name",
        data,
        "--use_cpu",
        "--only",
        "data",
        "--show",
        "2",
        "--sample",
        "4",
    ]
    assert main(["doctor", *words]) == 0
    output = capsys.readouterr().out
    assert re.findall(r"^row (\d)\n  (.*)>>>(.*)<<<$", output, flags=re.MULTILINE) == [
        ("0", "0+1=", "1<eos>"),
        ("2", "2+1=", "3<eos>"),
    ]
    assert re.search(r"^data  \S+ s  sound, 4 of 8 rows checked$", output, flags=re.MULTILINE)


BAD_ROWS = """
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from tests.models import tiny_llama, token_rows
def build():
    rows = token_rows(16)
    rows[3]["labels"] = [-100] * len(rows[3]["labels"])
    rows[7]["input_ids"][2] = 64
    arguments = TrainingArguments("out", use_cpu=True, report_to=[], save_strategy="no")
    return Trainer(tiny_llama(), arguments, train_dataset=Dataset.from_list(rows))
"""


def test_bad_rows_go_to_the_quarantine_of_a_run(tmp_path, capsys):
    (tmp_path / "bad_rows.py").write_text(BAD_ROWS)
    words = ["doctor", "--trainer", "bad_rows:build", "--only", "data", "--quarantine", str(tmp_path / "run")]
    assert main(words) == 1
    assert f"quarantine of {tmp_path / 'run'}: 2 new (3, 7)" in capsys.readouterr().out
    entries, problem = read_quarantine(tmp_path / "run" / "nanguard")
    assert problem is None
    assert sorted((entry.row, entry.signal, entry.step) for entry in entries) == [
        (3, "labels_masked", 0), (7, "input_out_of_range", 0),
    ]  # fmt: skip
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["stages"][0]["quarantined"] == []
    assert main(["doctor", "--only", "rules", "--quarantine", str(tmp_path)]) == 2
    assert "--quarantine needs the stage data" in capsys.readouterr().err


def test_hostile_text_of_a_file_is_printed_without_its_control_characters(tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text('model_name_or_path: m\n"evil\\e[31m[bold]name": 1\n')
    assert main(["doctor", str(file), "--only", "rules"]) == 1
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "[bold]name" in output


def test_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["doctor", "--env"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^  torch +\d", output, flags=re.MULTILINE)
    assert re.search(r"^  ACCELERATE_MIXED_PRECISION +bf16$", output, flags=re.MULTILINE)
    assert main(["doctor", "--env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts"]["guarded SFT and GRPO trainers, recipes"] == "active"
    assert found["dtypes"]["bfloat16"] == "native"


BROKEN_LAW = """
from pathlib import Path
from trl import SFTTrainer
from tests.trainers import build as build_trainer
class Scaled(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, None)  # averages over each micro-batch
def build():
    return build_trainer("sft", Path("out"), Scaled, guard=False, warmup_steps=1)
"""


def test_a_broken_law_is_a_finding(tmp_path, capsys):
    (tmp_path / "broken_law.py").write_text(BROKEN_LAW)
    assert main(["doctor", "--trainer", "broken_law:build", "--only", "laws", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert "accumulation" in {found["rule"] for found in result["findings"]}
