"""Rules about precision: formats that overflow, that round updates away, or that this device does not have."""

import math

from .finding import Finding, Rule, error, note, warning
from .precision_sources import find_sources
from .run_facts import Facts

# Their activations exceed 65504, because they were trained in bfloat16 or float32 only.
OVERFLOWING = (
    "t5", "mt5", "umt5", "longt5", "t5gemma", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "paligemma", "switch_transformers",
)  # fmt: skip
SMALLEST_FLOAT16 = 2.0**-24  # the smallest positive number
TYPICAL_WEIGHT = 0.02  # the standard deviation with which most transformers are initialised
BF16 = "https://arxiv.org/abs/1905.12322"


def check_both(facts: Facts) -> Finding | None:
    """bf16 and fp16 exclude each other."""
    if not (facts.bf16 and facts.fp16):
        return None
    return error("bf16 and fp16 are both true.", "The Trainer refuses to start with both.", "Remove fp16: true.")


def check_bf16_support(facts: Facts) -> Finding | None:
    """A device without bfloat16 cannot train in it; an emulated one is slow."""
    if facts.mixed_precision != "bf16" or facts.device_type == "cpu" or facts.bf16_support == "native":
        return None
    if facts.bf16_support == "absent":
        why = f"This {facts.device_type} device cannot compute in bfloat16."
        return error("bf16 is on, but the device has no bfloat16.", why, "Set fp16: true and bf16: false.")
    why = "Each operation is converted to float32 and back, which is slower than float32 itself."
    change = "Use fp16: true with its loss scaler, or float32."
    return warning("bf16 is on, but this device only emulates bfloat16.", why, change)


def check_fp16_on_cpu(facts: Facts) -> Finding | None:
    """A CPU ignores fp16."""
    if facts.mixed_precision != "fp16" or facts.device_type != "cpu" or facts.bf16:
        return None
    why = "accelerate applies neither autocast nor a loss scaler on a CPU, so the run trains in float32 without saying so."
    return warning("fp16 is on, but the run is on a CPU.", why, "Set fp16: false, or bf16: true with use_cpu: true.")


def check_fp16_weights(facts: Facts) -> Finding | None:
    """float16 weights cannot be unscaled, and updates below their spacing are lost."""
    if facts.model_dtype != "float16" or facts.trainable == 0:
        return None
    if facts.mixed_precision == "fp16":
        why = 'The loss scaler cannot unscale float16 gradients: the first step raises "Attempting to unscale FP16 gradients".'
        return error(
            "fp16 is on, and the weights that are trained are float16 too.",
            why,
            "Load the model in float32 (dtype: float32).",
        )
    why = "Without a loss scaler gradients below 6e-8 become 0, and activations above 65504 become inf."
    is_meant = not facts.uses_adam or (facts.adam_epsilon or 0) >= 1e-5  # who sets eps for float16 knows of it
    what, change = (
        "The weights that are trained are float16.",
        "Load the model in float32 or bfloat16 (dtype: bfloat16).",
    )
    return (note if is_meant else warning)(what, why, change)


def check_fp16_family(facts: Facts) -> Finding | None:
    """Some families overflow in float16."""
    uses_fp16 = facts.mixed_precision == "fp16" or facts.model_dtype == "float16"
    if facts.model_type not in OVERFLOWING or not uses_fp16:
        return None
    why = f"Activations of {facts.model_type} models exceed 65504, the largest float16 number, so losses become NaN."
    return warning(
        f"float16 is used with a model of the family {facts.model_type}.",
        why,
        "Set bf16: true and fp16: false, or train in float32.",
    )


def check_fp16_checkpoint(facts: Facts) -> Finding | None:
    """A model trained in bfloat16 may have values that float16 does not have."""
    if facts.checkpoint_dtype != "bfloat16" or facts.mixed_precision != "fp16" or facts.model_type in OVERFLOWING:
        return None
    why = "bfloat16 reaches 3.4e38 and float16 only 65504: activations that were fine in training may overflow to inf."
    change = "Set bf16: true and fp16: false. If the device has no bfloat16, watch nanguard/headroom_bits."
    return warning("fp16 is on, but the checkpoint was saved in bfloat16.", why, change)


def check_bf16_rounding(facts: Facts) -> Finding | None:
    """bfloat16 weights do not move if an update is below half their spacing."""
    if facts.model_dtype != "bfloat16" or not facts.uses_adam or facts.is_adapter or not facts.learning_rate > 0:
        return None
    share = share_that_moves(facts.learning_rate)
    if share > 0.4:
        return None
    what = f"The weights are bfloat16 and learning_rate is {facts.learning_rate:g}."
    why = (
        f"An Adam step is about as long as the learning rate, and a bfloat16 weight w only changes if that exceeds |w|/512: of "
        f"weights around {TYPICAL_WEIGHT} about {share:.0%} move, the others round back."
    )
    change = "Load the model in float32 (dtype: float32) and keep bf16: true, which computes in bfloat16 anyway."
    return (warning if share < 0.05 else note)(what, why, change)


def share_that_moves(learning_rate: float) -> float:
    """Returns the share of normally distributed bfloat16 weights that a step of one learning rate changes."""
    return math.erf(learning_rate * 512 / (TYPICAL_WEIGHT * math.sqrt(2)))


def check_adam_eps(facts: Facts) -> Finding | None:
    """Adam divides by sqrt(v) + eps, which must not be 0."""
    eps = facts.adam_epsilon
    if not facts.uses_adam:
        return None
    if eps <= 0:
        why = "Adam divides by sqrt(v) + eps: a parameter without a gradient so far gives 0/0."
        return error(f"adam_epsilon is {eps:g}.", why, "Set adam_epsilon: 1.0e-8.")
    if facts.model_dtype == "float16" and eps < SMALLEST_FLOAT16 and "fused" not in facts.optimizer:
        why = f"The smallest float16 number is {SMALLEST_FLOAT16:.1e}, so eps becomes 0 and the update 0/0."
        return error(
            f"adam_epsilon is {eps:g} with float16 weights.",
            why,
            "Set adam_epsilon: 1.0e-4, or load the model in float32.",
        )
    if eps > 1e-2:
        why = "It exceeds sqrt(v) of most parameters, so that steps become as small as gradient / eps."
        return warning(f"adam_epsilon is {eps:g}.", why, "Set adam_epsilon: 1.0e-8.")
    return None


def check_compute_dtype(facts: Facts) -> Finding | None:
    """Quantized layers compute in a dtype of their own, which can overflow as well."""
    if not facts.quantization_bits or facts.compute_dtype != "float16":
        return None
    risky = facts.model_type in OVERFLOWING or facts.checkpoint_dtype == "bfloat16"
    if not risky:
        return None
    why = "Its activations may exceed 65504, the largest float16 number."
    what = f"{facts.quantization_bits}-bit layers compute in float16, but the model was trained in bfloat16."
    return warning(what, why, "Set bnb_4bit_compute_dtype to bfloat16.")


def check_agreement(facts: Facts) -> Finding | None:
    """All sources of the precision must agree."""
    bad = [source for source in find_sources(facts) if not source.is_aligned and not source.name.startswith("device")]
    if facts.model_dtype == "float16":  # which has a rule of its own
        bad = [source for source in bad if source.name != "model weights"]
    if not bad:
        return None
    named = "; ".join(f"{source.name}: {source.verdict}" for source in bad)
    what = f"The sources of the precision disagree: {named}."
    why = "Autocast, loss scaler, communication and weights would not use the same format."
    change = f"Set all of them to {facts.mixed_precision}, or to auto where that is possible."
    is_refused = any(source.name == "DeepSpeed" for source in bad)
    return (error if is_refused else warning)(what, why, change)


PRECISION_RULES = (
    Rule("both-precisions", "precision", "one of bf16 and fp16 at most", ("bf16", "fp16"), check_both),
    Rule("bf16-support", "precision", "bfloat16 on this device", ("mixed_precision", "bf16_support"), check_bf16_support),
    Rule("fp16-on-cpu", "precision", "fp16 takes effect", ("mixed_precision", "device_type"), check_fp16_on_cpu),
    Rule("fp16-weights", "precision", "dtype of the weights", ("model_dtype", "mixed_precision"), check_fp16_weights),
    Rule("fp16-family", "precision", "range of float16 for this family", ("model_type", "mixed_precision"), check_fp16_family),
    Rule("fp16-checkpoint", "precision", "range of float16 for this checkpoint", ("checkpoint_dtype", "mixed_precision"),
         check_fp16_checkpoint, BF16),
    Rule("bf16-rounding", "precision", "updates are above the rounding of the weights", ("model_dtype", "learning_rate", "optimizer"),
         check_bf16_rounding, BF16),
    Rule("adam-eps", "precision", "adam_epsilon", ("adam_epsilon", "optimizer"), check_adam_eps),
    Rule("compute-dtype", "precision", "compute dtype of quantized layers", ("quantization_bits",), check_compute_dtype),
    Rule("precision-agreement", "precision", "agreement of all sources of the precision", ("mixed_precision",), check_agreement),
)  # fmt: skip
