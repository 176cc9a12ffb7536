"""Every benchmark runs, with tiny sizes: its table is printed and its figures are there."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import (
    autopsy,
    docs_pictures,
    logits,
    losses,
    monitor,
    overhead,
    peers,
    picture,
    result_tables,
    scan,
    snapshot,
)

ROOT = Path(__file__).parent.parent


def run(module, monkeypatch, capsys, *words: str) -> list[str]:
    """Runs a benchmark in this process and returns the lines it prints."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *words])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # it would outlast this test
    module.main()
    return capsys.readouterr().out.splitlines()


def test_overhead(monkeypatch, capsys):
    lines = run(overhead, monkeypatch, capsys, "--size", "tiny", "--steps", "1", "--rounds", "1")
    assert [line.split()[0] for line in lines] == ["step", "stock", "guarded", "method:", "versions:"]
    reads, ops = map(float, lines[2].split()[-2:])
    assert reads <= 0
    assert 0 <= ops <= 8


def test_monitor(monkeypatch, capsys):
    lines = run(monitor, monkeypatch, capsys, "--size", "tiny", "--steps", "1", "--rounds", "1")
    rows = {line[:18].strip(): list(map(float, line[18:].split())) for line in lines[1:-2]}
    assert [*rows] == ["stock", *monitor.MONITORS]
    assert all(row[-1] > rows["no monitor"][-1] for name, row in rows.items() if name not in ("stock", "no monitor"))


def test_snapshot(monkeypatch, capsys):
    lines = run(snapshot, monkeypatch, capsys, "--size", "tiny", "--steps", "2", "--repeats", "1")
    assert re.match(r"[\d.]+ MB a snapshot; a step takes [\d.]+ ms$", lines[0])
    rows = {line[:18].strip(): list(map(float, line[18:].split())) for line in lines[2:-2]}
    assert [*rows] == ["plain copy", "snapshot, first", "snapshot, reused", "rewind"]
    assert all(len(row) == 4 for row in rows.values())


def test_logits(monkeypatch, capsys):
    monkeypatch.setattr(logits, "SHAPES", ((2, 50),))
    lines = run(logits, monkeypatch, capsys, "--repeats", "2")
    assert lines[0] == "[2, 50]"
    assert len(lines) == 7
    assert all(re.search(r"[\d.]+ ms, median [\d.]+ x that; +[\d.]+ x torch.sum$", line) for line in lines[1:-2])


@pytest.mark.parametrize("contender", losses.CONTENDERS)
def test_losses(contender, monkeypatch, capsys):
    words = ["--tokens", "4", "--vocabulary", "50", "--repeats", "1", "--contender", contender]
    [line] = run(losses, monkeypatch, capsys, *words)
    seconds, spread, megabytes = map(float, line.split())
    assert seconds > 0
    assert spread == 1
    assert megabytes >= 0


@pytest.mark.parametrize("kind", autopsy.KINDS)
def test_autopsy(kind, monkeypatch, capsys):
    [line] = run(autopsy, monkeypatch, capsys, "--size", "tiny", "--steps", "1", "--only", kind)
    seconds, spread, peak = map(float, line.split())
    assert seconds > 0
    assert spread == 1
    assert peak > 0


def test_peers():
    """The whole table is compared with the README in `make slow`."""
    stock, ours = peers.CONTENDERS[0], peers.CONTENDERS[-1]
    assert peers.play(stock, "loss") == "runs on, weights NaN, reported: nothing"
    assert peers.play(ours, "loss") == "runs on, weights finite, reported: place, data"
    assert peers.count(ours)[0] <= peers.count(stock)[0]


def test_scan(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(scan, "SIDE", 64)
    file = tmp_path / "scan.json"
    lines = run(scan, monkeypatch, capsys, "--megabytes", "1", "--rounds", "1", "--json", str(file))
    rows = [line.split() for line in lines[1:-2]]
    assert [tuple(row[:2]) for row in rows] == [(dtype, name) for dtype in scan.DTYPES for name in scan.CONTENDERS]
    assert all(float(row[2]) > 0 for row in rows)
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert stored["method"] == lines[-2].removeprefix("method: ")
    assert all(f"{name} {number}" in lines[-1] for name, number in stored["versions"].items())
    assert [row["bytes for a CPU second, of `cat`"] for row in stored["rows"]] == [row[4] for row in rows]


def test_picture(monkeypatch, capsys, tmp_path):
    file = tmp_path / "images" / "picture.svg"
    *_, line = run(picture, monkeypatch, capsys, "--steps", "6", "--output", str(file))  # after the log of both runs
    assert "6 steps, bad row at step 2; last loss: stock 0, guarded " in line
    assert "stock Trainer" in file.read_text(encoding="utf-8")
    assert (ROOT / "docs" / "images" / "stock-and-guarded.svg").stat().st_size < 100_000


def test_docs_pictures(monkeypatch, capsys, tmp_path):
    *_, first, second, third = run(docs_pictures, monkeypatch, capsys, "--folder", str(tmp_path))
    drawn = {Path(json.loads(line)["file"]).name for line in (first, second, third)}
    assert drawn == {"autopsy.svg", "headroom.svg", "report.svg"}
    assert "overflow at step" in (tmp_path / "headroom.svg").read_text(encoding="utf-8")
    assert all((ROOT / "docs" / "images" / name).stat().st_size < 100_000 for name in drawn)


@pytest.mark.parametrize("page", result_tables.PAGES)
def test_tables_are_those_of_the_stored_results(page):
    """`python -m benchmarks.result_tables` writes them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(r"<!-- (\w+) -->\n\|", text)
    assert result_tables.update_tables(text) == text
