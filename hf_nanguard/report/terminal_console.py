"""The console of commands and recipes: whatever is printed on it cannot steer the terminal."""

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..plain_text import printable

WIDTH = 100  # of output that is not a terminal
TITLE_WIDTH = 26  # of the name of a run before its progress
NUM_PROGRESS_LINES = 3  # per run

# Called with the number of steps done, a short text about them, and whether these are the last.
Report = Callable[[int, str, bool], None]


class PlainConsole(Console):
    """A console that shows text as it is: no markup, no emoji names, and no character that is not printable.

    Styles of tables and of `Text` objects stay, because they are not part of the text.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep_newlines=True), style, control)


def build_console(**options: Any) -> PlainConsole:
    """Returns a console as wide as the terminal, or of a fixed width if there is none."""
    options = {"markup": False, "emoji": False, "highlight": False, **options}
    console = PlainConsole(**options)
    return console if console.is_terminal else PlainConsole(**{"width": WIDTH, **options})


def print_line(console: Console, text: str) -> None:
    """Prints a text as one line, however long and whatever is in it."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def print_progress(console: Console, title: str, total: int) -> Report:
    """Returns a function that prints the progress of a run with this name and number of steps, in a few lines."""

    def report(step: int, text: str, is_last: bool) -> None:
        if step % max(round(total / NUM_PROGRESS_LINES), 1) == 0 or step == total or is_last:
            console.print(f"{title:<{TITLE_WIDTH}} step {step:>4}/{total}  {text}".rstrip())

    return report
