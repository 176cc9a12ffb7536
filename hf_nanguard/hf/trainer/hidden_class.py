"""Classes that are made here and that a user's own code is not told of."""

from typing import Any

MADE_HERE = "nanguard_made_here"
"""In the body of a class that only we know of. A keyword of the class would not do: few metaclasses take one."""


class Stealth:
    """Keeps `__init_subclass__` of the classes after it, a registry perhaps, from hearing of a class that is made here."""

    def __init_subclass__(cls, **kwargs: Any):
        if MADE_HERE not in vars(cls):
            super().__init_subclass__(**kwargs)


def is_made_here(cls: type) -> bool:
    """Returns whether a class was made by `guarded` or `attach`, whatever module it claims to be from."""
    return MADE_HERE in vars(cls)
