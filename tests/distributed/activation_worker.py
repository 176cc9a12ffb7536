"""One rank whose activations are monitored; the last rank's go bad at step 3. Prints a line of JSON a step.

python -m torch.distributed.run --nproc_per_node 2 tests/distributed/activation_worker.py <ddp|fsdp> <folder>
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.activations import ActivationMonitor
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.testing import OperationCounter
from tests.distributed.ending import hang_up
from tests.models import tiny_llama


def main(kind: str, folder: Path) -> None:
    """Plays five steps of which the first, second and fourth are due."""
    dist.init_process_group("gloo")
    ranks, events, told = Ranks(), [], []
    model = tiny_llama(dropout=0.0)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (ranks.size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    monitor = ActivationMonitor(model, Journal(ranks, events.append), 2, early=(1,))
    for step in range(5):
        ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(10 * ranks.rank + step))
        monitor.begin_step(step)
        if (step, ranks.rank) == (3, ranks.size - 1):
            model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * float("nan"))
        wrapped(input_ids=ids, labels=ids).loss.backward()
        with OperationCounter() as count:
            monitor.end_backward(step)
        messages = sum(number for op, number in count.op_counts.items() if "allreduce" in op)
        told.append({"metrics": monitor.metrics(), "messages": messages, "reads": count.num_reads})
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    said = {"steps": told, "events": events, "hooks": hooks}
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(said), encoding="utf-8")
    hang_up()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
