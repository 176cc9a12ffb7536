"""Values that no argument takes: another type, a name that is none of the choices, a number out of range."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from typing import Any, get_args, get_type_hints

from transformers import AttentionInterface

from .argument_facts import TRUTHS, read_flag

SLIP = 0.82  # likeness from which a text is taken for a slip
QUOTED = re.compile(r"`[\"']([a-z][a-z0-9_]+)[\"']`")  # values that the help of an argument names
ATTENTION = ("eager", *AttentionInterface().valid_keys())
TEXTS = {"attn_implementation": (*ATTENTION, *(f"paged|{name}" for name in ATTENTION))}
STEPS = {"save_steps": "save_strategy", "eval_steps": "eval_strategy", "logging_steps": "logging_strategy"}
NUMBERS = ({int}, {float}, {int, float})
# Names, what their values must be, and the test of it. What the rules judge themselves (rates, betas, groups) is not here.
RANGES: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "lora_r", "max_length",
      "max_completion_length", "num_processes", "num_machines", "num_iterations", "steps_per_generation"),
     "must be at least 1", lambda number: number >= 1),
    (("save_steps", "eval_steps", "logging_steps"), "must be above 0", lambda number: number > 0),
    (("warmup_steps", "weight_decay", "neftune_noise_alpha"), "must be at least 0", lambda number: number >= 0),
    (("lora_dropout", "label_smoothing_factor"), "must be at least 0 and below 1", lambda number: 0 <= number < 1),
    (("epsilon", "repetition_penalty"), "must be above 0", lambda number: number > 0),
    (("num_train_epochs",), "must be above 0, or max_steps must be set", lambda number: number > 0),
    (("top_p",), "must be above 0 and at most 1", lambda number: 0 < number <= 1),
)  # fmt: skip


def find_bad_values(values: Mapping[str, object], classes: Iterable[type]) -> dict[str, str]:
    """Returns the names whose value no argument of these classes takes, each with what it must be. `None` is always taken."""
    bad: dict[str, str] = {}
    for cls in classes:
        hints = get_type_hints(cls)
        for each in fields(cls):
            value = values.get(each.name)
            if value is None or each.name in bad:
                continue
            problem = _judge_type(hints[each.name], each.metadata.get("choices"), value)
            problem = problem or _judge_text(each.name, str(each.metadata.get("help", "")), value)
            problem = problem or (None if _is_unused(each.name, values) else _judge_range(each.name, value))
            if problem:
                bad[each.name] = problem
    return bad


def _judge_type(hint: object, choices: Iterable[object] | None, value: object) -> str | None:
    kinds = {kind for kind in get_args(hint) or (hint,) if kind is not type(None)}
    names = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)), None)
    if names is not None or choices is not None:
        known = (
            [str(member.value) for member in names] if names is not None else [str(choice) for choice in choices or ()]
        )
        text = str(getattr(value, "value", value))
        if value is False and "no" in known:
            return 'must be "no" in quotation marks, because YAML reads a bare no as false'
        return None if text in known else _suggest(text, known)
    if kinds in NUMBERS:
        return _judge_number(value, float in kinds)
    if kinds == {bool} and not isinstance(value, bool) and str(value).strip().lower() not in TRUTHS:
        return "must be true or false"
    return None


def _judge_text(name: str, help_text: str, value: object) -> str | None:
    """Returns what a text must be that is nearly one of those its help names, or that must be JSON."""
    if not isinstance(value, str):
        return None
    if name.endswith("_kwargs"):
        is_mapping = not value or value.lstrip().startswith("{")
        return None if is_mapping else "must be a mapping, e.g. {use_reentrant: false}"
    return find_slip(value, [*TEXTS.get(name, ()), *QUOTED.findall(help_text)])


def find_slip(value: object, known: Iterable[str], likeness: float = SLIP) -> str | None:
    """Returns the known value that was probably meant by one that is nearly the same, `None` if there is none."""
    names = list(known)
    near = [] if not isinstance(value, str) or value in names else get_close_matches(value, names, 1, likeness)
    return f"did you mean {near[0]}?" if near else None


def find_contradictions(values: Mapping[str, object]) -> dict[str, str]:
    """Returns the names whose value another one rules out, each with what it must be."""
    bad: dict[str, str] = {}
    if read_flag(values, "load_in_4bit") and read_flag(values, "load_in_8bit"):
        bad["load_in_8bit"] = "must be false where load_in_4bit is true"
    if read_flag(values, "load_best_model_at_end"):
        evaluates, saves = (
            str(values.get(name) or usual) for name, usual in (("eval_strategy", "no"), ("save_strategy", "steps"))
        )
        if evaluates != saves != "best":
            bad["load_best_model_at_end"] = (
                f"must be false where eval_strategy is {evaluates} and save_strategy {saves}: the best checkpoint needs an evaluation at each save"
            )
    return bad


def _suggest(text: str, known: list[str]) -> str:
    near = get_close_matches(text, known, 1)
    listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f"did you mean {near[0]}?" if near else f"must be one of {listed}"


def _judge_number(value: object, may_be_float: bool) -> str | None:
    number = _read(value)
    if number is None:
        return "must be a number" if may_be_float else "must be an integer"
    return None if may_be_float or number == int(number) else "must be an integer"


def _read(value: Any) -> float | None:
    """Returns a finite number; YAML reads 1e-5 as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _is_unused(name: str, values: Mapping[str, object]) -> bool:
    """Returns whether the Trainer leaves out a number that is 0, or the epochs where it counts steps."""
    if name == "num_train_epochs":
        return (_read(values.get("max_steps")) or 0) > 0
    if name not in STEPS or _read(values.get(name)) != 0:
        return False
    counts = {
        each: _read_text(values, strategy, "no" if each == "eval_steps" else "steps") == "steps"
        for each, strategy in STEPS.items()
    }
    if counts["eval_steps"] and name != "save_steps" and not _read(values.get("eval_steps")):
        return _read(values.get("logging_steps")) != 0  # which it takes for eval_steps
    return not counts[name]


def _read_text(values: Mapping[str, object], name: str, usual: str) -> str:
    value = values.get(name) or usual
    return str(getattr(value, "value", value))


def _judge_range(name: str, value: object) -> str | None:
    number = _read(value)
    return next(
        (phrase for names, phrase, fits in RANGES if name in names and number is not None and not fits(number)), None
    )
