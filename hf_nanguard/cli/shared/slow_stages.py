"""Says on the error output what a command is doing, once a stage takes longer than a moment."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

PATIENCE = 2.0  # seconds
IMPORTS = "importing the libraries"


def slow_imports() -> AbstractContextManager[object]:
    """Says on a terminal that imports take a while. Elsewhere the error output is for errors."""
    return slow_stages(IMPORTS) if sys.stderr.isatty() else nullcontext()


@contextmanager
def slow_stages(stage: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that sets the current stage. Each that takes more than `PATIENCE` seconds is printed, once."""
    stop = threading.Event()

    def show() -> None:
        shown = ""
        while not stop.wait(PATIENCE):
            if stage != shown:
                print(f"nanguard: {stage} ...", file=sys.stderr, flush=True)
                shown = stage

    def say(text: str) -> None:
        nonlocal stage
        stage = text

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        stop.set()
        thread.join()
