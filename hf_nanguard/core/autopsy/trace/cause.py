"""Infers the cause of a non-finite value from the operator, its dtype and its operands.

Rules are tried in order; what no rule explains is `unknown`.
"""

import math
import re

import torch
from torch import Tensor

from ...vocabulary import Cause
from .op_record import Record

EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh", "special_exp2")
LOGARITHMS = ("log", "log2", "log10", "log1p", "logit")
# Operator to the argument that must not be 0.
DIVISORS = {"div": 1, "true_divide": 1, "floor_divide": 1, "remainder": 1, "fmod": 1, "reciprocal": 0, "rsqrt": 0}
# Operators that divide by the number of their elements.
AVERAGES = ("mean", "nanmean", "var", "std", "var_mean", "std_mean")
# Autograd node to the cause if a zero was involved.
NODES: tuple[tuple[str, Cause], ...] = (
    (r"Norm|Cdist|Dist", Cause.NORM_AT_ZERO),
    (r"^Sqrt", Cause.SQRT_AT_ZERO),
    (r"^Log(2|10|1P|it)?Backward", Cause.LOG_OF_ZERO),
    (r"^(Div|Reciprocal|Rsqrt|Atan2)", Cause.DIV_BY_ZERO),
    (r"^Pow", Cause.SQRT_AT_ZERO),
)
NORMALISATION = re.compile(r"(layer|group|batch|instance|rms)_?norm", re.IGNORECASE)
LOW_PRECISION = {"torch.float16": Cause.FP16_OVERFLOW, "torch.bfloat16": Cause.BF16_OVERFLOW}
# In float32 an operator without a rule of its own may also have a pole at a small argument (`erfinv`, a divisor of 1e-40), so its inputs
# must be so large that a product of four of them overflows.
LARGE_IN_FLOAT32 = torch.finfo(torch.float32).max ** 0.25


def infer_cause(record: Record, text: str, unselected: bool) -> Cause:
    """Returns the cause of a non-finite value that an operator made from finite inputs.

    `text` is its source line, whose names distinguish a policy ratio from a KL term. `unselected` says whether it met the zero
    gradient of a branch that `where` did not select.
    """
    if record.uninitialised:  # on a GPU, a kernel that is not an operator of torch may have written it
        return Cause.UNINITIALISED_WEIGHT if record.device == "cpu" else Cause.UNKNOWN
    if unselected:
        return Cause.WHERE_UNSELECTED_BRANCH
    if _is_fully_masked(record) or _reads_masked_score(record):
        return Cause.MASKED_ROW_SOFTMAX
    if "ctc_loss" in record.name and record.extent.kind == "inf" and not record.bad_operands:
        return Cause.CTC_TARGET_TOO_LONG
    if record.all_ignored:
        return Cause.ALL_LABELS_MASKED
    if record.name.startswith("nll_loss") and not record.bad_operands and record.extent.kind == "nan":
        return Cause.DIV_BY_ZERO  # by the class weights of the targets, whose sum is 0
    if any(operand.writer is None and operand.leaf is None for operand in record.bad_operands):
        return Cause.UNKNOWN  # a constant of unknown origin
    forward_name = _base(record.forward.op.split(".")[1]) if record.forward is not None else ""
    if _base(record.name) in EXPONENTIALS or (forward_name in EXPONENTIALS and not record.in_python):
        return _name_exponential(record, text)
    if record.node is None or record.in_python:
        return _infer_operator(record)
    return _infer_backward(record, forward_name)


def _base(name: str) -> str:
    """Returns the name of an operator without prefix and suffix of its variants: `_foreach_exp_` is `exp`."""
    return name.removeprefix("_foreach_").rstrip("_")


def _is_fully_masked(record: Record) -> bool:
    """Whether it is a softmax over a row of only -inf; a hand-written one subtracts the maximum of the row first."""
    bad = [operand.extent for operand in record.bad_operands]
    if record.extent.kind != "nan" or not all(e.kind == "inf" and e.high != math.inf for e in bad):
        return False
    if _base(record.name) == "sub":
        return len(bad) == 2
    return bool(bad) and record.is_softmax


def _reads_masked_score(record: Record) -> bool:
    """Whether it adds or multiplies log-probabilities that are -inf because their scores were masked, as label smoothing does."""
    bad = record.bad_operands
    return any(operand.is_masked_score for operand in bad) and all(operand.is_mask for operand in bad)


def _name_exponential(record: Record, text: str) -> Cause:
    """Distinguishes a policy ratio and a KL term, both exponentials of a difference of log-probabilities, by name."""
    if record.place.module:
        return Cause.EXP_OVERFLOW
    words = text.lower()
    if re.search(r"\bref|_ref|kl\b|_kl|kl_", words):
        return Cause.KL_OVERFLOW
    if re.search(r"ratio|importance|old_|coef", words):
        return Cause.RATIO_OVERFLOW
    return Cause.EXP_OVERFLOW


def _infer_operator(record: Record) -> Cause:
    """Returns the cause as far as it follows from the operator alone."""
    name, kind = _base(record.name), record.extent.kind
    if name in LOGARITHMS and (0 in record.zero_args or record.extent.low == -math.inf or name == "logit"):
        return Cause.LOG_OF_ZERO
    if name in DIVISORS and DIVISORS[name] in record.zero_args:
        return Cause.DIV_BY_ZERO
    if name == "pow" and 0 in record.zero_args and any(exponent < 0 for exponent in record.scalars):
        return Cause.DIV_BY_ZERO
    if name in AVERAGES and kind == "nan":
        return Cause.DIV_BY_ZERO
    if NORMALISATION.search(name) and 0.0 in record.scalars:
        return Cause.DIV_BY_ZERO
    return _name_overflow(record)


def _infer_backward(record: Record, forward_name: str) -> Cause:
    """Returns the cause by the autograd node; a node may do more than divide, so a zero must be involved."""
    node = record.node or ""
    if node.startswith(("Var", "Std")) and math.inf in record.scalars:
        return Cause.DIV_BY_ZERO  # by the number of values less the correction
    if node.endswith("CopySlices"):  # an in-place operator on a view
        node = f"{forward_name.title()}Backward"
    if record.has_zero and not NORMALISATION.search(node):
        for pattern, cause in NODES:
            if re.search(pattern, node):
                of_sum = record.forward is not None and record.forward.of_sum
                return Cause.NORM_AT_ZERO if cause is Cause.SQRT_AT_ZERO and of_sum else cause
    return _infer_operator(record)


def _name_overflow(record: Record) -> Cause:
    """An infinity from finite operands is an overflow: in 16 bits of values of any size, in float32 of very large ones."""
    if not all(map(math.isfinite, record.scalars)) or not all(operand.is_mask for operand in record.bad_operands):
        return Cause.UNKNOWN
    if record.extent.kind == "nan" and (record.is_pointwise or record.bad_operands):  # sqrt(-1), 0 * -inf
        return Cause.UNKNOWN
    finite = [operand.extent.largest for operand in record.operands if operand.extent.kind == "finite"]
    if record.dtype == torch.float32 and max([*finite, *map(abs, record.scalars)], default=0.0) >= LARGE_IN_FLOAT32:
        return Cause.FP32_OVERFLOW
    return LOW_PRECISION.get(str(record.dtype), Cause.UNKNOWN)


def infer_leaf_cause(bad: Tensor) -> Cause:
    """Returns why a parameter or buffer was not finite before the pass: whole rows of a matrix that were never initialised, or
    single entries that were overwritten."""
    if bad.ndim == 2 and not bool(bad.all()):
        rows = bad.any(1)
        if bool(bad[rows].all()):
            return Cause.UNINITIALISED_WEIGHT
    return Cause.PARAM_NONFINITE
