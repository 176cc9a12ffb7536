"""The curves of a run: what was logged, what the guard did, and runs that resume each other."""

import json
import math

import pytest

from hf_nanguard import ArgumentError
from hf_nanguard.report.run_curves import read_curves
from hf_nanguard.report.run_plot import draw_run


def row(step, run="a", **values):
    return {"run": run, "step": step, **values}


def event(step, action="skipped", run="a"):
    return {"run": run, "step": step, "action": action, "signal": "loss_nonfinite", "message": "loss is nan"}


@pytest.fixture
def write(tmp_path):
    folder = tmp_path / "nanguard"
    folder.mkdir()

    def write(rows, events=(), extra=""):
        for name, items in (("metrics.jsonl", rows), ("events.jsonl", events)):
            (folder / name).write_text("".join(json.dumps(item) + "\n" for item in items) + extra)
        return tmp_path

    return write


def test_rows_of_a_step_are_joined_and_strings_are_numbers(write):
    folder = write([row(1, loss=2.0), row(1, eval_loss=1.0, grad_norm="inf"), row(2, loss="nan", learning_rate=0.1)])
    curves = read_curves(folder)
    assert curves.rows[1] == {"loss": 2.0, "grad_norm": math.inf}
    steps, losses = curves.series("loss")
    assert steps == [1, 2]
    assert losses[0] == 2.0
    assert math.isnan(losses[1])


def test_only_what_the_guard_did_is_marked(write):
    curves = read_curves(write([row(1, loss=1.0)], [event(1), event(2, "observed"), event(3, "rewound")]))
    assert [(mark.step, mark.action) for mark in curves.marks] == [(1, "skipped"), (3, "rewound")]
    assert curves.count_actions() == {"skipped": 1, "rewound": 1}


def test_a_step_with_several_events_counts_once(write):
    """A skipped step has one for each bad micro-batch, and one line in the picture."""
    assert read_curves(write([row(1, loss=1.0)], [event(1), event(1), event(2)])).count_actions() == {"skipped": 2}


def test_a_resumed_run_continues_and_replaces_what_it_ran_again(write):
    rows = [row(step, "a", loss=1.0) for step in (1, 2, 3, 4)] + [row(step, "b", loss=2.0) for step in (3, 4, 5)]
    curves = read_curves(write(rows, [event(2, run="a"), event(4, run="a"), event(4, run="b")]))
    assert curves.series("loss") == ([1, 2, 3, 4, 5], [1.0, 1.0, 2.0, 2.0, 2.0])
    assert [mark.step for mark in curves.marks] == [2, 4]


def test_an_unrelated_run_in_the_same_folder_takes_its_place(write):
    curves = read_curves(write([row(1, "a", loss=1.0), row(2, "a", loss=1.0), row(1, "b", loss=5.0)]))
    assert curves.series("loss") == ([1], [5.0])


def test_bad_lines_and_values_are_left_out(write):
    rows = [row(1, loss=1.0), row("x", loss=1.0), row(True, loss=1.0), row(2, loss=[1]), row(3, loss=None)]
    events = [{"signal": "loss_zero", "action": "skipped", "message": "\x1b[2J"}, {"step": 3, "no": "event"}]
    curves = read_curves(write(rows, events, extra='{"step": 4, "lo'))
    assert curves.series("loss") == ([1], [1.0])
    assert curves.num_invalid == 3
    assert curves.marks == []  # an event without a step has no place in a plot


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ArgumentError, match="No run of a guarded trainer"):
        read_curves(tmp_path)


@pytest.mark.parametrize("name", ["run.svg", "run.png"])
def test_a_picture_is_drawn(name, write):
    rows = [row(step, loss=10.0**-step, grad_norm=1.0, learning_rate=0.1) for step in range(1, 5)]
    folder = write([*rows, row(5, loss="nan")], [event(2), event(3, "rewound")])
    draw_run(read_curves(folder), folder / name)
    content = (folder / name).read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    if name.endswith("svg"):
        assert all(text in content for text in (b"skipped (1)", b"rewound (1)", b"gradient norm", b"learning rate"))


def test_a_picture_is_the_same_each_time(write):
    folder = write([row(1, loss=1.0), row(2, loss=2.0)], [event(1)])
    for name in ("one.svg", "two.svg"):
        draw_run(read_curves(folder), folder / name)
    assert (folder / "one.svg").read_bytes() == (folder / "two.svg").read_bytes()


def test_a_name_cannot_inject_markup(write, tmp_path):
    folder = write([row(1, loss=1.0)])
    odd = tmp_path / "$\\frac{<script>alert(1)<"
    (tmp_path / "nanguard").rename(tmp_path / "kept")
    odd.mkdir()
    (tmp_path / "kept").rename(odd / "nanguard")
    draw_run(read_curves(odd), folder / "run.svg")
    content = (folder / "run.svg").read_bytes()
    assert b"alert(1)" in content
    assert b"<script" not in content


@pytest.mark.parametrize(
    "rows", [[], [row(1, loss="nan")], [row(1, eval_loss=1.0)], [row(1, loss=10**400)], [row(1, loss=1e308)]]
)
def test_nothing_to_draw_is_said(rows, write):
    folder = write(rows)
    with pytest.raises(ArgumentError, match="has no logged loss"):
        draw_run(read_curves(folder), folder / "run.svg")


def test_another_format_is_refused(write):
    folder = write([row(1, loss=1.0)])
    with pytest.raises(ArgumentError, match=r"ends in \.svg or \.png"):
        draw_run(read_curves(folder), folder / "run.pdf")
