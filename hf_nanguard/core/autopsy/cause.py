"""Why a bad number was born, from the closed list: inferred from the operator, its dtype and its operands.

A table of operators, read top down; what no row explains is `unknown`.
"""

import math
import re

from torch import Tensor

from ..signal import Cause
from .trace import Leaf, Record

EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh", "special_exp2")
LOGARITHMS = ("log", "log2", "log10", "log1p", "xlogy", "special_xlogy", "logit", "special_entr")
DIVISIONS = ("div", "reciprocal", "rsqrt", "remainder", "fmod", "mean", "nanmean", "floor_divide", "true_divide")
SOFTMAX = ("softmax", "logsumexp", "scaled_dot_product", "attention")
REDUCTIONS = ("sum", "mean", "linalg_vector_norm", "norm", "mm", "bmm", "dot")
# What the backward of an operator divides by, or multiplies with.
NODES: tuple[tuple[str, Cause], ...] = (
    (r"Norm|Cdist|Dist", Cause.NORM_AT_ZERO),
    (r"^Sqrt", Cause.SQRT_AT_ZERO),
    (r"^Log", Cause.LOG_OF_ZERO),
    (r"^(Div|Reciprocal|Rsqrt|Atan2)", Cause.DIV_BY_ZERO),
    (r"^Pow", Cause.SQRT_AT_ZERO),
    (r"^(Exp|Exp2|Expm1)Backward", Cause.EXP_OVERFLOW),
)
NORMALISATION = re.compile(r"(Layer|Group|Batch|Instance|RMS|Rms)_?Norm", re.IGNORECASE)
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
    name, node = record.name, record.node
    forward_name = record.forward.op.split(".")[1] if record.forward is not None else ""
    if record.uninitialised:
        return Cause.UNINITIALISED_WEIGHT
    if unselected:
        return Cause.WHERE_UNSELECTED_BRANCH
    if _is_fully_masked(record):
        return Cause.MASKED_ROW_SOFTMAX
    if record.all_ignored:
        return Cause.ALL_LABELS_MASKED
    exponent = name in EXPONENTIALS or (node is not None and forward_name in EXPONENTIALS)
    if exponent and record.extent.kind != "finite":
        return _name_exponential(record, text)
    if node is None:
        return _infer_forward(record)
    return _infer_backward(record, forward_name)


def _is_fully_masked(record: Record) -> bool:
    """A softmax over a row of nothing but -inf."""
    if record.extent.kind != "nan" or not any(part in record.name for part in SOFTMAX):
        return False
    bad = record.bad_operands
    return bool(bad) and all(o.extent.kind == "inf" and o.extent.high != math.inf for o in bad)


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


def _infer_forward(record: Record) -> Cause:
    name, kind = record.name, record.extent.kind
    base = name.rstrip("_")
    zero = record.has_zero
    if base in LOGARITHMS:
        return Cause.LOG_OF_ZERO if zero or base == "logit" or record.extent.low == -math.inf else Cause.UNKNOWN
    if base in DIVISIONS or (base == "pow" and zero and any(s < 0 for s in record.scalars)):
        divisor_zero = zero or 0.0 in record.scalars or base in ("mean", "nanmean")
        if divisor_zero and not _overflows(record):
            return Cause.DIV_BY_ZERO
    return _name_overflow(record) if kind in ("inf", "nan") else Cause.UNKNOWN


def _infer_backward(record: Record, forward_name: str) -> Cause:
    node = record.node or ""
    if forward_name in LOGARITHMS:
        return Cause.LOG_OF_ZERO
    if not NORMALISATION.search(node):
        for pattern, cause in NODES:
            if re.search(pattern, node):
                overflow = _name_overflow(record) if _overflows(record) else Cause.UNKNOWN
                if overflow is not Cause.UNKNOWN:
                    return overflow
                if cause is Cause.SQRT_AT_ZERO and _is_norm(record):
                    return Cause.NORM_AT_ZERO
                return cause
    return _name_overflow(record)


def _is_norm(record: Record) -> bool:
    """Whether the root was taken of a reduction: a norm written by hand."""
    made_by = record.forward.made_by if record.forward is not None else ()
    return any(maker.split(".")[1] in REDUCTIONS for maker in made_by if "." in maker)


def _overflows(record: Record) -> bool:
    """Whether no operand holds a zero that could have been divided by."""
    return not record.has_zero and 0.0 not in record.scalars


def _name_overflow(record: Record) -> Cause:
    """An infinity of finite operands in a narrow format is an overflow; of float32 nobody knows why it got so large."""
    if any(math.isnan(s) or math.isinf(s) for s in record.scalars):
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
