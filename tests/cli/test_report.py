"""`nanguard report` and `nanguard watch` on the files of a real run."""

import json
import re
import subprocess
import sys
from io import StringIO

import pytest

from hf_nanguard.cli.main import main
from hf_nanguard.report.run_files import FollowedFile
from hf_nanguard.testing import Fault, plant

from ..test_safe_files import ODD, plant_odd
from ..trainers import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose third step is skipped."""
    folder = tmp_path_factory.mktemp("run")
    trainer = build("plain", folder, gradient_accumulation_steps=1)
    planted = plant(trainer, Fault("loss", step=2))
    trainer.train()
    assert planted.triggered
    return folder


def test_report_draws_a_picture(folder, capsys):
    assert main(["report", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(rf"{re.escape(str(folder))}: \d logged steps, loss \S+ at step 1 to \S+ at step 4$", lines[0])
    assert lines[1].startswith("  1 x loss_nonfinite skipped at step 2")
    places = dict(line.split(maxsplit=1) for line in lines[2:])
    guard = folder / "nanguard"
    assert places == {"events": f"{guard / 'events.jsonl'}", "autopsies": f"{guard / 'autopsy'}",
                      "picture": f"{guard / 'report.svg'}"}  # fmt: skip
    assert (folder / "nanguard" / "report.svg").read_text().startswith("<?xml")


def test_report_as_json(folder, tmp_path, capsys):
    assert main(["report", "--json", str(folder / "nanguard")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["actions"] == {"skipped": 1}
    assert [mark["step"] for mark in found["marks"]] == [2]
    assert {row["step"] for row in found["rows"] if "loss" in row} == {1, 2, 4}  # the skipped one has no loss
    assert main(["report", "--json", "--output", str(tmp_path / "x.png"), str(folder)]) == 0
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_without_matplotlib_only_the_picture_is_missing(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", "--json", str(folder)]) == 0
    capsys.readouterr()
    assert main(["report", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  1 x loss_nonfinite skipped at step 2")
    assert lines[-1] == "  picture   none. A picture needs matplotlib. Run pip install matplotlib."
    assert main(["report", "--output", "x.svg", str(folder)]) == 2  # asked for
    assert "Run pip install matplotlib." in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report", "nowhere"], ["report", ".", "--output", "x.gif"], ["watch", "no/where"],
                                   ["watch", ".", "--interval", "0"], ["watch", ".", "--interval", "nan"]])  # fmt: skip
def test_bad_arguments(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("nanguard: ")


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("kind", ODD)
def test_the_picture_is_never_written_through_a_link_or_into_a_pipe(kind, asked, tmp_path, capsys):
    picture = tmp_path / "nanguard" / "report.svg"
    picture.parent.mkdir()
    (picture.parent / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    is_unharmed = plant_odd(kind, picture)
    assert main(["report", str(tmp_path), *(["--output", str(picture)] if asked else [])]) == (2 if asked else 0)
    output = capsys.readouterr()
    assert ("Is a directory" if kind == "folder" else "not a regular file") in (output.err if asked else output.out)
    assert is_unharmed()


def test_watch_once(folder, capsys):
    assert main(["watch", "--once", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 4: ")
    assert "loss " in lines[0]
    assert lines[1].startswith("step 2: loss_nonfinite skipped: ")


def test_watch_before_the_run(tmp_path, capsys):
    assert main(["watch", "--once", str(tmp_path)]) == 0
    assert "nothing logged yet" in capsys.readouterr().out
    assert main(["watch", "--once", str(tmp_path / "mistyped")]) == 2
    assert capsys.readouterr().err == f"nanguard: No such folder: {tmp_path / 'mistyped'}.\n"


def test_watch_follows_until_ctrl_c(tmp_path, interruptible):
    guard = tmp_path / "nanguard"
    guard.mkdir()
    command = [sys.executable, "-m", "hf_nanguard.cli.main", "watch", str(tmp_path), "--interval", "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for step in (1, 2):
        with (guard / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"run": "a", "step": step, "loss": 1.5}) + "\n")
        assert process.stdout.readline() == f"step {step}: loss 1.5\n"
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == ""


def test_the_live_view_shows_row_and_events(folder):
    from rich.console import Console

    from hf_nanguard.cli.watch import WatchedRun, build_view

    watched = WatchedRun(folder)
    watched.update()
    console = Console(width=120, file=StringIO())
    console.print(build_view(watched))
    text = console.file.getvalue()
    assert "step 4" in text
    assert "loss_nonfinite" in text
    assert "events: 1" in text


def test_a_followed_file_returns_each_object_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    followed = FollowedFile(path)
    assert followed.read() == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert followed.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write('}\nnot json\n{"a": 3}\n')
    assert followed.read() == [{"a": 2}, {"a": 3}]
    path.write_text('{"b": 1}\n')  # begun anew
    assert followed.read() == [{"b": 1}]
    assert followed.read() == []
