"""What an event quotes of prompts and completions: the one to blame, as one short line."""

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

MAX_TEXT = 200


def find_blamed(frames: Sequence[FrameType], completions: Sequence[Any]) -> int | None:
    """Returns the one completion that the functions on the way to an error held, `None` if there is no such one.

    A loop over completions holds the one it failed at in a local variable; it is known by identity, not by its text.
    """
    owners: dict[int, set[int]] = {}
    for i, completion in enumerate(completions):
        messages = completion if isinstance(completion, list) else []
        contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
        for thing in (completion, *messages, *contents):
            if isinstance(thing, (list, Mapping)) or (isinstance(thing, str) and len(thing) > 1):  # "" is shared by all
                owners.setdefault(id(thing), set()).add(i)
    values = (value for frame in frames for value in frame.f_locals.values())
    held = set().union(*(owners.get(id(value), ()) for value in values))
    return held.pop() if len(held) == 1 else None


def flatten(text: Any) -> str:
    """Returns a prompt or completion in any of TRL's formats as one text."""
    if isinstance(text, Mapping):
        content = text.get("content", text.get("text"))
        body = flatten(content) if content else f"[{text.get('type', 'tool_calls' if 'tool_calls' in text else '')}]"
        return f"{text['role']}: {body}" if "role" in text else body
    if isinstance(text, (list, tuple)):
        return " ".join(map(flatten, text))
    return str(text)


def printable(text: str) -> str:
    """Returns a text on one line, cut."""
    text = text.strip()
    short = "".join(char if char.isprintable() else " " for char in text[:MAX_TEXT])
    return short if len(text) <= MAX_TEXT else f"{short}..."
