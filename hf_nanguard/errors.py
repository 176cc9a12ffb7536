"""What hf_nanguard can raise."""

from .plain_text import printable


class NanGuardError(Exception):
    """Base of every error raised by hf_nanguard. Its text may name values, files and other errors, so it is made printable."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep_newlines=True)


class ArgumentError(NanGuardError, ValueError):
    """A setting has a value that cannot work; the message names the setting, the value and what to do instead."""


class NonFiniteError(NanGuardError, ArithmeticError):
    """The run was halted because of NaN or inf, and no milder action was left or allowed."""


class LossMissingError(NanGuardError, ValueError):
    """`compute_loss` returned nothing that could be trained on."""
