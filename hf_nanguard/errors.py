"""What hf_nanguard can raise."""


class NanGuardError(Exception):
    """Base of every error raised by hf_nanguard."""


class ArgumentError(NanGuardError, ValueError):
    """A setting has a value that cannot work; the message names the setting, the value and the way out."""


class NonFiniteError(NanGuardError, ArithmeticError):
    """The run was halted because its numbers went bad and no milder action was left or allowed."""


class LossMissingError(NanGuardError, ValueError):
    """`compute_loss` returned nothing that could be trained on."""
