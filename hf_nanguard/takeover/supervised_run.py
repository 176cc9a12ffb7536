"""`nanguard run --resume`: runs the script in a child process and starts it again after a crash, a halt or a kill.

Imports only the standard library. What the restarted script resumes from is decided in its own process
(`resumed_training.py`).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..command_exit import handled_signals
from .run_progress import Progress

if sys.platform == "win32":
    ENDING = FORWARDED = (signal.SIGTERM,)
else:
    ENDING = (signal.SIGTERM, signal.SIGHUP)
    FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
Environment = dict[str, str]


@dataclass(frozen=True)
class Failure:
    """How a child process ended: an uncaught error, a signal or an exit code, and the last step that it had begun."""

    reason: str
    step: int | None

    def __str__(self) -> str:
        return f"{self.reason} {'before the first step' if self.step is None else f'at step {self.step}'}"


class Supervisor:
    """Starts a command until it ends well, gives up, or is asked to stop. `say` is called with a sentence about each restart."""

    def __init__(self, max_restarts: int, say: Callable[[str], None], first_wait: float = FIRST_WAIT):
        self.max_restarts = max_restarts
        self.say = say
        self.wait = first_wait
        self.child: subprocess.Popen | None = None
        self.is_asked_to_stop = False

    def run(self, command: Sequence[str], build: Callable[[Progress, str | None], Environment]) -> int:
        """Returns the exit code of the last child. `build` returns the environment of an attempt, given why it is needed."""
        with self._noted_progress() as progress, handled_signals(FORWARDED, self._forward):
            before = None
            for num_restarts in range(self.max_restarts + 1):
                code = self._run_once(command, build(progress, None if before is None else str(before)))
                if code == 0 or self.is_asked_to_stop:
                    return code
                failure = Failure(progress.read_error() or format_end(code), progress.read_step())
                if why := self._find_obstacle(failure, before, code, num_restarts):
                    self.say(f"ended by {failure}; not restarted because {why}.")
                    return code
                self.say(f"ended by {failure}; restart {num_restarts + 1} of {self.max_restarts} in {self.wait:g} s.")
                self._sleep()
                if self.is_asked_to_stop:
                    return code
                progress.clear()
                before = failure
        raise AssertionError("the last attempt ends the loop")

    @contextmanager
    def _noted_progress(self) -> Iterator[Progress]:
        """Makes a folder for the notes of the script, for the duration of the block."""
        with ExitStack() as stack:
            folder = os.devnull  # under which nothing can be noted
            try:
                made = tempfile.TemporaryDirectory(prefix="nanguard-run-", ignore_cleanup_errors=True)
                folder = stack.enter_context(made)
            except OSError as error:
                self.say(
                    f"no temporary folder can be made ({error}), so the step at which the script ends is not known: it is "
                    "restarted after a signal only."
                )
            yield Progress(folder)

    def _find_obstacle(self, failure: Failure, before: Failure | None, code: int, num_restarts: int) -> str | None:
        if failure == before:
            return "the same failure came back at the same step"
        if failure.step is None and code > 0:
            return "no step was taken"
        return f"it was restarted {num_restarts} times" if num_restarts == self.max_restarts else None

    def _run_once(self, command: Sequence[str], environment: Environment) -> int:
        self.child = subprocess.Popen(command, env=environment)
        while True:
            try:
                return self.child.wait()
            except KeyboardInterrupt:  # of the terminal, which the child has received too
                self.is_asked_to_stop = True

    def _sleep(self) -> None:
        end = time.monotonic() + self.wait
        self.wait = min(self.wait * 2, LONGEST_WAIT)
        while not self.is_asked_to_stop and time.monotonic() < end:
            try:
                time.sleep(min(0.2, max(end - time.monotonic(), 0.0)))
            except KeyboardInterrupt:
                self.is_asked_to_stop = True

    def _forward(self, number: int, frame: object) -> None:
        """Handles a signal: the child gets it too."""
        self.is_asked_to_stop = self.is_asked_to_stop or number in ENDING
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)


def format_end(code: int) -> str:
    """Returns how a process ended, in words."""
    if code > 0:
        return f"exit code {code}"
    return (
        signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    )  # real-time signals have no name


def end_alike(code: int) -> int:
    """Returns the exit code for this process to end as its child did, or ends it by the same signal."""
    if code < 0 and sys.platform != "win32":
        number = -code
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return code
