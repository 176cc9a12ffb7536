"""What an object or a class holds itself, apart from what it has from its class or its bases. Beside the pages for hosts and for
torch, only this one looks into the dictionary of an object."""

from typing import Any


def own_fields(holder: object) -> dict[str, Any]:
    """Returns the attributes that an object, a module or a class holds itself: whether a method was put on one object, what a
    class of somebody else's adds, which attributes may be state. What is put into those of an object is set.

    Raises:
        TypeError: if it has slots only, or is a value such as a number.
    """
    return vars(holder)
