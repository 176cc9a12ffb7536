"""The arguments of a run from its `training_args.bin`: a pickle, whose instructions are read and never carried out.

Only plain values are taken: numbers, texts, truth values, lists and mappings of them, and the text of an enum member. Whatever else
the pickle would build, import or call becomes a placeholder. An instruction that a file of `torch.save` does not need makes the
whole file unreadable, as does a size above one MiB.
"""

import io
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ...safe_files import read_file

MAX_BYTES = 2**20
LITERALS = ("BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT", "LONG1", "BINBYTES", "SHORT_BINBYTES")  # fmt: skip
HOSTS = ("transformers.", "trl.", "accelerate.")  # whose enums arguments have
CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(eq=False)
class _Opaque:
    """What the pickle would build by a call: the name of what it calls, the arguments, and the state it would get."""

    name: str
    arguments: tuple[object, ...] = ()
    state: object = None


def read_saved_arguments(folder: Path) -> tuple[str, dict[str, object]] | None:
    """Returns the name of the class and the plain values of `training_args.bin`, `None` if there is none that can be read."""
    try:
        with zipfile.ZipFile(io.BytesIO(read_file(folder / "training_args.bin", MAX_BYTES))) as archive:
            name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
            with archive.open(name) as file:
                content = file.read(MAX_BYTES + 1)
        found = _trace(content) if len(content) <= MAX_BYTES else None
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        StopIteration,
        RuntimeError,
        NotImplementedError,
        zipfile.BadZipFile,
        EOFError,
    ):
        return None  # not of torch.save, or damaged
    if not isinstance(found, _Opaque) or not isinstance(found.state, dict):
        return None
    plain = {name: _find_plain(value) for name, value in found.state.items() if isinstance(name, str)}
    return found.name.rpartition(".")[2], {
        name: value for name, value in plain.items() if not isinstance(value, _Opaque)
    }


def _find_plain(value: object) -> object:
    """Returns the text of an enum member, which is built from it alone; other values as they are."""
    if not isinstance(value, _Opaque) or not value.name.startswith(HOSTS) or len(value.arguments) != 1:
        return value
    return value.arguments[0] if isinstance(value.arguments[0], str) else value


def _trace(content: bytes) -> object:
    """Follows the instructions and returns what the file would build, with placeholders for all that is not plain."""
    stack: list[object] = []
    memo: dict[int, object] = {}
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in LITERALS:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in TUPLES:
            stack.append(tuple(_take(stack, TUPLES[name])))
        elif name in ("BINPUT", "LONG_BINPUT") and argument is not None:
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET") and argument is not None:
            stack.append(memo[argument])
        elif name == "STOP":
            return stack[-1]
        elif name != "PROTO":
            _build(name, argument, stack)
    return None


def _build(name: str, argument: object, stack: list[object]) -> None:
    """Follows an instruction that builds something out of what is on the stack."""
    if name == "MARK":
        stack.append(_MARK)
    elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
        stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": list}[name]())
    elif name == "GLOBAL":
        stack.append(_Opaque(str(argument).replace(" ", ".")))
    elif name == "BINPERSID":
        stack[-1] = _Opaque("storage")
    elif name == "TUPLE":
        stack.append(tuple(_take_marked(stack)))
    elif name in ("REDUCE", "NEWOBJ"):
        called, arguments = _take(stack, 2)
        stack.append(_Opaque(getattr(called, "name", ""), arguments if isinstance(arguments, tuple) else ()))
    elif name == "BUILD":
        (state,) = _take(stack, 1)
        if isinstance(stack[-1], _Opaque):
            stack[-1].state = state
    elif name in ("SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS"):
        items = _take(stack, 2 if name == "SETITEM" else 1) if name in ("SETITEM", "APPEND") else _take_marked(stack)
        if isinstance(stack[-1], dict):
            stack[-1].update(
                (key, _find_plain(value))
                for key, value in zip(items[::2], items[1::2], strict=True)
                if isinstance(key, str)
            )
        elif isinstance(stack[-1], list):
            stack[-1].extend(items)
    else:
        raise ValueError(f"unexpected instruction {name}")


def _take(stack: list[object], count: int) -> list[object]:
    """Takes the last values off the stack."""
    if count > len(stack):
        raise ValueError("the stack is empty")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken


def _take_marked(stack: list[object]) -> list[object]:
    """Takes the values above the newest mark off the stack, and the mark."""
    at = next(i for i in range(len(stack) - 1, -1, -1) if stack[i] is _MARK)
    taken = stack[at + 1 :]
    del stack[at:]
    return taken
