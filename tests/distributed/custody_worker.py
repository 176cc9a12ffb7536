"""One rank of a guarded run whose saves are poisoned on disk, and of its resume.

python -m torch.distributed.run --nproc_per_node 2 tests/distributed/custody_worker.py custody <folder> [<case> ...]
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_nanguard import GuardArguments, NonFiniteError
from tests.distributed.ending import hang_up
from tests.distributed.scenario import FSDP
from tests.distributed.sharding import shard_on_cpu
from tests.laws.test_custody import SAVES, PoisonedSave, checkpoints, poison
from tests.trainers import build, events_of

CASES = {"poisoned": (3, 4), "healthy": ()}
BAD_STARTS = ("halt", "repair", "observe")
SHARDED = "sharded"  # the last, because accelerate stays sharded


def play_bad_start(setting: str, folder: Path) -> dict[str, Any]:
    """Trains two steps, and resumes from the second checkpoint, which has become bad, by its path."""
    first = build("plain", folder / "run", **{**SAVES, "max_steps": 2})
    first.train()
    bad = folder / "run" / "checkpoint-2"
    if first.args.should_save:
        poison(bad)
    dist.barrier()
    guard = GuardArguments(nanguard_on_bad_start=setting, nanguard_autopsy=False)
    resumed = build("plain", folder / "run", extra={"guard": guard}, **{**SAVES, "save_strategy": "no", "max_steps": 3})
    halt = None
    try:
        resumed.train(resume_from_checkpoint=str(bad))
    except NonFiniteError as error:
        halt = str(error)
    events = [(event["signal"], event["action"]) for event in events_of(resumed, resumed.args.process_index)]
    return {"halt": halt, "events": events, "step": resumed.state.global_step}


def play_sharded(folder: Path) -> dict[str, Any]:
    """Resumes a run whose last checkpoint has lost the second half of a shard."""
    shard_on_cpu()
    fsdp = {"fsdp": True, "fsdp_config": {**FSDP, "state_dict_type": "SHARDED_STATE_DICT"}}
    options = {**SAVES, **fsdp, "max_steps": 3}
    build("plain", folder / "run", **options).train()
    shard = folder / "run" / "checkpoint-3" / "pytorch_model_fsdp_0" / "__1_0.distcp"
    dist.barrier()
    if int(os.environ["RANK"]) == 0:
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    dist.barrier()
    resumed = build("plain", folder / "run", **{**options, "max_steps": 5})
    resumed.train(resume_from_checkpoint=True)
    whole = build("plain", folder / "whole", **{**options, "max_steps": 5, "save_strategy": "no"})
    whole.train()
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (resumed, whole)]
    return {"losses": losses, "events": [event["message"] for event in events_of(resumed, resumed.args.process_index)]}


def play(name: str, folder: Path) -> dict[str, Any]:
    """Trains four steps, then resumes for a fifth; returns what this rank has seen."""
    if name in BAD_STARTS:
        return play_bad_start(name, folder)
    if name == SHARDED:
        return play_sharded(folder)
    options = {**SAVES, "save_total_limit": 1}
    trainer = build("plain", folder / "run", **options)
    if trainer.args.should_save:
        PoisonedSave(trainer, *CASES[name])
    trainer.train()
    last_good = trainer.nanguard.custody.last_good
    resumed = build("plain", folder / "run", **{**options, "max_steps": 5})
    resumed.train(resume_from_checkpoint=True)
    first = resumed.state.log_history
    return {
        "last_good": str(last_good and last_good.name),
        "events": [event["signal"] for event in events_of(trainer, trainer.args.process_index)],
        "resumed_steps": sorted({row["step"] for row in first if "loss" in row}),
        "kept": checkpoints(folder / "run"),
        "weight": resumed.model.lm_head.weight.double().sum().item(),
    }


def main() -> None:
    _, folder, *names = sys.argv[1:]
    rank = int(os.environ["RANK"])
    for name in names:
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        try:
            said = {**play(name, place), "outcome": "done"}
        except Exception:
            said = {"outcome": traceback.format_exc()}
        (place / f"rank{rank}.json").write_text(json.dumps(said), encoding="utf-8")
    hang_up()


if __name__ == "__main__":
    main()
