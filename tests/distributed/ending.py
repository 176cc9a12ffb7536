"""How the ranks of a test part."""

import atexit
import os
import sys
import time

import torch.distributed as dist


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
