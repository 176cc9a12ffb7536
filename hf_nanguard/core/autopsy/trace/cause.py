"""Why a bad number was born, from the closed list: inferred from the operator, its dtype and its operands.

A table of operators, read top down; what no row explains is `unknown`.
"""

import math
import re

from torch import Tensor

from ...vocabulary import Cause
from .op_record import Leaf, Record, operand_is_mask

EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh", "special_exp2")
LOGARITHMS = ("log", "log2", "log10", "log1p", "logit")
# Which argument of an operator must not be zero.
DIVISORS = {"div": 1, "true_divide": 1, "floor_divide": 1, "remainder": 1, "fmod": 1, "reciprocal": 0, "rsqrt": 0}
# Operators that divide by how many they were given.
AVERAGES = ("mean", "nanmean", "var", "std", "var_mean", "std_mean")
SOFTMAX = ("softmax", "logsumexp", "scaled_dot_product", "attention")
# What the backward of an operator divides by, or multiplies with.
NODES: tuple[tuple[str, Cause], ...] = (
    (r"Norm|Cdist|Dist", Cause.NORM_AT_ZERO),
    (r"^Sqrt", Cause.SQRT_AT_ZERO),
    (r"^Log(2|10|1P|it)?Backward", Cause.LOG_OF_ZERO),
    (r"^(Div|Reciprocal|Rsqrt|Atan2)", Cause.DIV_BY_ZERO),
    (r"^Pow", Cause.SQRT_AT_ZERO),
)
NORMALISATION = re.compile(r"(layer|group|batch|instance|rms)_?norm", re.IGNORECASE)
LOW_PRECISION = {"torch.float16": Cause.FP16_OVERFLOW, "torch.bfloat16": Cause.BF16_OVERFLOW}


def infer_cause(record: Record, text: str, unselected: bool) -> Cause:
    """Returns the cause of a bad number that an operator made of finite inputs.

    Args:
        record (`Record`):
            The operator.
        text (`str`):
            Its source line; a policy ratio and a KL term are told apart by the names in it.
        unselected (`bool`):
            Whether a zero gradient of an unselected branch had met it.
    """
    if record.uninitialised:  # elsewhere than on a CPU, a kernel that is no operator of torch may have written it
        return Cause.UNINITIALISED_WEIGHT if record.device == "cpu" else Cause.UNKNOWN
    if unselected:
        return Cause.WHERE_UNSELECTED_BRANCH
    if _is_fully_masked(record):
        return Cause.MASKED_ROW_SOFTMAX
    if record.all_ignored:
        return Cause.ALL_LABELS_MASKED
    if record.name.startswith("nll_loss") and not record.bad_operands and record.extent.kind == "nan":
        return Cause.DIV_BY_ZERO  # by the weights of the targets' classes, which sum up to nothing
    if any(operand.writer is None and operand.leaf is None for operand in record.bad_operands):
        return Cause.UNKNOWN  # a constant that nobody has written or named
    forward_name = _base(record.forward.op.split(".")[1]) if record.forward is not None else ""
    if _base(record.name) in EXPONENTIALS or (forward_name in EXPONENTIALS and not record.in_python):
        return _name_exponential(record, text)
    if record.node is None or record.in_python:
        return _infer_operator(record)
    return _infer_backward(record, forward_name)


def _base(name: str) -> str:
    """The name of an operator without the marks of its variants: `_foreach_exp_` is `exp`."""
    return name.removeprefix("_foreach_").rstrip("_")


def _is_fully_masked(record: Record) -> bool:
    """A softmax over a row of nothing but -inf; written by hand, it subtracts the row's maximum first."""
    bad = [operand.extent for operand in record.bad_operands]
    if record.extent.kind != "nan" or not all(e.kind == "inf" and e.high != math.inf for e in bad):
        return False
    if _base(record.name) == "sub":
        return len(bad) == 2
    return bool(bad) and any(part in record.name for part in SOFTMAX)


def _name_exponential(record: Record, text: str) -> Cause:
    """A ratio of policies and a KL term both are an exponential of a difference of log-probabilities."""
    if record.place.module:
        return Cause.EXP_OVERFLOW
    words = text.lower()
    if re.search(r"\bref|_ref|kl\b|_kl|kl_", words):
        return Cause.KL_OVERFLOW
    if re.search(r"ratio|importance|old_|coef", words):
        return Cause.RATIO_OVERFLOW
    return Cause.EXP_OVERFLOW


def _infer_operator(record: Record) -> Cause:
    """The cause as far as the operator alone tells it."""
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
    """The cause by the autograd node; a node may do more than divide, so a zero must have been met."""
    node = record.node or ""
    if node.endswith("CopySlices"):  # an operator in place, on a view
        node = f"{forward_name.title()}Backward"
    if record.has_zero and not NORMALISATION.search(node):
        for pattern, cause in NODES:
            if re.search(pattern, node):
                of_sum = record.forward is not None and record.forward.of_sum
                return Cause.NORM_AT_ZERO if cause is Cause.SQRT_AT_ZERO and of_sum else cause
    return _infer_operator(record)


def _name_overflow(record: Record) -> Cause:
    """An infinity of finite operands in a narrow format is an overflow; of float32 nobody knows why it got so large."""
    if not all(map(math.isfinite, record.scalars)) or not all(map(operand_is_mask, record.bad_operands)):
        return Cause.UNKNOWN
    if record.extent.kind == "nan" and (record.is_pointwise or record.bad_operands):  # sqrt(-1), 0 * -inf
        return Cause.UNKNOWN
    return LOW_PRECISION.get(str(record.dtype), Cause.UNKNOWN)


def infer_leaf_cause(leaf: Leaf, bad: Tensor) -> Cause:
    """Returns why a parameter or buffer was bad before the pass: whole rows of a table that were never initialised, or
    single entries that something has ruined."""
    if bad.ndim == 2 and not bool(bad.all()):
        rows = bad.any(1)
        if bool(bad[rows].all()):
            return Cause.UNINITIALISED_WEIGHT
    return Cause.PARAM_NONFINITE
