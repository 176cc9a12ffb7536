"""One rank of hand-written loops over a model whose attention turns one-hot, replicated or sharded.

python -m torch.distributed.run --nproc_per_node 2 tests/distributed/attention_worker.py attention <folder> <case> ...
"""

import json
import logging
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trl.trainer.utils import add_fused_lm_head

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.monitor_set import MonitorSet
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.hf.monitors.attention_monitor import AttentionMonitor
from hf_nanguard.hf.monitors.attention_probe import AttentionProbe
from tests.distributed.ending import hang_up
from tests.models import VOCAB, tiny_llama

PATIENCE = 60
NUM_STEPS = 14
FAILS = {  # on rank 1, in the check of step 2: the monitor, before its exchange or after it
    "ddp-fails-before": partial(patch.object, AttentionProbe, "finish", side_effect=MemoryError),
    "ddp-fails-after": partial(patch.object, AttentionProbe, "read", side_effect=MemoryError),
}
CASES = ("ddp", "ddp-healthy", "fsdp", "fsdp-fused", *FAILS)


def fail(model, module, batch, case: str) -> dict:
    """Trains with a set of monitors; returns how many of them are left after each step, and the events of this rank."""
    ranks, events, left = Ranks(), [], []
    monitor_set = MonitorSet(Journal(ranks, events.append))
    monitor_set.begin((AttentionMonitor(module, monitor_set.journal, 2, early=()),))
    for step in range(6):
        with FAILS[case]() if (step, ranks.rank) == (3, 1) else nullcontext():
            monitor_set.begin_step(step)
            model(**batch).loss.backward()
            monitor_set.end_backward()
            monitor_set.before_update()
            monitor_set.after_update()
        left.append(len(monitor_set.monitors))
    return {"left": left, "events": events}


def play(model, module, batch, planted: bool) -> dict:
    """Trains; from step 4 on the queries of layer 1 grow. Returns metrics of every step and the events of this rank."""
    ranks, events = Ranks(), []
    monitor = AttentionMonitor(module, Journal(ranks, events.append), 1, early=())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rows = []
    for step in range(NUM_STEPS):
        if planted and step >= 4:
            with torch.no_grad():
                module.model.layers[1].self_attn.q_proj.weight *= 4
        monitor.begin_step(step)
        model(**batch).loss.backward()
        monitor.end_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        monitor.after_update(step)
        rows.append(monitor.metrics())
    return {"rows": rows, "events": events, "said": sorted(monitor.warned)}


def shard(module) -> None:
    """Shards layer by layer, as accelerate does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def main(folder: str, *cases: str) -> None:
    """Plays the cases and writes down what came of each."""
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    rank = dist.get_rank()
    length = 8 if rank else 3  # too short to have an entropy: only rank 1 sees the collapse
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(rank))
    for case in cases:
        module = tiny_llama(dropout=0.0)
        add_fused_lm_head(module)
        if case.startswith("ddp"):
            model = DistributedDataParallel(module)
        else:
            shard(module)
            model = module
        batch = {"input_ids": ids, "labels": ids, "fused_lm_head": case == "fsdp-fused"}
        came = fail(model, module, batch, case) if case in FAILS else play(model, module, batch, case != "ddp-healthy")
        outcome = {"outcome": "finished", **came}
        path = Path(folder) / case / f"rank{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcome), encoding="utf-8")
    hang_up()


if __name__ == "__main__":
    main(*sys.argv[2:])
