"""`nanguard replay` as a user runs it: the same verdict in a process of its own, what differs, what is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file

from hf_nanguard import ArgumentError, GuardArguments, NanGuardCallback, replay
from hf_nanguard.cli import replay as command
from hf_nanguard.cli.main import build_parser, main
from hf_nanguard.cli.shared import slow_stages
from hf_nanguard.core.autopsy.bundle.writer import write_bundle
from hf_nanguard.core.autopsy.evidence.verdict import Blame, Remedy, Verdict, format_verdict
from hf_nanguard.core.autopsy.trace.origin import Origin
from hf_nanguard.core.vocabulary import Cause
from tests.bundle_replay.bundles import bad_row, examine_and_write, hold
from tests.models import tiny_llama, token_rows
from tests.trainers import build, events_of

ROOT = Path(__file__).parent.parent.parent
REMEDIES = (Remedy("float32", True, False), Remedy("drop_rows", True, True), Remedy("bfloat16", False))


@pytest.fixture(scope="module")
def suspect(tmp_path_factory):
    return hold(build("plain", tmp_path_factory.mktemp("run"), guard=False), bad_row)


@pytest.fixture(scope="module")
def found(suspect, tmp_path_factory) -> tuple[Path, Verdict]:
    """A bundle and its verdict."""
    return examine_and_write(suspect, tmp_path_factory.mktemp("bundle"))


def write(suspect, folder: Path, verdict: Verdict, **facts) -> str:
    told = {**suspect.runner.facts(suspect.weight), **facts}
    return str(write_bundle(folder / "step-7", suspect, verdict, told, weights="all"))


def run(*arguments: str, capsys) -> tuple[int, str, str]:
    """Runs the command in this process; `test_the_same_verdict_in_a_fresh_process` does without that."""
    code = main(["replay", "--in-process", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_same_verdict_in_a_fresh_process(found):
    path, verdict = found
    done = subprocess.run(
        [sys.executable, "-m", "hf_nanguard.cli.main", "replay", str(path)],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    block, _, last = done.stdout.rstrip("\n").rpartition("\n")
    assert last == "The same verdict as recorded."
    assert block == format_verdict(verdict, 7, 0)
    assert "embed_tokens" in block
    assert "sample 1 of 2" in block
    assert all(line.startswith("nanguard: ") for line in done.stderr.splitlines())


@pytest.mark.parametrize("guard", [True, False], ids=["guarded trainer", "callback"])
def test_a_bundle_of_a_real_run(guard, tmp_path, capsys):
    """Row 9 alone holds a token whose embedding was never initialised; it comes in step 1."""
    rows = [{**row, "input_ids": [6 if token == 5 else token for token in row["input_ids"]]} for row in token_rows(12)]
    rows[9]["input_ids"][3] = 5
    settings = GuardArguments(nanguard_bundle_weights="all", nanguard_on_bad_start="observe")
    extra = {"guard": settings} if guard else {"callbacks": [NanGuardCallback(settings)]}
    extra["train_dataset"] = Dataset.from_list(rows)
    trainer = build("plain", tmp_path, guard=guard, extra=extra, max_steps=2, train_sampling_strategy="sequential")
    trainer.model.model.embed_tokens.weight.data[5] = float("nan")
    trainer.train()
    [start, event] = events_of(trainer)
    assert (start["signal"], start["action"]) == ("param_nonfinite", "observed")
    capsys.readouterr()
    code, out, _ = run(str(tmp_path / "nanguard" / event["bundle"]), capsys=capsys)
    assert code == 0, out
    assert out.startswith("---- autopsy of micro-batch ")
    assert "parameter model.embed_tokens.weight contains NaN in 16 entries" in out
    assert "sample 1 of 2, dataset row 9, tokens (1, 3)" in out


def test_json_is_one_strict_object(found, capsys):
    path, verdict = found
    code, out, _ = run(str(path), "--json", capsys=capsys)
    told = json.loads(out, parse_constant=pytest.fail)
    assert code == 0
    assert out.count("\n") == 1
    assert (told["same"], told["differences"], told["step"]) == (True, [], 7)
    assert told["verdict"]["origin"]["leaf"] == verdict.origin.leaf
    assert told["recorded"]["blame"]["samples"] == [1]


def test_the_same_cause_at_another_place_is_reproduced(suspect, found, tmp_path, capsys):
    """Of several samples that suffice, the replay may find another one, which fails elsewhere."""
    origin = replace(found[1].origin, module="model.layers.9")
    path = write(suspect, tmp_path, replace(found[1], origin=origin, blame=Blame("samples", [0])))
    _, out, _ = run(path, capsys=capsys)
    assert out.splitlines()[-1].startswith("Reproduced with the same cause, at another place: module was ")
    assert "Not as recorded" not in out


def test_another_origin_is_told(suspect, found, tmp_path, capsys):
    origin = replace(found[1].origin, module="model.layers.9", cause=Cause.UNKNOWN)
    path = write(suspect, tmp_path, replace(found[1], origin=origin, blame=Blame("samples", [0])))
    code, out, _ = run(path, capsys=capsys)
    assert code == 1
    told = out.splitlines()[-1]
    assert told.startswith("Not as recorded: ")
    assert f"module was 'model.layers.9', is {found[1].origin.module!r}" in told
    assert "cause was 'unknown', is 'uninitialised_weight'" in told
    assert "source" not in told


def test_another_sample_that_suffices_is_the_same_verdict(suspect, found, tmp_path, capsys):
    blame = Blame("samples", [0], rows=[7], texts={0: "recorded text"})
    path = write(suspect, tmp_path, replace(found[1], blame=blame))
    code, out, _ = run(path, capsys=capsys)
    assert code == 0
    assert out.rstrip().endswith("The same verdict as recorded.")
    assert "sample 1 of 2" in out
    assert "recorded text" not in out  # it is the text of another sample


def test_a_run_folder_lists_its_bundles(suspect, found, tmp_path, capsys):
    path = write(suspect, tmp_path / "run" / "nanguard" / "autopsy", found[1])
    code, _, err = run(str(tmp_path / "run"), capsys=capsys)
    assert code == 2
    assert f"is not a bundle. Choose one of those below it: {path}." in err
    code, _, err = run(str(tmp_path), capsys=capsys)  # too far above
    assert "facts.json is missing" in err


def test_a_batch_that_is_finite_now_is_told(suspect, found, tmp_path, capsys):
    """The weights of another run are given: nothing is wrong with them."""
    facts = suspect.runner.facts(suspect.weight)
    verdict = replace(found[1], origin=replace(found[1].origin, parameter=None))
    path = write_bundle(tmp_path / "step-7", suspect, verdict, facts, weights="none")
    tiny_llama().save_pretrained(tmp_path / "healthy")
    code, out, _ = run(str(path), "--checkpoint", str(tmp_path / "healthy"), capsys=capsys)
    assert code == 1
    assert "Not as recorded: the replay was finite." in out


def test_weights_that_the_optimizer_ruined_are_the_same_fault(suspect, found, tmp_path, capsys):
    origin = replace(found[1].origin, phase="optimizer", cause=Cause.ADAM_EPS_UNDERFLOW)
    path = write(suspect, tmp_path, replace(found[1], origin=origin))
    assert run(path, capsys=capsys)[0] == 0


def test_remedies_are_shown_as_recorded_unless_tried_again(suspect, found, tmp_path, capsys, monkeypatch):
    path = write(suspect, tmp_path, replace(found[1], remedies=REMEDIES))
    _, out, _ = run(path, capsys=capsys)
    lines = [line.split(":", 1) for line in out.splitlines() if ":" in line]
    told = {name.strip(): text.strip() for name, text in lines}
    assert (told["works"], told["fails"], told["untried"]) == ("drop_rows", "float32", "bfloat16")
    assert "--remedies tries them again" in out
    asked = []
    monkeypatch.setattr(
        "hf_nanguard.core.autopsy.examiner.try_remedies", lambda *args: asked.append(1) or (Remedy("mine", True, True),)
    )
    _, out, _ = run(path, capsys=capsys)
    assert asked == []
    _, out, _ = run(path, "--remedies", capsys=capsys)
    assert asked == [1]
    assert "mine" in out
    assert "drop_rows" not in out


def test_text_of_a_bundle_cannot_steer_the_terminal(suspect, found, tmp_path, capsys):
    evil = "\x1b]0;evil\x07\x1b[2J\u202e[bold red]"
    blame = replace(found[1].blame, texts={1: evil})
    path = write(suspect, tmp_path, replace(found[1], blame=blame, remedies=(Remedy(evil, True, True),)))
    code, out, _ = run(path, capsys=capsys)
    assert code == 0
    assert "[bold red]" in out  # shown as it is: nobody takes it for markup
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    facts = suspect.runner.facts(suspect.weight)
    facts["model"]["config"][f"{evil}_layers"] = 10**9
    path = str(write_bundle(tmp_path / "step-8", suspect, found[1], facts, weights="all"))
    code, out, err = run(path, capsys=capsys)
    assert (code, out) == (2, "")
    assert "\x1b" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "BUNDLE"),
        (["nowhere"], "'nowhere'"),
        (["{bundle}", "--device", "nonsense"], "--device must be a device of this machine, got 'nonsense'"),
        (["{bundle}", "--factory", "x"], "--factory must be module:function, for example my_model:build, got 'x'"),
        (
            ["{bundle}", "--checkpoint", "nowhere"],
            "--checkpoint must be a folder with model.safetensors in it, got 'nowhere'",
        ),
    ],
)
def test_bad_arguments(arguments, told, found, capsys):
    code, out, err = run(*(argument.format(bundle=found[0]) for argument in arguments), capsys=capsys)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_inputs_that_cannot_be_run_are_told_in_a_sentence(suspect, found, tmp_path, capsys):
    path = write(suspect, tmp_path, found[1])
    file = Path(path) / "inputs.safetensors"
    tensors = load_file(file)
    ids = next(name for name in tensors if name.endswith("input_ids"))
    tensors[ids][:] = 10**6
    save_file(tensors, file)
    code, out, err = run(path, capsys=capsys)
    assert (code, out) == (2, "")
    assert "could not be run (IndexError" in err
    assert err.count("\n") == 1
    with pytest.raises(ArgumentError, match="could not be run"):
        replay(path)


def test_a_slow_replay_shows_what_it_does(found, capsys, monkeypatch):
    monkeypatch.setattr(slow_stages, "PATIENCE", 0.01)
    code, out, err = run(str(found[0]), "--json", capsys=capsys)
    assert code == 0
    json.loads(out)
    assert "nanguard: building the model ..." in err


def test_the_child_gets_the_whole_command_line():
    words = [
        "replay",
        "--json",
        "--remedies",
        "--checkpoint",
        "a b",
        "--checkpoint=-c",
        "--factory",
        "m:f",
        "--device=cpu",
    ]
    arguments = build_parser().parse_args([*words, "--", "-bundle"])
    again = build_parser().parse_args(command.as_words(arguments))
    assert vars(again) == {**vars(arguments), "in_process": True}


@pytest.mark.parametrize("words", [["--time-limit", "0"], ["--memory-limit", "x"]])
def test_bad_limits(words, capsys):
    assert main(["replay", "step-7", *words]) == 2
    assert f"{words[0]} must be an integer from 1" in capsys.readouterr().err


def test_samples_are_those_of_the_whole_batch(found):
    class Part:
        inputs_are = "samples"
        verdict = Verdict(Origin("loss", "nan", Cause.UNKNOWN), Blame("samples", [3, 5])).as_dict()

    assert command.original_samples(Part(), [1]) == [5]
