"""How the ranks of a test play a case, and how they part."""

import atexit
import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist


def play_case(home: Path, play: Callable[[], dict[str, Any]], patience: float) -> None:
    """Writes what this rank says of a case, or why it failed. A rank that hangs is ended, with the place where it hangs."""
    home.mkdir(parents=True, exist_ok=True)
    logging.getLogger("hf_nanguard").setLevel(logging.ERROR)
    faulthandler.dump_traceback_later(patience, exit=True)
    try:
        said = play()
    except Exception:
        said = {"outcome": traceback.format_exc()}
        raise
    finally:
        (home / f"rank{os.environ['RANK']}.json").write_text(json.dumps(said), encoding="utf-8")
    faulthandler.cancel_dump_traceback_later()


def play_cases(play: Callable[[str], dict[str, Any]], known: Iterable[str], patience: float) -> None:
    """Plays the cases that the command line of a worker names behind the folder, all known ones if it names none."""
    _, _, folder, *names = sys.argv
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for name in names or known:
        play_case(Path(folder) / name, partial(play, name), patience)
    hang_up()


def hang_up() -> None:
    """Ends the process group once every rank has said all it has to say, then the process.

    A barrier alone does not do: who leaves it first and closes its connections makes it fail for the others. So they count
    themselves in the launcher's store, which outlives them.

    The process ends without the finalization of the interpreter, in which torch 2.13 aborts now and then, also without the
    guard: a thread of gloo may still release a tensor there, and taking the GIL ends the thread ("terminate called
    without an active exception", pytorch#190489). What is registered with `atexit` still runs.
    """
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    dist.barrier()
    store.add("hung_up", 1)
    while store.add("hung_up", 0) < world:
        time.sleep(0.05)
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
