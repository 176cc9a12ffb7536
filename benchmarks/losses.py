"""Time and peak memory of losses over a vocabulary, forward and backward, beside the usual forms.

    python benchmarks/losses.py --tokens 512 --vocabulary 128256

Each contender runs in a process of its own. Its peak memory is what the process grows by beyond the logits; that includes
at least their gradient. The fastest of a few calls counts.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result_tables import add_json_flag, find_spread, publish
from hf_nanguard import distillation_loss, masked_cross_entropy

TEMPERATURE = 2.0


def usual_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Distillation loss as most scripts write it, with float32 copies of half-precision logits."""
    ours, theirs = ((logits.float() / TEMPERATURE).log_softmax(-1) for logits in (student, teacher))
    return TEMPERATURE**2 * F.kl_div(ours, theirs, log_target=True, reduction="sum") / len(student)


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy, usual": lambda logits, labels, teacher: F.cross_entropy(logits.float(), labels),
    "cross_entropy, ours": lambda logits, labels, teacher: masked_cross_entropy(logits, labels),
    "distillation, usual": lambda logits, labels, teacher: usual_distillation(logits, teacher),
    "distillation, ours": lambda logits, labels, teacher: distillation_loss(logits, teacher, TEMPERATURE),
}


def peak_mb() -> float:
    """Returns the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(name: str, tokens: int, vocabulary: int, repeats: int) -> None:
    """Runs one contender and prints seconds, median over fastest, and megabytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16).normal_(std=5.0).requires_grad_()
    teacher = torch.empty_like(logits).normal_(std=5.0)
    labels = torch.randint(0, vocabulary, (tokens,))
    few = logits[:2].detach().requires_grad_()
    torch.autograd.grad(
        CONTENDERS[name](few, labels[:2], teacher[:2]), few
    )  # so that torch itself has allocated what it needs
    before, times = peak_mb(), []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.autograd.grad(CONTENDERS[name](logits, labels, teacher), logits)
        times.append(time.perf_counter() - began)
    print(min(times), find_spread(times), peak_mb() - before)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the batch (default: 512)")
    parser.add_argument("--vocabulary", type=int, default=128256, help="size of the vocabulary (default: 128256)")
    parser.add_argument("--repeats", type=int, default=3, help="calls of each contender (default: 3)")
    parser.add_argument("--contender", choices=CONTENDERS, help="run only this contender, in this process")
    add_json_flag(parser)
    options = parser.parse_args()
    if options.contender:
        run(options.contender, options.tokens, options.vocabulary, options.repeats)
        return
    size = options.tokens * options.vocabulary * 2 / 2**20
    print(f"bfloat16 logits [{options.tokens}, {options.vocabulary}], {size:.0f} MB, as large as their gradient")
    rows = []
    for name in CONTENDERS:
        command = [sys.executable, __file__, *sys.argv[1:], "--contender", name]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # freed memory is returned at once
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        seconds, spread, megabytes = map(float, done.stdout.split())
        print(f"  {name:22} {seconds:7.2f} s, median {spread:.2f} x that  {megabytes:7.0f} MB")
        rows.append({"": name, "memory, x logits": f"{megabytes / size:.1f}", "median / fastest": f"{spread:.2f}"})
    method = f"bfloat16 logits of {options.tokens} tokens x {options.vocabulary}, a process each, fastest of {options.repeats} calls"
    publish(method, rows, options.json)


if __name__ == "__main__":
    main()
