"""YAML files of settings and arguments, read so that no file can block, exhaust memory or end in a traceback.

Only regular files of limited size are read, with PyYAML's safe loader and no tags besides those of JSON values. Nesting and
the number of values are limited, with aliases counted as if they were written out. A name may occur once in a mapping.
Dates stay text.
"""

from collections.abc import Hashable
from pathlib import Path

import yaml

from .errors import ArgumentError
from .plain_text import first_line, format_value
from .safe_files import read_file

MAX_BYTES = 2**20
MAX_NODES = 10_000
MAX_LEVELS = 32
MAX_BITS = 64  # of an integer
MAX_NUMBER = 100  # characters of a number or a date; PyYAML takes minutes for a long integer in base 60
TAG = "tag:yaml.org,2002:"
KINDS = ("null", "bool", "int", "float", "str", "timestamp", "seq", "map")
# PyYAML's own constructors raise these for values that do not fit their tag, e.g. `!!bool maybe` or an impossible date.
BAD_VALUES = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError)


def read_yaml(path: str, source: str = "--config", example: str = "learning_rate: 1.0e-5") -> dict[str, object]:
    """Returns the names and values of a YAML file. Errors name `source`, the flag or variable that names the file."""
    try:
        text = read_file(Path(path), MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{source} must be a readable YAML file, got {path!r} (not text).") from error
    except (OSError, ValueError) as error:  # ValueError: too large, or a zero byte in the path
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        raise ArgumentError(f"{source} must be a readable YAML file, got {path!r} ({reason}).") from error
    try:
        content = yaml.load(text, _LimitedLoader)
    except yaml.YAMLError as error:
        raise ArgumentError(f"{source} must be a YAML file, got {path!r} ({_format_problem(error)}).") from error
    if not isinstance(content, dict):
        raise ArgumentError(f"{source} must be a YAML file of names and values, got {path!r}. For example {example}.")
    return {str(name): value for name, value in content.items()}


def _format_problem(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return first_line(error)
    return f"line {error.problem_mark.line + 1}: {error.problem}"


def _problem(text: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)


class _LimitedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with limits, and a `yaml.YAMLError` for everything that it does not accept."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self.num_nodes = 0
        self.num_levels = 0
        self.num_behind: dict[str, int] = {}  # how many nodes an alias stands for

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event, before = self.peek_event(), self.num_nodes
        is_alias = isinstance(event, yaml.AliasEvent)
        self.num_nodes += self.num_behind.get(event.anchor, 1) if is_alias else 1
        self.num_levels += 1
        if self.num_nodes > MAX_NODES or self.num_levels > MAX_LEVELS:
            what = f"more than {MAX_NODES} values" if self.num_nodes > MAX_NODES else f"more than {MAX_LEVELS} levels"
            raise _problem(what, event.start_mark)
        if not is_alias and event.anchor is not None:
            self.num_behind[event.anchor] = MAX_NODES  # inside itself, an alias has no end
        node = super().compose_node(parent, index)
        self.num_levels -= 1
        if not is_alias and event.anchor is not None:
            self.num_behind[event.anchor] = self.num_nodes - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        kind, text = node.tag.removeprefix(TAG), node.value if isinstance(node, yaml.ScalarNode) else ""
        if kind not in KINDS:
            raise _problem(f"values of the tag {node.tag[:80]!r} are not read", node.start_mark)
        if kind != "str" and len(text) > MAX_NUMBER:
            raise _problem(f"{text[:20]!r}... is too long for a value of type {kind}", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except BAD_VALUES as error:
            raise _problem(f"{text!r} is not a valid {kind} ({first_line(error)})", node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _problem(f"the integer {text} is too large", node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{TAG}merge":  # `<<`, whose names may be overridden
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise _problem(f"{format_value(key)} occurs twice", key_node.start_mark)
            seen |= {key} if isinstance(key, Hashable) else set()
        return super().construct_mapping(node, deep)

    def construct_date(self, node: yaml.ScalarNode) -> str:
        """Returns a date as it is written, if it exists."""
        self.construct_yaml_timestamp(node)
        return node.value


_LimitedLoader.add_constructor(f"{TAG}timestamp", _LimitedLoader.construct_date)
