"""The closed vocabulary of events: what was found, what was done about it, and why it happened."""

from enum import Enum


class StrEnum(str, Enum):
    """An enum whose members are their strings, as `enum.StrEnum` of Python 3.11."""

    __str__ = str.__str__


class Signal(StrEnum):
    """What was found."""

    LABELS_MASKED = "labels_masked"
    LABEL_OUT_OF_RANGE = "label_out_of_range"
    INPUT_NONFINITE = "input_nonfinite"
    INPUT_OUT_OF_RANGE = "input_out_of_range"
    LOSS_NONFINITE = "loss_nonfinite"
    LOSS_ZERO = "loss_zero"
    LOSS_MISSING = "loss_missing"
    LOSS_ERROR = "loss_error"
    PREDICTION_NONFINITE = "prediction_nonfinite"
    EVAL_NONFINITE = "eval_nonfinite"
    GRAD_NONFINITE = "grad_nonfinite"
    GRAD_SPIKE = "grad_spike"
    LOSS_SPIKE = "loss_spike"
    LOSS_DIVERGED = "loss_diverged"
    ACTIVATION_NONFINITE = "activation_nonfinite"
    ACTIVATION_HEADROOM = "activation_headroom"
    ENTROPY_COLLAPSE = "entropy_collapse"
    PARAM_NONFINITE = "param_nonfinite"
    OPTIMIZER_NONFINITE = "optimizer_nonfinite"
    REWARD_NONFINITE = "reward_nonfinite"
    ADVANTAGE_NONFINITE = "advantage_nonfinite"
    RATIO_OVERFLOW = "ratio_overflow"
    LOGITS_NONFINITE = "logits_nonfinite"
    CHECKPOINT_NONFINITE = "checkpoint_nonfinite"
    UPDATE_STALLED = "update_stalled"
    NO_LEARNING_SIGNAL = "no_learning_signal"
    RUN_RESTARTED = "run_restarted"
    ROWS_QUARANTINED = "rows_quarantined"
    GUARD_FAILED = "guard_failed"


class Action(StrEnum):
    """What was done about it."""

    OBSERVED = "observed"
    REPAIRED = "repaired"
    DROPPED = "dropped"
    SKIPPED = "skipped"
    CLIPPED = "clipped"
    REWOUND = "rewound"
    HALTED = "halted"
    REFUSED = "refused"


class Cause(StrEnum):
    """Why it happened, where that is known."""

    ALL_LABELS_MASKED = "all_labels_masked"
    LABEL_OUT_OF_RANGE = "label_out_of_range"
    INPUT_NONFINITE = "input_nonfinite"
    FP16_OVERFLOW = "fp16_overflow"
    BF16_OVERFLOW = "bf16_overflow"
    FP32_OVERFLOW = "fp32_overflow"
    EXP_OVERFLOW = "exp_overflow"
    LOG_OF_ZERO = "log_of_zero"
    DIV_BY_ZERO = "div_by_zero"
    SQRT_AT_ZERO = "sqrt_at_zero"
    NORM_AT_ZERO = "norm_at_zero"
    WHERE_UNSELECTED_BRANCH = "where_unselected_branch"
    MASKED_ROW_SOFTMAX = "masked_row_softmax"
    CTC_TARGET_TOO_LONG = "ctc_target_too_long"
    NORM_OVERFLOW = "norm_overflow"
    PARAM_NONFINITE = "param_nonfinite"
    UNINITIALISED_WEIGHT = "uninitialised_weight"
    OPTIMIZER_STATE = "optimizer_state"
    ADAM_EPS_UNDERFLOW = "adam_eps_underflow"
    LR_TOO_HIGH = "lr_too_high"
    REWARD_NONFINITE = "reward_nonfinite"
    RATIO_OVERFLOW = "ratio_overflow"
    KL_OVERFLOW = "kl_overflow"
    ROUNDING_STALL = "rounding_stall"
    TRANSIENT = "transient"
    UNKNOWN = "unknown"


# Names that are part of the public schema although nothing emits them yet.
RESERVED: frozenset[StrEnum] = frozenset()
