"""The console of commands and recipes: whatever is printed on it cannot steer the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..plain_text import printable

WIDTH = 100  # of output that is not a terminal


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
