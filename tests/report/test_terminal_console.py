"""The console: whatever is printed, in a line, a table, a progress bar or the log, cannot steer the terminal."""

import logging
from io import StringIO

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hf_nanguard.cli.shared.live_output import guard_log, progress
from hf_nanguard.report.terminal_console import build_console, print_line
from tests.test_plain_text import HOSTILE, STEERING

SHOWN = ":smile: [bold]loud[/bold]"
EVIL = f"{SHOWN} {HOSTILE}"


def in_line(console):
    console.print(EVIL)
    console.print(EVIL, soft_wrap=True)


def in_text(console):
    console.print(Text.assemble("a ", (EVIL, "bold")))


def in_table(console):
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    table.add_row(Text(EVIL, "red"))
    console.print(table)


def in_panel(console):
    console.print(Panel(EVIL, title=Text(EVIL)))


def in_log(console):
    with guard_log(console):
        logging.getLogger("hf_nanguard").warning("%s", EVIL)
        logging.getLogger("hf_nanguard").warning(EVIL)


def in_progress(console):
    with progress(console) as begin:
        begin(EVIL, 1)(1, EVIL, True)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("put", [in_line, in_text, in_table, in_panel, in_log, in_progress])
def test_nothing_steers_the_terminal_and_markup_is_shown_as_it_is(put, terminal):
    file = StringIO()
    console = build_console(file=file, force_terminal=terminal, width=400, color_system=None)
    put(console)
    text = file.getvalue()
    assert SHOWN in text
    assert "]0;title" in text, "the escape character is gone, not the text behind it"
    own = {"\x1b", "\r"} if terminal and put is in_progress else set()  # a bar moves the cursor itself
    assert not (STEERING - own) & set(text)
    assert "\x1b[31m" not in text
    assert "\x1b]0" not in text


def test_a_style_that_is_ours_stays():
    file = StringIO()
    build_console(file=file, force_terminal=True, color_system="standard").print(Text("best", "green"))
    assert file.getvalue() == "\x1b[32mbest\x1b[0m\n"


def test_a_line_is_one_line():
    file = StringIO()
    print_line(build_console(file=file, width=20), f"path: {'x' * 50}\nfake")
    assert file.getvalue() == f"path: {'x' * 50} fake\n"
