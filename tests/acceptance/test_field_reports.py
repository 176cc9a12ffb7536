"""Every name in field-reports.md is there: symbols are imported, values compared, flags, metrics and files looked up.

In the columns that speak of us each word in backticks must be one of the kinds in `KINDS`; anything else fails. In a row of
kind default, a value in the third column must be the default of the code, or stand in the preset that is named before it.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import yaml

import hf_nanguard
from hf_nanguard import GuardArguments, GuardedGRPOConfig, GuardedSFTConfig, GuardedTrainingArguments
from hf_nanguard.cli.main import build_parser
from hf_nanguard.core.event import Event
from hf_nanguard.core.vocabulary import Action, Cause, Signal
from recipes import grpo, sft

from ..recipes.markdown import ROOT, find_sections, find_tables, is_said, named_in, read_page

PAGE = read_page("tests/acceptance/field-reports.md")
REPORTS = {title: body for title, body in find_sections(PAGE, 2).items() if re.match(r"\d\. ", title)}
LACKING = "not here"
TRL = {"sft": sft, "grpo": grpo}
CONFIGS = (GuardedTrainingArguments, GuardedSFTConfig, GuardedGRPOConfig)
# What the reports call their classes, functions, flags and measures.
NAMES = {
    1: ["NumericalStabilityLogitsProcessor", "TemperatureLogitsWarper", "GradientMonitorCallback", "clip_value", "min_prob",
        "ActivationMonitorCallback", "verbose", "min_temperature", "check_every_n_steps", "log_every_n_steps", "halt_on_nan",
        "max_grad_norm", "warmup_steps", "bf16", "fp16", "learning_rate"],
    2: ["GradientMonitoringCallback", "safe_compute_loss", "train_model", "max_grad_norm", "warmup_steps", "bf16", "label_names",
        "accuracy", "answer rate"],
    3: ["text_loss", "latent_loss", "lr", "grad_clip_norm", "warmup_steps", "dtype", "gradient_accumulation_steps", "loss_scale",
        "text_loss_weight", "latent_loss_weight", "train_batch_size", "eps"],
    4: ["student_lr", "router_lr", "temperature", "--train_steps", "--model_dtype", "--per_device_batch_size", "--eval_steps",
        "--student_lr", "--temperature", "--alpha_kd", "--alpha_ce", "kd", "ce", "success rate", "perplexity", "memory"],
    5: ["get_loss", "loss_simple", "loss_vlb", "total_loss", "lr", "min_lr", "amp", "fp16", "resume_milestone"],
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row of a report's table."""

    report: int
    kind: str
    theirs: str
    ours: str
    why: str


@dataclass(frozen=True)
class Word:
    """What stands in backticks in a cell, with the cell and the row it is from."""

    text: str
    cell: str
    row: Row

    @property
    def is_default(self) -> bool:
        """Whether a value that it gives must be the default."""
        return self.row.kind == "default" and self.cell == self.row.ours


ROWS = [
    Row(int(title[0]), *cells) for title, body in REPORTS.items() for cells in find_tables(body, "kind")
]  # fmt: skip
WORDS = [Word(text, cell, row) for row in ROWS for cell in (row.ours, row.why) for text in named_in([cell])]


def find_symbol(name: str) -> Any:
    """Imports the longest module of a dotted name and returns what the rest leads to."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        return found
    raise AssertionError(f"{name} cannot be imported")


def read_value(text: str) -> Any:
    """Returns a value as Python or, failing that, as a bare word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# ---- kinds of words: each returns whether it is one, and fails if it is a wrong one ----


def is_symbol(word: Word) -> bool:
    match = re.fullmatch(r"((?:hf_nanguard|recipes)\.[\w.]+)(?:\((.*)\)| = (.*))?", word.text)
    if match is None:
        return False
    name, arguments, value = match.groups()
    found = find_symbol(name)
    if value is not None:
        assert found == read_value(value), word
    if arguments is not None:
        known = inspect.signature(found).parameters
        for keyword in ast.parse(f"f({arguments})").body[0].value.keywords:  # type: ignore[attr-defined]
            assert keyword.arg in known, word
            if word.is_default:
                assert known[keyword.arg].default == ast.literal_eval(keyword.value), word
    return True


def is_setting(word: Word) -> bool:
    match = re.fullmatch(r"(nanguard_\w+)(?:=(.*))?", word.text)
    if match is None:
        return False
    name, value = match.groups()
    defaults = {field.name: field.default for field in fields(GuardArguments)}
    assert name in defaults, word
    if value is not None:
        GuardArguments(**{name: read_value(value)})  # refuses a value that cannot be
        assert not word.is_default or defaults[name] == read_value(value), word
    return True


def is_host_argument(word: Word) -> bool:
    name, _, value = word.text.partition("=")
    found = [field for config in CONFIGS for field in fields(config) if field.name == name and name.isidentifier()]
    if not found:
        return False
    if value and word.is_default:
        assert read_value(value) in [field.default for field in found], word
    return True


@cache
def find_flags(command: str) -> dict[str, Any]:
    """Returns the flags of a recipe or a command with their defaults."""
    name = command.removeprefix("recipes/").removesuffix(".py").removeprefix("nanguard ")
    if name in TRL:
        return {action.dest: action.default for action in TRL[name].make_parser()._actions}
    if command.startswith("nanguard "):
        [commands] = [action for action in build_parser()._actions if action.dest == "command"]
        return {action.dest: action.default for action in commands.choices[name]._actions}  # type: ignore[index]
    recipe = import_module(f"recipes.{name}")
    config = GuardedGRPOConfig if name == "grpo_vlm" else GuardedTrainingArguments
    known = [*fields(config), *fields(recipe.ScriptArguments)]
    own = {field.name: field.default for field in known if field.default is not MISSING}
    return {**own, **recipe.DEFAULTS, "preset": None}


def is_flag(word: Word) -> bool:
    match = re.fullmatch(r"(recipes/\w+\.py|nanguard \w+) --(\w+)(?: (\S+))?", word.text)
    if match is None:
        return False
    command, flag, value = match.groups()
    known = find_flags(command)
    assert flag in known, word
    if value is not None and word.is_default:
        assert known[flag] == read_value(value), word
    return True


def is_command(word: Word) -> bool:
    if not re.fullmatch(r"nanguard \w+", word.text):
        return False
    find_flags(word.text)
    return True


def is_metric(word: Word) -> bool:
    if not word.text.startswith("nanguard/"):
        return False
    known = named_in([cells[0] for cells in find_tables(read_page("docs/events.md"), "metric")])
    patterns = [re.escape(name).replace("<name>", r"\w+") for name in known]
    assert any(re.fullmatch(pattern, word.text) for pattern in patterns), word
    return True


def is_file(word: Word) -> bool:
    if not re.fullmatch(r"[\w/.-]+\.(py|yaml|jsonl|md)", word.text):
        return False
    assert (ROOT / word.text).is_file() or is_said(word.text), word  # a run's own files
    return True


def is_preset_line(word: Word) -> bool:
    if not re.fullmatch(r"\w+: \S+", word.text):
        return False
    files = re.findall(r"`(configs/[^`]+)`", word.cell[: word.cell.index(f"`{word.text}`")])
    [(name, value)] = yaml.safe_load(word.text).items()
    assert files, word
    for file in files:
        assert yaml.safe_load(read_page(file))[name] == value, (file, word)
    return True


def is_printed(word: Word) -> bool:
    """A text in quotes, which a file that is named in the same cell must hold."""
    if not re.fullmatch(r'".+"', word.text):
        return False
    files = [name for name in named_in([word.cell]) if name.endswith(".py")]
    assert any(word.text in read_page(file) for file in files), word
    return True


def is_vocabulary(word: Word) -> bool:
    event = Event(0, Signal.LOSS_ZERO, Action.OBSERVED, "").as_dict()
    return word.text in {*Signal, *Action, *Cause} or word.text.split(".")[0] in event


def is_parameter(word: Word) -> bool:
    """A parameter of something that the same row names."""
    symbols = [text for text in named_in([word.row.ours]) if text.startswith("hf_nanguard.")]
    found = [find_symbol(re.sub(r"\(.*| = .*", "", symbol)) for symbol in symbols]
    names = {name for each in found if callable(each) for name in inspect.signature(each).parameters}
    return word.text.split("=")[0] in names


def is_exported(word: Word) -> bool:
    return word.text in hf_nanguard.__all__


KINDS: tuple[Callable[[Word], bool], ...] = (
    is_symbol, is_setting, is_host_argument, is_flag, is_command, is_metric, is_file, is_preset_line, is_printed,
    is_vocabulary, is_parameter, is_exported,
)  # fmt: skip


def numbers_in(text: str) -> Iterator[float]:
    for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)", text):
        yield float(number.replace(",", ""))


# ---- the tests ----


def test_there_are_five_reports_with_a_recipe_each():
    assert [title[0] for title in REPORTS] == list("12345")
    table = find_tables(PAGE, "report")
    assert [cells[0] for cells in table] == list("12345")
    for cells in table:
        for text in named_in(cells[1:]):
            word = Word(text, cells[1], Row(int(cells[0]), "capability", "", cells[1], ""))
            assert is_flag(word) or is_file(word), text


@pytest.mark.parametrize("word", WORDS, ids=[f"{word.row.report}-{word.text}" for word in WORDS])
def test_every_word_about_us_is_true(word):
    assert any(kind(word) for kind in KINDS), word


@pytest.mark.parametrize("report", NAMES)
def test_every_name_of_a_report_has_a_row(report):
    theirs = " ".join(row.theirs for row in ROWS if row.report == report)
    for name in NAMES[report]:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?!\w)", theirs), name


def test_rows_are_whole():
    for row in ROWS:
        assert row.kind in ("capability", "class", "function", "flag", "default", "metric"), row
        assert row.theirs, row
        assert row.ours == LACKING or "`" in row.ours or "](" in row.ours, row
        assert row.why or row.ours != LACKING, row
    stated = [(row.report, row.theirs) for row in ROWS]
    assert len(stated) == len(set(stated))


def test_what_is_not_here_is_left_out_on_purpose():
    """A capability that was built since must not be called missing."""
    assert [row.theirs for row in ROWS if LACKING in row.ours + row.why] == [
        "a loss that is never 0",
        "`loss_scale` 1.0",
    ]


def test_another_default_is_explained():
    """Where the number of a report is not found on our side, the last column must say why."""
    for row in ROWS:
        if row.kind == "default" and not set(numbers_in(row.theirs)) & set(numbers_in(row.ours)):
            assert row.why or not set(numbers_in(row.theirs)), row


def test_wrong_words_are_found():
    row = Row(1, "default", "", "", "")
    wrong = {
        "hf_nanguard.core.losses.bounded_lose": is_symbol, "hf_nanguard.clamp_weight(max=99.0)": is_symbol,
        "hf_nanguard.verification.grade.BEST_RATE = 0.8": is_symbol, "nanguard_max_bad_steps=9": is_setting,
        "nanguard_no_such": is_setting, "recipes/distill.py --no_such": is_flag, "recipes/distill.py --alpha_kd 0.2": is_flag,
        "nanguard/no_such": is_metric, "recipes/no_such.py": is_file, "max_grad_norm=2.0": is_host_argument,
        "nanguard none": is_command, "nanguard run --no_such": is_flag,
    }  # fmt: skip
    for text, kind in wrong.items():
        with pytest.raises((AssertionError, AttributeError, KeyError)):
            kind(Word(text, row.ours, row))
    cell = "`configs/grpo/balanced.yaml` `warmup_steps: 11`"
    with pytest.raises(AssertionError):
        is_preset_line(Word("warmup_steps: 11", cell, row))
    assert not any(kind(Word("no_such_word", "", row)) for kind in KINDS)
