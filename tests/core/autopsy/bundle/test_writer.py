"""A bundle is written whole or not at all, holds what fits, and says what it does not hold."""

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from hf_nanguard.core.autopsy.bundle import content as bundle_content
from hf_nanguard.core.autopsy.bundle import writer as bundle_writer
from hf_nanguard.core.autopsy.bundle.reader import read_bundle
from hf_nanguard.core.autopsy.bundle.tensor_file import load_tensors, save_tensors
from hf_nanguard.core.autopsy.bundle.writer import write_bundle
from hf_nanguard.errors import ArgumentError
from hf_nanguard.safe_files import find_machine
from tests.core.autopsy.suspects import Tied, make_inputs, make_specimen, make_verdict


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def read_facts(path):
    return json.loads((path / "facts.json").read_text())


def test_a_bundle_and_its_files(tmp_path):
    path = write_bundle(tmp_path / "autopsy" / "step-42", make_specimen(make_inputs()), make_verdict(), {"a": 1})
    assert path == tmp_path / "autopsy" / "step-42"
    assert names(path) == ["README.md", "facts.json", "inputs.safetensors"]
    assert names(path.parent) == ["step-42"]
    facts = read_facts(path)
    assert facts["schema"] == 1
    assert (facts["step"], facts["micro_step"]) == (42, 1)
    assert facts["verdict"] == make_verdict().as_dict()
    assert facts["verdict"]["seconds"] == "inf"
    assert facts["versions"]["torch"] == torch.__version__


def test_a_bundle_is_private_to_its_owner(tmp_path):
    before = os.umask(0o022)
    try:
        path = write_bundle(
            tmp_path / "autopsy" / "step-1", make_specimen(make_inputs()), make_verdict(), {}, weights="all"
        )
    finally:
        os.umask(before)
    assert len(names(path)) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (path, path.parent)} == {0o700}


def test_nothing_about_the_run_changes(tmp_path):
    suspect = make_specimen(make_inputs())
    before = {name: (id(p), p.clone()) for name, p in suspect.model.state_dict(keep_vars=True).items()}
    rng = torch.get_rng_state()
    write_bundle(tmp_path / "step-1", suspect, make_verdict("embed.weight"), {}, weights="all")
    assert torch.equal(torch.get_rng_state(), rng)
    for name, tensor in suspect.model.state_dict(keep_vars=True).items():
        assert (id(tensor), True) == (before[name][0], torch.equal(tensor, before[name][1]))


def test_a_name_that_is_taken_is_counted_up(tmp_path):
    suspect = make_specimen(make_inputs())
    paths = [write_bundle(tmp_path / "step-42", suspect, make_verdict(), {}) for _ in range(3)]
    assert [path.name for path in paths] == ["step-42", "step-42-2", "step-42-3"]
    assert read_bundle(paths[2]).step == 42


def test_another_process_that_is_faster_is_not_overwritten(tmp_path, monkeypatch):
    first = write_bundle(tmp_path / "step-1", make_specimen({"x": torch.ones(1)}), make_verdict(), {})
    seen = [False]  # the other one appears between the look and the rename
    monkeypatch.setattr(bundle_writer.os.path, "lexists", lambda path: seen.pop() if seen else os.path.exists(path))
    second = write_bundle(tmp_path / "step-1", make_specimen({"x": torch.zeros(1)}), make_verdict(), {})
    assert second.name == "step-1-2"
    assert read_bundle(first).inputs["x"].item() == 1


# ---- failures ----


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(path, tensors):
        save_tensors(path, tensors)
        if path.name == "weights.safetensors":
            raise error

    monkeypatch.setattr(bundle_writer, "save_tensors", fail)
    with pytest.raises(type(error)):
        write_bundle(tmp_path / "step-1", make_specimen(make_inputs()), make_verdict(), {}, weights="all")
    assert names(tmp_path) == []


def test_a_full_disk_is_known_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 5000))
    with pytest.raises(OSError, match=r"A bundle of .* does not fit into the 4\.9 KiB of free disk space") as caught:
        write_bundle(tmp_path / "step-1", make_specimen(make_inputs()), make_verdict(), {})
    assert caught.value.errno == 28
    assert names(tmp_path) == []


def test_a_disk_that_fills_up_while_writing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    suspect = make_specimen({"x": torch.ones(1, 100)}, nn.Linear(100, 100))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"weights\.safetensors could not be written"):
            write_bundle(tmp_path / "step-1", suspect, make_verdict(), {}, weights="all")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "autopsy").write_text("a file")
    with pytest.raises(OSError, match="autopsy"):
        write_bundle(tmp_path / "autopsy" / "step-1", make_specimen(make_inputs()), make_verdict(), {})


KILLED = """
    import sys, time
    from pathlib import Path
    from hf_nanguard.core.autopsy.bundle import writer as bundle_writer
    from tests.core.autopsy.suspects import make_inputs, make_specimen, make_verdict
    save = bundle_writer.save_tensors
    def stop(path, tensors):
        save(path, tensors)
        print("half", flush=True)
        time.sleep(60)
    bundle_writer.save_tensors = stop
    bundle_writer.write_bundle(Path(sys.argv[1]) / "step-7", make_specimen(make_inputs()), make_verdict(), {})
"""


def test_a_killed_process_leaves_no_bundle_and_the_next_one_cleans_up(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], stdout=subprocess.PIPE)
    with process:
        assert process.stdout.readline().strip() == b"half"
        alive = write_bundle(tmp_path / "step-7", make_specimen(make_inputs()), make_verdict(), {})
        assert len(names(tmp_path)) == 2  # the draft of a process that is at it is not touched
        process.send_signal(signal.SIGKILL)
    shutil.rmtree(alive)
    [left] = names(tmp_path)
    assert left.startswith(".step-7.")
    (tmp_path / f".step-70.{find_machine()}-999999999.partial").mkdir()  # another one
    path = write_bundle(tmp_path / "step-7", make_specimen(make_inputs()), make_verdict(), {})
    assert names(tmp_path) == [path.name]


# ---- size ----


def wide_inputs():
    return {"input_ids": torch.arange(4 * 1000).view(4, 1000), "prompts": list("abcd"), "beta": torch.tensor(0.5)}


def test_inputs_that_do_not_fit_are_cut_to_the_culprits(tmp_path):
    verdict = make_verdict(scope="samples", samples=[2])
    path = write_bundle(tmp_path / "step-1", make_specimen(wide_inputs()), verdict, {}, max_bytes=20_000)
    bundle = read_bundle(path)
    assert bundle.inputs_are == "samples"
    assert torch.equal(bundle.inputs["input_ids"], wide_inputs()["input_ids"][2:3])
    assert bundle.inputs["prompts"] == ["c"]
    assert bundle.inputs["beta"].item() == 0.5
    assert "31.3 KiB do not fit" in bundle.left_out["inputs"]
    assert "only the samples [2]" in (path / "README.md").read_text()


@pytest.mark.parametrize(("samples", "limit"), [(None, 20_000), ([0, 1, 2], 20_000), ([2], 10_000), ([2], 0)])
def test_inputs_that_cannot_be_cut_enough_are_left_out(tmp_path, samples, limit):
    verdict = make_verdict(scope="samples", samples=samples)
    bundle = read_bundle(write_bundle(tmp_path / "s", make_specimen(wide_inputs()), verdict, {}, max_bytes=limit))
    assert (bundle.inputs_are, bundle.inputs) == ("none", None)
    assert "do not fit" in bundle.left_out["inputs"]
    bundle.rng.restore()


def test_plain_values_without_end_are_left_out(tmp_path):
    inputs = {"x": torch.ones(2), "text": "a" * (bundle_content.MAX_FACTS // 2)}
    bundle = read_bundle(write_bundle(tmp_path / "s", make_specimen(inputs), make_verdict(), {}))
    assert bundle.inputs is None
    assert "plain values" in bundle.left_out["inputs"]


def test_facts_without_end_are_an_os_error(tmp_path):
    with pytest.raises(OSError, match="facts of a bundle take"):
        write_bundle(
            tmp_path / "s", make_specimen(make_inputs()), make_verdict(), {"a": "x" * bundle_content.MAX_FACTS}
        )
    assert names(tmp_path) == []


@pytest.mark.parametrize("weights", ["trainable", "all"])
def test_weights_that_do_not_fit_are_left_out(tmp_path, weights):
    model = nn.Sequential(nn.Linear(100, 100))
    suspect = make_specimen({"x": torch.ones(1, 100)}, model)
    bundle = read_bundle(write_bundle(tmp_path / "a", suspect, make_verdict(), {}, weights=weights, max_bytes=30_000))
    assert bundle.weights_are == "none"
    assert bundle.read_weights() == {}
    assert "39.5 KiB do not fit" in bundle.left_out["weights"]
    fits = write_bundle(tmp_path / "b", suspect, make_verdict(), {}, weights=weights, max_bytes=60_000)
    assert read_bundle(fits).weights_are == weights


def test_inputs_and_weights_must_fit_together(tmp_path):
    model = nn.Sequential(nn.Linear(100, 100))
    suspect = make_specimen({"x": torch.ones(50, 100)}, model)
    path = write_bundle(tmp_path / "a", suspect, make_verdict(), {}, weights="all", max_bytes=50_000)
    assert (read_bundle(path).inputs_are, read_bundle(path).weights_are) == ("all", "none")


def test_tied_weights_that_do_not_fit_leave_no_second_name(tmp_path):
    path = write_bundle(
        tmp_path / "a", make_specimen(make_inputs()), make_verdict(), {}, weights="all", max_bytes=8_000
    )
    assert read_bundle(path).inputs_are == "all"
    assert read_bundle(path).read_weights() == {}
    assert "weights" in read_bundle(path).left_out


# ---- weights ----


def test_trainable_weights(tmp_path):
    model = Tied()
    bundle = read_bundle(
        write_bundle(tmp_path / "s", make_specimen(make_inputs(), model), make_verdict(), {}, weights="trainable")
    )
    found = bundle.read_weights()
    assert found.keys() == {"embed.weight", "head.weight", "norm.weight", "norm.bias"}
    assert torch.equal(found["embed.weight"], model.embed.weight)
    assert found["head.weight"] is found["embed.weight"]


def test_all_weights_fit_the_model_they_came_from(tmp_path):
    model = Tied()
    model.norm.running_mean.fill_(3)
    model.frozen.weight = nn.Parameter(torch.randn(4, 4).t(), requires_grad=False)
    bundle = read_bundle(
        write_bundle(tmp_path / "s", make_specimen(make_inputs(), model), make_verdict(), {}, weights="all")
    )
    other = Tied()
    other.load_state_dict(bundle.read_weights())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_weights_that_overlap_in_memory_are_each_kept(tmp_path):
    model = nn.Module()
    store = torch.randn(10)
    model.whole, model.tail = nn.Parameter(store), nn.Parameter(store[5:])
    model.none_a, model.none_b = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    suspect = make_specimen({"x": torch.ones(1)}, model)
    found = read_bundle(write_bundle(tmp_path / "s", suspect, make_verdict(), {}, weights="all")).read_weights()
    assert torch.equal(found["whole"], store)
    assert torch.equal(found["tail"], store[5:])
    assert found.keys() == {"whole", "tail", "none_a", "none_b"}


def test_weights_without_values_are_noted(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    model = nn.ModuleDict({"org/adapter": Extra(2, 2), "meta": nn.Linear(2, 2, device="meta")})
    suspect = make_specimen({"x": torch.ones(1)}, model)
    bundle = read_bundle(write_bundle(tmp_path / "s", suspect, make_verdict(), {}, weights="all"))
    assert bundle.read_weights().keys() == {"org/adapter.weight", "org/adapter.bias"}
    assert bundle.left_out.keys() == {"meta.weight", "meta.bias", "org/adapter._extra_state"}


def test_compiled_parts_have_their_plain_names(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0] = torch.compile(model[0], backend="eager")
    suspect = make_specimen({"x": torch.ones(1, 2)}, model)
    verdict = make_verdict("0._orig_mod.bias")
    bundle = read_bundle(write_bundle(tmp_path / "s", suspect, verdict, {}, weights="all"))
    assert bundle.read_weights().keys() == {"0.weight", "0.bias"}
    bundle = read_bundle(write_bundle(tmp_path / "s", suspect, verdict, {}))
    assert bundle.read_weights().keys() == {"0.bias"}


@pytest.mark.parametrize("name", ["embed.weight", "norm.running_mean"])
def test_the_parameter_to_blame_is_always_inside(tmp_path, name):
    model = Tied()
    model.state_dict()[name].view(-1)[1] = float("nan")
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs(), model), make_verdict(name), {})
    bundle = read_bundle(path)
    assert bundle.weights_are == "none"
    found = bundle.read_weights()
    assert found.keys() == ({"embed.weight", "head.weight"} if name == "embed.weight" else {name})
    assert torch.equal(found[name].isnan(), model.state_dict()[name].isnan())
    assert found[name].isnan().sum() == 1


@pytest.mark.parametrize(("name", "weights"), [("embed.weight", "trainable"), ("head.weight", "all"), (None, "all")])
def test_it_is_not_kept_twice(tmp_path, name, weights):
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs()), make_verdict(name), {}, weights=weights)
    saved = load_tensors(path / "weights.safetensors").keys()
    assert ("embed.weight" in saved) != ("head.weight" in saved)
    assert {"embed.weight", "head.weight"} <= read_bundle(path).read_weights().keys()


def test_a_frozen_parameter_joins_the_trainable_ones(tmp_path):
    verdict = make_verdict("frozen.weight")
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs()), verdict, {}, weights="trainable")
    assert {"frozen.weight", "norm.weight"} <= read_bundle(path).read_weights().keys()
    assert "frozen.bias" not in read_bundle(path).read_weights()


def test_a_parameter_too_large_to_keep_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_content, "MAX_CULPRIT", 100)
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs()), make_verdict("embed.weight"), {})
    assert "weights.safetensors" not in names(path)
    assert "256 bytes do not fit into 100 bytes" in read_bundle(path).left_out["embed.weight"]


def test_an_unknown_choice_of_weights(tmp_path):
    with pytest.raises(ArgumentError, match="weights must be one of none, trainable, all, got 'some'"):
        write_bundle(tmp_path / "s", make_specimen(make_inputs()), make_verdict(), {}, weights="some")


# ---- text ----


def test_without_text_no_text_is_anywhere(tmp_path):
    verdict = make_verdict(scope="samples", samples=[1], texts={1: "secret text"})
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs()), verdict, {}, text=False, weights="all")
    for file in path.iterdir():
        assert b"secret" not in file.read_bytes()
    bundle = read_bundle(path)
    assert torch.equal(bundle.inputs["input_ids"], make_inputs()["input_ids"])
    assert bundle.inputs["prompts"] == ["[redacted]"] * 4
    assert "anyone with the tokenizer can decode" in (path / "README.md").read_text()
    assert verdict.blame.texts == {1: "secret text"}


def test_with_text_it_is_there(tmp_path):
    verdict = make_verdict(scope="samples", samples=[1], texts={1: "plain words"})
    path = write_bundle(tmp_path / "s", make_specimen(make_inputs()), verdict, {})
    assert "plain words" in (path / "README.md").read_text()
    assert read_bundle(path).inputs["prompts"][1] == "secret 1"


@pytest.mark.parametrize("weights", ["none", "trainable", "all"])
@pytest.mark.parametrize("text", [True, False])
def test_the_readme_is_short_and_says_how(tmp_path, weights, text):
    verdict = make_verdict("frozen.weight", scope="samples", samples=[1], texts={1: "some words"})
    path = write_bundle(tmp_path / "step-3", make_specimen(make_inputs()), verdict, {}, weights=weights, text=text)
    readme = (path / "README.md").read_text()
    assert 15 <= len(readme.splitlines()) <= 30
    assert max(map(len, readme.splitlines())) <= 200
    assert "autopsy of micro-batch 1 of step 3" in readme
    assert "    nanguard replay FOLDER" in readme
    assert ("--checkpoint" in readme) == (weights != "all")
    assert "--factory" in readme
    assert torch.__version__ in readme
    assert all(f"`{name}`" in readme for name in names(path) if name != "README.md")


def test_hostile_text_stays_within_its_line(tmp_path):
    text = "x\n# Heading\n<script>alert(1)</script>\x1b[2J\u202e"
    verdict = make_verdict(scope="samples", samples=[1], texts={1: text})
    readme = (write_bundle(tmp_path / "s", make_specimen(make_inputs()), verdict, {}) / "README.md").read_text()
    assert "\x1b" not in readme
    assert "\u202e" not in readme
    for line in readme.splitlines():
        assert line.startswith("    ") or ("script" not in line and "# Heading" not in line)
    assert "Heading" in readme


def test_odd_facts_are_named_by_their_type(tmp_path):
    facts = {"dtype": torch.float32, "inf": float("inf"), "versions": {"trl": "1.0", "peft": None}}
    bundle = read_bundle(write_bundle(tmp_path / "s", make_specimen(make_inputs()), make_verdict(), facts))
    assert bundle.facts["dtype"] == "[left out: dtype]"
    assert bundle.facts["inf"] == "inf"
    assert bundle.versions["trl"] == "1.0"
