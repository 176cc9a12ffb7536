"""One rank: plays the scenarios it is given and writes down what came of each.

python -m torch.distributed.run --nproc_per_node 2 tests/distributed/worker.py <suite> <folder> [<scenario> ...]
"""

import hashlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from hf_nanguard import NonFiniteError
from hf_nanguard.core.rerun.snapshot import Snapshot
from hf_nanguard.hf.trainer.guarded_step import GuardedStep
from hf_nanguard.hf.trainer.trainer_runner import TrainerRunner
from hf_nanguard.testing import PlantedFaults
from tests.distributed.ending import hang_up, play_case
from tests.distributed.host import make_trainer, rows_of
from tests.distributed.making import plant_in_making
from tests.distributed.scenario import SUITES, Scenario
from tests.distributed.sharding import shard_on_cpu
from tests.reference import counted_tokens, losses_of, tensors_of

PATIENCE = 40
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list", "reduce",
    "reduce_scatter_tensor", "gather", "gather_object", "scatter", "barrier",
)  # fmt: skip


class Culprits(PlantedFaults):
    """The injector, with the faults that only several ranks need, and a record of the rows of every batch."""

    def __init__(self, trainer: Any, faults: tuple):
        super().__init__(trainer, faults)
        self.rows: dict[str, list[int]] = {}
        plant_in_making(trainer, self.faults, self.triggered)
        plant_in_snapshots(self.faults, self.triggered)
        plant_in_runners(self.faults, self.triggered)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        place = self.place(inputs)
        self.rows.setdefault(f"{place[0]},{place[1]}", rows_of(inputs))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        for fault in self.faults:
            if (fault.step, fault.micro_step) == place and fault.kind == "late_error":
                raise RuntimeError("planted error")
        return loss

    compute_loss.__module__ = PlantedFaults.__module__  # no loss of the user's own, whose labels would not be judged


def plant_in_snapshots(faults: tuple, triggered: list) -> None:
    """Makes the copy of the state fail before the steps of `snapshot` faults."""
    planted = {fault.step: fault for fault in faults if fault.kind == "snapshot"}
    take = Snapshot.take if not hasattr(Snapshot, "real_take") else Snapshot.real_take

    def failing(step: int, *args: Any) -> Snapshot:
        if step in planted:
            triggered.append(planted.pop(step))
            raise MemoryError("planted")
        return take(step, *args)

    Snapshot.real_take, Snapshot.take = take, failing


def plant_in_runners(faults: tuple, triggered: list) -> None:
    """Makes the guard's runner fail when it is built for `runner` faults, once each."""
    planted = [fault for fault in faults if fault.kind == "runner"]
    build = GuardedStep._build_runner if not hasattr(GuardedStep, "real_build") else GuardedStep.real_build

    def failing(steps: GuardedStep, model: nn.Module) -> TrainerRunner:
        if planted:
            triggered.append(planted.pop())
            raise RuntimeError("planted")
        return build(steps, model)

    GuardedStep.real_build, GuardedStep._build_runner = build, failing


def gathered(tensor: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(tensor: Tensor) -> str:
    """Returns a hash of dtype, shape and bytes."""
    array = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + array.tobytes()).hexdigest()[:16]


def digest_rng() -> str:
    """Returns a hash of all random states of this process."""
    keys, position = np.random.get_state()[1:3]
    state = repr((random.getstate(), keys.tolist(), position)).encode() + torch.get_rng_state().numpy().tobytes()
    return hashlib.sha256(state).hexdigest()[:16]


def play(scenario: Scenario, folder: Path, guarded: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Runs one training and returns what there is to say about it."""
    trainer = make_trainer(
        scenario,
        str(folder),
        dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]),
        guarded,
    )
    planted = Culprits(trainer, scenario.faults if guarded else scenario.stock_faults)
    outcome = "finished"
    with watched_messages(scenario.profiled) as seen:
        try:
            trainer.train()
        except NonFiniteError as error:
            outcome = f"NonFiniteError: {error}"
    messages = seen()
    is_sharded = any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    assert is_sharded == bool(trainer.args.fsdp)
    rng = digest_rng()
    tensors = {name: gathered(tensor) for name, tensor in tensors_of(trainer).items() if name != "rng"}
    said = {
        "outcome": outcome,
        "tensors": {name: digest(tensor) for name, tensor in tensors.items()},
        "rng": rng,
        "bad": [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()],
        "schedule": trainer.lr_scheduler.state_dict()["last_epoch"],
        "global_step": trainer.state.global_step,
        "losses": losses_of(trainer),
        "rows": planted.rows,
        "tokens": getattr(trainer, "num_tokens", vars(trainer).get("_total_train_tokens")),
        "logged_tokens": counted_tokens(trainer),
        "struck": len(planted.triggered),
        "messages": dict(messages),
    }
    return said, tensors


@contextmanager
def watched_messages(profiled: bool) -> Iterator[Callable[[], Counter]]:
    """Counts messages between ranks: those sent from Python, or, at some cost, DDP's own as well."""
    sent: Counter = Counter()

    def counting(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent[name] += 1
            return function(*args, **kwargs)

        return call

    before = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in before.items():
        setattr(dist, name, counting(name, function))
    try:
        with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext() as seen:
            yield (
                lambda: (
                    sent + Counter(e.name for e in (seen.events() if profiled else ()) if e.name.startswith("c10d::"))
                )
            )
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def compare(scenario: Scenario, home: Path, references: dict[str, Any]) -> dict[str, Any]:
    """Plays a scenario under guard, and compares it with the stock run that it should equal."""
    said, tensors = play(scenario, home / "guarded", guarded=True)
    if scenario.compared:
        key = repr(replace(scenario, name="", way="", faults=(), guard={}, events=()))
        if key not in references:
            references[key] = play(scenario, home / "stock", guarded=False)
        said["stock"], stock = references[key]
        said["apart"] = {
            n: float((tensors[n].double() - stock[n].double()).abs().max())
            for n in tensors
            if not torch.equal(tensors[n], stock[n])
        }
    return said


def main() -> None:
    suite, folder, *names = sys.argv[1:]
    if suite.startswith("fsdp"):
        shard_on_cpu()
    known = {scenario.name: scenario for scenario in SUITES[suite]}
    references: dict[str, Any] = {}
    for name in names or known:
        home = Path(folder) / name
        print(f"rank {os.environ['RANK']}: {name}", flush=True)
        play_case(home, partial(compare, known[name], home, references), PATIENCE)
    hang_up()


if __name__ == "__main__":
    main()
