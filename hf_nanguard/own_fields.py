"""What an object or a class holds itself, apart from what it has from its class or its bases. Beside the pages for hosts and for
torch, only this one looks into the dictionary of an object."""

from collections.abc import Callable
from typing import Any

own_fields: Callable[[object], dict[str, Any]] = vars
"""Returns the attributes that an object, a module or a class holds itself: whether a method was put on one object, what a class of
somebody else's adds, which attributes may be state. What is put into those of an object is set. It costs and fails no more than
the builtin that it is; an object with slots only is a `TypeError`."""
