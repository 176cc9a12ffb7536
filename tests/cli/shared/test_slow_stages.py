"""What a command is doing is said once per stage, and imports are mentioned on a terminal only."""

import sys
import time

import pytest

from hf_nanguard.cli.shared import slow_stages as module


def wait_for(text: str, capsys: pytest.CaptureFixture) -> str:
    """Waits until a text was printed to the error output; returns all that was."""
    shown, deadline = "", time.monotonic() + 60
    while text not in shown and time.monotonic() < deadline:
        shown += capsys.readouterr().err
        time.sleep(0.01)
    return shown


def test_a_slow_stage_is_named_once(monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", 0.001)
    with module.slow_stages("reading") as say:
        first = wait_for("reading", capsys)
        say("writing")
        second = wait_for("writing", capsys)
    assert first + second == "nanguard: reading ...\nnanguard: writing ...\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_imports_are_mentioned_on_a_terminal(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", 0.001)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with module.slow_imports():
        shown = wait_for(module.IMPORTS, capsys) if is_terminal else ""
        time.sleep(0.05)
    assert (shown + capsys.readouterr().err).count(module.IMPORTS) == is_terminal
