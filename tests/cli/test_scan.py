"""`nanguard scan`: what it prints and its exit codes."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from hf_nanguard.cli.main import main
from hf_nanguard.cli.scan import print_path
from hf_nanguard.plain_text import printable


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # it would outlast this test


@pytest.fixture
def run(tmp_path):
    """A run of three checkpoints: good, NaN, interrupted."""
    for step, value in ((10, 1.0), (20, float("nan")), (30, 1.0)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"w": torch.full((2, 2), value)}, folder / "model.safetensors")
        if step != 30:
            (folder / "trainer_state.json").write_text('{"global_step": 4}')
    return tmp_path


def test_clean(run, capsys):
    assert main(["scan", str(run / "checkpoint-10")]) == 0
    assert "checkpoint-10: good (1 tensor in 1 file, 0.0 MB)" in capsys.readouterr().out


def test_findings(run, capsys):
    assert main(["scan", str(run / "checkpoint-20")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("checkpoint-20: NOT GOOD (1 tensor in 1 file, 0.0 MB)")
    assert [*map(str.split, lines[1:])] == [
        ["nan", "model.safetensors:", "w", "contains", "NaN", "in", "all", "4", "entries"]
    ]


def test_unusable(run, capsys):
    assert main(["scan", str(run / "checkpoint-30")]) == 2
    assert "no trainer_state.json" in capsys.readouterr().out


def test_a_run_has_the_worst_of_its_exit_codes(run, capsys):
    assert main(["scan", str(run)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"{run}/checkpoint-") for line in lines) == 3
    best = f"newest good checkpoint: {run / 'checkpoint-10'}. `nanguard run --resume train.py` continues from it."
    assert lines[-1] == best


def test_of_many_checkpoints_each_has_few_lines(tmp_path, capsys):
    bad = {f"w{index}": torch.full((2,), float("nan")) for index in range(9)}
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file(bad, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    main(["scan", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert sum(" w" in line for line in lines) <= 2 * 3
    assert "newest good" not in lines[-1]


def test_json(run, capsys):
    assert main(["scan", "--json", str(run)]) == 2
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["good"] for result in results] == [True, False, False]
    assert results[1]["findings"][0]["problem"] == "nan"


def test_best_prints_only_the_path(run, capsys):
    assert main(["scan", "--best", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'checkpoint-10'}\n"


@pytest.mark.parametrize("name", ["lauf-\u00e4", "\x1b[31m\u202erun\r", "\udcff"], ids=ascii)
def test_best_is_exact_for_a_program_and_printable_on_a_terminal(name, tmp_path, monkeypatch):
    """Whatever the encoding of the output."""
    for shows in (False, True):
        written = io.BytesIO()
        output = io.TextIOWrapper(written, "ascii", errors="backslashreplace")
        output.isatty = lambda shows=shows: shows
        monkeypatch.setattr(sys, "stdout", output)
        print_path(tmp_path / name)
        output.flush()
        shown = printable(str(tmp_path / name)).encode("ascii", "backslashreplace")
        assert written.getvalue() == (shown if shows else os.fsencode(tmp_path / name)) + b"\n"


def test_best_of_nothing(run, capsys):
    (run / "checkpoint-10" / "model.safetensors").write_bytes(b"")
    assert main(["scan", "--best", str(run)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "checkpoint-10: model.safetensors is empty" in captured.err


def test_a_reader_may_stop_reading(run):
    command = f"{sys.executable} -m hf_nanguard.cli.main scan {run} {run} {run} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("words", [["nowhere"], ["--as", "int4", "."], ["--best", "nowhere"], []])
def test_bad_arguments(words, capsys):
    assert main(["scan", *words]) == 2
    assert capsys.readouterr().err.startswith("nanguard: ")
