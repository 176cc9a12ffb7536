"""Whether all places that set the precision of a run agree."""

from collections.abc import Iterator
from dataclasses import dataclass

from .run_facts import Facts

ALIGNED = "aligned"
UNJUDGED = "not judged"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


@dataclass(frozen=True)
class Source:
    """One place that sets a precision: its name, its value, and whether it agrees with the training arguments."""

    name: str
    value: str
    verdict: str = ALIGNED

    @property
    def is_aligned(self) -> bool:
        """Whether it agrees with the others."""
        return self.verdict in (ALIGNED, UNJUDGED)


def find_sources(facts: Facts) -> list[Source]:
    """Returns every source that is known, the training arguments first."""
    if facts.mixed_precision is None:
        return []
    return list(_find_sources(facts, facts.mixed_precision))


def _find_sources(facts: Facts, run: str) -> Iterator[Source]:
    yield Source("training arguments", _format(facts, run))
    if facts.accelerate_precision is not None:
        yield Source("accelerate", facts.accelerate_precision, _judge_launcher(facts.accelerate_precision, run))
    for name, value in (("DeepSpeed", facts.deepspeed_precision), ("FSDP", facts.fsdp_precision)):
        if value is not None:
            yield Source(
                name, value, ALIGNED if value in ("auto", run) else f"{value} differs from {run} of the arguments"
            )
    if facts.model_dtype is not None:
        yield Source("model weights", facts.model_dtype, _judge_weights(facts, run))
    if facts.quantization_bits:
        value = f"{facts.quantization_bits} bits" + (
            f", computes in {facts.compute_dtype}" if facts.compute_dtype else ""
        )
        yield Source("quantization", value, _judge_compute(facts, run))
    if facts.device_type is None:
        yield Source("device", "none here", UNJUDGED)
    elif facts.bf16_support is not None:
        bad = run == "bf16" and facts.bf16_support != "native"
        yield Source(f"device ({facts.device_type})", f"bfloat16 {facts.bf16_support}",
                     f"bfloat16 is {facts.bf16_support} here" if bad else ALIGNED)  # fmt: skip


def _format(facts: Facts, run: str) -> str:
    flags = [name for name in ("bf16", "fp16") if getattr(facts, name)]
    return (
        f"{run} ({', '.join(f'{flag}=True' for flag in flags)})"
        if flags
        else f"{run} (float32)"
        if run == "no"
        else run
    )


def _judge_launcher(value: str, run: str) -> str:
    """The training arguments take precedence over accelerate; `no` there leaves the choice to them."""
    return ALIGNED if value in ("no", run) else f"{value} is ignored because the training arguments say {run}"


def _judge_weights(facts: Facts, run: str) -> str:
    dtype = SHORT.get(facts.model_dtype)
    if dtype is None or dtype == "no" or dtype == run:
        return ALIGNED
    if run == "no":
        return ALIGNED if dtype == "bf16" else "float16 weights are trained without a loss scaler"
    return f"{facts.model_dtype} weights under {run} autocast"


def _judge_compute(facts: Facts, run: str) -> str:
    dtype = SHORT.get(facts.compute_dtype or "", "no")
    return ALIGNED if dtype in ("no", run) or run == "no" else f"computes in {facts.compute_dtype} under {run} autocast"
