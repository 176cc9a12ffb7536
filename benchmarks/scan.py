"""How many bytes `nanguard scan`, `cat` and the naive one-liner check in a second of CPU time, in one run on the same file.

    python benchmarks/scan.py --megabytes 1024 --rounds 5

The file is read once before, so that it lies in the page cache. The start of Python and torch is not counted. Shown is the best
of the rounds; `of cat` is the share of what `cat FILE > /dev/null` does.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result_tables import add_json_flag, publish
from hf_nanguard.checkpoints.scan import scan_paths
from hf_nanguard.checkpoints.tensor_check import Checks

SIDE = 2048  # of a square weight
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_cat(path: Path) -> None:
    with open("/dev/null", "wb") as nowhere:
        subprocess.run(["cat", str(path)], stdout=nowhere, check=True)


def run_naive(path: Path) -> None:
    assert not any(tensor.isnan().any() or tensor.isinf().any() for tensor in load_file(path).values())


def run_scan(path: Path) -> None:
    [result] = scan_paths([path], Checks())
    assert not result.findings


TITLES = {"cat": "`cat`", "naive": "`load_file`, then `isnan` and `isinf`", "scan": "`nanguard scan`"}
CONTENDERS: dict[str, Callable[[Path], None]] = {"cat": run_cat, "naive": run_naive, "scan": run_scan}


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(contender: Callable[[Path], None], path: Path) -> tuple[float, float]:
    """Returns gigabytes for each second of CPU time, and of the clock."""
    cpu, clock, size = cpu_seconds(), time.perf_counter(), path.stat().st_size / 1e9
    contender(path)
    return size / max(cpu_seconds() - cpu, 1e-9), size / (time.perf_counter() - clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_flag(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the command does: the scan has threads of its own
    print(f"{'dtype':<10} {'':<6} {'GB/CPU s':>9} {'GB/s':>7} {'of cat':>7} {'spread':>7}")
    rows = []
    for name, dtype in DTYPES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            number = max(arguments.megabytes * 2**20 // (SIDE * SIDE * dtype.itemsize), 1)
            save_file({f"layers.{index}.weight": torch.randn(SIDE, SIDE).to(dtype) for index in range(number)}, path)
            rates: dict[str, list[tuple[float, float]]] = {contender: [] for contender in CONTENDERS}
            for _ in range(arguments.rounds):  # in turn, because other processes come and go
                for contender, function in CONTENDERS.items():
                    rates[contender].append(measure(function, path))
        for contender, measured in rates.items():
            per_cpu, per_clock = max(measured)
            share, spread = per_cpu / max(rates["cat"])[0], per_cpu / statistics.median(rate for rate, _ in measured)
            print(f"{name:<10} {contender:<6} {per_cpu:>9.1f} {per_clock:>7.1f} {share:>7.0%} {spread:>7.2f}")
            found = {"dtype": name, "": TITLES[contender], "bytes for a CPU second, of `cat`": f"{share:.0%}"}
            rows.append({**found, "best / median": f"{spread:.2f}"})
    publish(
        f"a file of {arguments.megabytes} MB in the page cache, best of {arguments.rounds} rounds", rows, arguments.json
    )


if __name__ == "__main__":
    main()
