"""The loss in the precision of the run is close to the loss in float32."""

import math

import torch

from ..trial.borrowed_trainer import borrowed
from ..trial.law_result import ERROR, LawResult, NotApplicable, broken, held
from ..trial.trial_bench import TrialBench

BOUND = {torch.bfloat16: 0.05, torch.float16: 0.02}  # of the loss; sound models stay well below a tenth of it


def check_precision(bench: TrialBench) -> LawResult:
    """Computes the loss of a batch as the run does and with all weights and sums in float32."""
    if bench.dtype not in BOUND:
        raise NotApplicable(f"it trains in {bench.dtype} already")
    if any(not p.is_floating_point() for p in bench.bare.parameters()):
        raise NotApplicable("its weights are quantised")
    low = _measure(bench)
    with borrowed(bench.trainer):
        for tensor in (*bench.bare.parameters(), *bench.bare.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.float()
        bench.remove_autocast()
        high = _measure(bench)
    off, bound = abs(low - high) / max(abs(high), 0.1), BOUND[bench.dtype]
    values = {"loss": low, "float32_loss": high, "difference": off, "bound": bound}
    if not math.isfinite(high):
        raise NotApplicable(f"its loss is {high} in float32 too")
    if off <= bound:
        return held(f"the loss in {bench.dtype} is within {off:.1e} of that in float32", **values)
    return broken(ERROR, f"The loss is {low:.4g} in {bench.dtype} and {high:.4g} in float32 (difference {off:.1%}, {bound:.0%} is "
                  "usual at most). Is the model stable in this precision?", **values)  # fmt: skip


def _measure(bench: TrialBench) -> float:
    torch.manual_seed(0)
    with torch.no_grad(), bench.steady():
        return float(bench.compute_loss())
