"""One rank of a guarded run whose saves are poisoned on disk, and of its resume.

python -m torch.distributed.run --nproc_per_node 2 tests/distributed/custody_worker.py custody <folder> [<case> ...]
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.distributed.ending import hang_up
from tests.laws.test_custody import SAVES, PoisonedSave, checkpoints
from tests.trainers import build, events_of

CASES = {"poisoned": (3, 4), "healthy": ()}


def play(name: str, folder: Path) -> dict[str, Any]:
    """Trains four steps, then resumes for a fifth; returns what this rank has seen."""
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
