"""Text from errors, datasets and files, made safe to print on a terminal and short enough for one line of a log."""

MAX_LINE = 300


def printable(text: str, max_length: int | None = None, keep_newlines: bool = False) -> str:
    """Returns a text that cannot move a cursor, change colors or reorder what is shown.

    Every control character, escape character, carriage return, bidirectional override and other invisible character
    becomes a space.

    Args:
        text (`str`):
            Any text.
        max_length (`int`, *optional*):
            Cut the text to that many characters and append `...` if it is longer.
        keep_newlines (`bool`, *optional*, defaults to `False`):
            Whether line feeds stay, for text of several lines.
    """
    cut = max_length is not None and len(text) > max_length
    shown = "".join(
        char if char.isprintable() or (keep_newlines and char == "\n") else " " for char in text[:max_length]
    )
    return f"{shown}..." if cut else shown


def first_line(error: BaseException, max_length: int = MAX_LINE) -> str:
    """Returns the first line of an error's message, printable and cut to a length; `"no message"` if there is none."""
    lines = str(error).strip().splitlines()
    return printable(lines[0][:max_length]) if lines else "no message"


def format_error(error: BaseException, max_length: int = MAX_LINE) -> str:
    """Returns the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error, max_length)}"


def format_value(value: object, max_length: int = 200) -> str:
    """Returns a value as it is written in Python, cut to a length that fits into a sentence."""
    if isinstance(value, int) and value.bit_length() > max_length:  # Python refuses to write very long integers
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= max_length else f"{text[:max_length]}..."
