"""The value of the loss: in the precision of the run close to that in float32, and with the auxiliary loss of experts if that is on."""

import math

import torch

from ...hf.compat.model_config import find_config, without_adapter
from ..trial.borrowed_trainer import borrowed
from ..trial.law_result import ERROR, WARNING, LawResult, NotApplicable, broken, held
from ..trial.quiet_forward import AUXILIARY
from ..trial.trial_bench import TrialBench

BOUND = {torch.bfloat16: 0.05, torch.float16: 0.02}  # of the loss; sound models stay well below a tenth of it


LARGE = 1e4


def check_precision(bench: TrialBench) -> LawResult:
    """Computes the loss of a batch as the run does and with all weights and sums in float32."""
    if bench.dtype not in BOUND:
        raise NotApplicable(f"it trains in {bench.dtype} already")
    if any(not p.is_floating_point() for p in bench.bare.parameters()):
        raise NotApplicable("its weights are quantised")
    low = _measure(bench)
    with borrowed(bench.trainer):
        bench.use_float32()
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


def check_router_loss(bench: TrialBench) -> LawResult:
    """Computes the loss without the auxiliary loss that keeps experts in balance, and with so much of it that rounding does not hide it."""
    config = find_config(without_adapter(bench.bare))
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    weights = {name: value for name in AUXILIARY if (value := getattr(config, name, None))}
    if not weights or not getattr(config, "output_router_logits", False):
        raise NotApplicable("its config does not ask for an auxiliary loss of experts")
    if bench.is_online:
        raise NotApplicable("the loss of its completions has no such term")
    bench.need_steady()
    without = _measure(bench)
    torch.manual_seed(0)
    with torch.no_grad(), bench.steady(auxiliary=LARGE):
        loss = float(bench.compute_loss())
    if abs(loss - without) > 64 * bench.eps * max(abs(loss), 1e-6):
        return held(
            f"the auxiliary loss of experts adds {(loss - without) / LARGE:.1e} to the loss", loss=loss, without=without
        )
    named = ", ".join(f"{name}={value:g}" for name, value in weights.items())
    return broken(WARNING, f"output_router_logits is true and {named}, but the loss is the same ({loss:.4g}) without it: nothing keeps the experts "
                  "in balance. Add aux_loss of the model's output, times that weight, to the loss.", loss=loss)  # fmt: skip
