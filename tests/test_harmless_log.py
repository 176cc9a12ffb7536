"""A log that cannot be written costs its lines: not the run, its exit code, or the part of the guard that has logged."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_nanguard.testing import Fault, plant
from tests.reference import assert_same, tensors_of, without
from tests.trainers import build, events_of, stock_class

ROOT = Path(__file__).parents[1]
LOG = "import logging, sys, hf_nanguard\nlogger = logging.getLogger('hf_nanguard')\n{}\nlogger.warning('lost')\nprint('end')\n"
SCRIPTS = {
    "last resort": "",
    "handler": "logging.basicConfig()",
    "closed": "sys.stderr.close()",
    "none": "sys.stderr = None",
    "own object": "sys.stderr = type('Own', (), {'write': lambda self, text: 1 / 0, 'flush': lambda self: None})()",
}


def _run(words, stderr):
    """Runs Python with an error output that is buffered, as it is unless somebody asks for another."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=100,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.fixture(params=["full", "no reader"])
def unwritable(request):
    """An error output to which nothing can be written."""
    if request.param == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_line_that_cannot_be_written_is_lost(name, unwritable):
    done = _run(["-c", LOG.format(SCRIPTS[name])], unwritable)
    assert (done.returncode, done.stdout) == (0, "end\n")


def test_what_the_script_could_not_write_is_still_its_own(unwritable):
    """Python ends with 120 because of it, as without the guard."""
    wrote = "sys.stderr.reconfigure(line_buffering=False)\nsys.stderr.write('mine')"
    assert _run(["-c", LOG.format(wrote)], unwritable).returncode == 120


def test_a_line_that_can_be_written_is_written():
    done = _run(["-c", LOG.format("")], subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "lost\n")


def test_a_run_whose_error_output_is_full_ends_as_stock(tmp_path):
    script = str(ROOT / "tests" / "scripts" / "weighted.py")
    with open("/dev/full", "w") as full:
        stock = _run([script, "--output_dir", str(tmp_path / "stock")], full)
        guarded = _run(["-m", "hf_nanguard.run", script, "--output_dir", str(tmp_path / "guarded")], full)
    assert (stock.returncode, guarded.returncode) == (0, 0)
    assert (tmp_path / "guarded" / "nanguard" / "events.jsonl").read_text().count("\n") == 1


class Raising(logging.Handler):
    """A handler of the user's that fails."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.num_records = 0

    def emit(self, record):
        self.num_records += 1
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), ValueError("I/O operation on closed file"), Exception()], ids=repr
)
def test_a_handler_that_raises_is_no_failure_of_the_guard(error, tmp_path):
    handler, logger = Raising(error), logging.getLogger("hf_nanguard")
    logger.addHandler(handler)
    try:
        trainer = build("plain", tmp_path / "guarded")
        planted = plant(trainer, Fault("loss", step=1, micro_step=1))
        trainer.train()
    finally:
        logger.removeHandler(handler)
    assert planted.triggered
    assert handler.num_records
    stock = build("plain", tmp_path / "stock", without(stock_class("plain"), (1, 1)), guard=False)
    stock.train()
    assert_same(tensors_of(trainer), tensors_of(stock))
    assert [(event["signal"], event["action"]) for event in events_of(trainer)] == [("loss_nonfinite", "dropped")]


def test_ctrl_c_in_a_handler_is_ctrl_c():
    handler, logger = Raising(KeyboardInterrupt()), logging.getLogger("hf_nanguard")
    logger.addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            logger.warning("interrupted")
    finally:
        logger.removeHandler(handler)
