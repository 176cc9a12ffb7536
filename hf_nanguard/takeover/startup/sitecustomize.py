"""Python imports this when a process of `nanguard run` starts: the script, a launcher's rank, a spawned worker.

`nanguard run` puts this folder first on `PYTHONPATH`. Only modules that are part of every Python process are imported here,
because a script may have modules of its own by any name. Once the process imports `transformers.trainer`, its trainers are
taken over. This file hides the `sitecustomize` that the machine or the user may have, so it runs that one too.
"""

import atexit
import os
import sys
from _frozen_importlib import module_from_spec

HERE = os.path.dirname(__file__)
HOST = "transformers.trainer"
# The id of the process that `nanguard run` became, a space, and JSON for `guarded_processes.take_over`.
VARIABLE = "HF_NANGUARD_RUN"
PROGRAMS = ("python", "torchrun", "accelerate", "deepspeed")
WITHOUT_SITE = set("IES")  # flags of Python that ignore PYTHONPATH or do not import this file


class ImportHook:
    """Finder in `sys.meta_path` that calls `then` once with the module `name`, before the importer gets it."""

    def __init__(self, name, then):
        self.name = name
        self.then = then

    def find_spec(self, name, path=None, target=None):
        """Returns the spec that the other finders return, if it is of the module that is waited for."""
        if name != self.name:
            return None
        specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module):
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Process:
    """What the guard does in a process from its start to its end."""

    def __init__(self):
        self.takeover = None
        self.has_said = False

    def start(self):
        """Waits for `transformers.trainer`, and for child processes that cannot be guarded."""
        sys.meta_path.insert(0, ImportHook(HOST, self.take_over))
        sys.addaudithook(self.watch_children)
        atexit.register(self.end)  # the first to be registered is the last to be called

    def take_over(self, module):
        """Guards the trainers that this process builds from now on."""
        package = os.path.dirname(os.path.dirname(HERE))
        try:
            sys.path.append(os.path.dirname(package))  # where it is if this Python does not have it
            try:
                ours = __import__("hf_nanguard.takeover.guarded_processes", fromlist=["take_over"])
            finally:
                sys.path.pop()
            self.takeover = ours.take_over(os.environ.get(VARIABLE, ""))
        except Exception as error:  # the script imports transformers here, and that must not fail because of the guard
            say(f"this process is not guarded because of {type(error).__name__}: {error}")

    def watch_children(self, event, values):
        """Audit hook: says once that a Python process is started in a way that the guard does not reach."""
        if event not in ("subprocess.Popen", "os.posix_spawn", "os.exec") or self.has_said:
            return
        try:
            program, words, environment = values[0], values[1], values[-1]
            words = [os.fsdecode(word) for word in ([words] if isinstance(words, str | bytes) else words)]
            if not any(
                os.path.basename(word).startswith(PROGRAMS) for word in (os.fsdecode(program or ""), *words[:2])
            ):
                return
            if any(
                WITHOUT_SITE & set(flag) for flag in find_flags(words) if flag[:1] == "-" and flag[1:2] not in "-WX"
            ):
                self.say_unguarded("with -I, -E or -S")
            elif VARIABLE not in {os.fsdecode(name) for name in (os.environ if environment is None else environment)}:
                self.say_unguarded(f"without {VARIABLE} in its environment")
        except Exception:  # of arguments that the call itself will refuse; an error here would be the script's
            return

    def say_unguarded(self, how):
        """Says that a child process is not guarded."""
        self.has_said = True
        say(f"a child process is started {how}, so its trainers are not guarded.")

    def end(self):
        """Reports the events, or that there was nothing to guard."""
        if self.takeover is not None:
            self.takeover.report_events()
        is_main = os.environ.get(VARIABLE, "").split(" ")[0] == str(os.getpid()) and os.environ.get("RANK", "0") == "0"
        has_failed = getattr(sys, "last_value", None) is not None
        had_children = any(os.times()[2:4])  # the processor time of children
        if is_main and not has_failed and not had_children and (self.takeover is None or not self.takeover.num_built):
            say("no Trainer was built, so nothing was guarded.")


def find_flags(words):
    """Returns the flags of Python in the command line of a process, before what it runs."""
    flags, rest = [], iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            break
        is_cluster = not word.startswith(("--", "-W", "-X"))
        if is_cluster and word[-1] in "mc":  # a module or code follows, e.g. -Bm
            flags += [word[:-1]] if len(word) > 2 else []
            break
        flags += [word, next(rest)] if word in ("-W", "-X", "--check-hash-based-pycs") else [word]
    return flags


def say(sentence):
    """Prints a message on standard error, because standard output belongs to the script. One that cannot be written is lost:
    in a buffer it would make Python end with an exit code of its own."""
    line = f"nanguard: {sentence}\n"
    try:
        if sys.stderr is None:  # closed before Python started; `print` would take standard output
            return
        if sys.stderr is sys.__stderr__ and sys.__stderr__ is not None:
            sys.__stderr__.flush()
            os.write(sys.__stderr__.fileno(), line.encode(errors="backslashreplace"))
        else:
            print(line, end="", file=sys.stderr)
    except (OSError, ValueError):  # full or closed
        return


def run_hidden():
    """Runs the `sitecustomize` that Python would have imported without this one; its errors are reported by Python."""
    specs = (finder.find_spec("sitecustomize", None, None) for finder in list(sys.meta_path))
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")  # as without this file
    sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sitecustomize"])


if __name__ == "sitecustomize":
    sys.path[:] = [folder for folder in sys.path if folder != HERE]
    if VARIABLE in os.environ:
        Process().start()
    run_hidden()
