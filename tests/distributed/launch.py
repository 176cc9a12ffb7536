"""Starts the ranks, with a hard limit on time, and collects what they wrote.

A scenario that hangs or breaks takes its processes with it. The rest is then played by fresh ones, so that one failure
does not hide the others.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
LIMIT = 240
MAX_STARTS = 4


@dataclass
class Played:
    """What a suite left behind.

    Args:
        folder (`Path`):
            One folder a scenario.
        world (`int`):
            The number of ranks.
        codes (`list[int]`):
            The exit code of every start.
        outputs (`list[str]`):
            The end of the output of every start, by which an exit code is understood.
        troubles (`dict[str, str]`):
            Scenarios that hung, broke or were not reached, and the end of the output.
    """

    folder: Path
    world: int
    codes: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    troubles: dict[str, str] = field(default_factory=dict)

    def check_exits(self) -> None:
        """Asserts that the ranks were started once and ended without an error."""
        assert self.codes == [0], "\n".join(self.outputs)

    def ranks(self, name: str) -> list[dict[str, Any]]:
        """Returns what every rank said about a scenario."""
        assert name not in self.troubles, f"{name}: {self.troubles[name]}"
        return [json.loads(self._file(name, rank).read_text(encoding="utf-8")) for rank in range(self.world)]

    def is_done(self, name: str) -> bool:
        """Returns whether every rank came to the end of a scenario."""
        return all(self._file(name, rank).is_file() for rank in range(self.world)) and all(
            "Traceback" not in said["outcome"] for said in self.ranks(name)
        )

    def _file(self, name: str, rank: int) -> Path:
        return self.folder / name / f"rank{rank}.json"


def find_free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(world: int) -> list[str]:
    """The command that starts the ranks by torchrun."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(world),
        "--master_port",
        str(find_free_port()),
    ]


def accelerate_launch(world: int) -> list[str]:
    """The command that starts the ranks by accelerate; `--multi_gpu` is what makes it start several at all."""
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(world), "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(find_free_port()),
    ]  # fmt: skip


def play_suite(
    suite: str, names: list[str], folder: Path, world: int, launcher=torchrun, worker: Path = WORKER
) -> Played:
    """Plays all scenarios of a suite and returns what came of them."""
    played = Played(folder, world)
    left = list(names)
    while left and len(played.codes) < MAX_STARTS:
        code, output = _start([*launcher(world), str(worker), suite, str(folder), *left])
        played.codes.append(code)
        played.outputs.append(output[-3000:])
        done = [name for name in left if played.is_done(name)]
        rest = left[len(done) :]
        if rest:
            told = [
                said["outcome"] for rank in range(world) if (file := played._file(rest[0], rank)).is_file()
                for said in [json.loads(file.read_text(encoding="utf-8"))]
            ]  # fmt: skip
            played.troubles[rest[0]] = "\n".join([f"hung or broke, exit code {code}", *told, output[-3000:]])
        left = rest[1:]
    played.troubles.update((name, f"not reached, after trouble in {list(played.troubles)}") for name in left)
    return played


def _start(command: list[str]) -> tuple[int, str]:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher then ends its ranks, which are not of its process group
        output, _ = process.communicate(timeout=40)
        return -1, f"no end after {LIMIT} s\n{output}"
    return process.returncode, output
