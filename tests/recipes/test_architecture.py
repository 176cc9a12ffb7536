"""docs/architecture.md and CONTRIBUTING.md: folders, files and names exist, and the walks are the calls of real runs."""

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hf_nanguard
from hf_nanguard import NonFiniteError
from hf_nanguard.testing import Fault, plant

from ..test_layering import FOLDERS
from ..trainers import build
from .markdown import (
    ROOT,
    anchor_headings,
    find_anchors,
    find_links,
    find_sections,
    find_snippets,
    find_tables,
    named_in,
    read_page,
)

PACKAGE = Path(hf_nanguard.__file__).parent  # as it is in the code objects of calls
PAGE, GUIDE = read_page("docs/architecture.md"), read_page("CONTRIBUTING.md")
HOP = r"`([\w/]+\.py): ([\w.]+)`"
WALKS = {title: re.findall(rf"^\d+\. {HOP}", body, re.MULTILINE) for title, body in find_sections(PAGE, 3).items()}
HEALTHY, BAD, REWIND, GRPO = WALKS
MAX_HOPS = 25
# A healthy step calls these files so often that each of their functions must be a hop or be named as left out.
CENTRAL = (
    "hf/trainer/mixin.py", "hf/trainer/trainer_guard.py", "hf/trainer/guarded_step.py", "hf/trainer/step_recorder.py",
    "core/step/guard.py", "core/step/settle.py", "core/monitors/monitor_set.py",
)  # fmt: skip


@cache
def find_definitions(file: str) -> dict[str, bool]:
    """Returns the functions, methods and classes of a file by qualified name, and whether each is a property."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                decorators = {ast.unparse(decorator) for decorator in child.decorator_list}
                found[prefix + child.name] = bool(decorators & {"property", "cached_property"})
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((PACKAGE / file).read_text(encoding="utf-8")), "")
    return found


class Calls:
    """Records the calls of our functions, by file and qualified name, while it is switched on."""

    def __init__(self) -> None:
        self.on = False
        self.made: list[tuple[str, str]] = []

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            self.made.append((code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname))

    def record(self, trainer: Any, first: str, last: str, step: int) -> None:
        """Records from the call of one method of a trainer to the end of another, in one step."""

        def begin(*args: Any, **kwargs: Any) -> Any:
            self.on = self.on or (trainer.state.global_step == step and not trainer.nanguard.replaying)
            return original_first(*args, **kwargs)

        def end(*args: Any, **kwargs: Any) -> Any:
            try:
                return original_last(*args, **kwargs)
            finally:
                self.on = False

        original_first = getattr(trainer, first)
        setattr(trainer, first, begin)
        original_last = getattr(trainer, last)
        setattr(trainer, last, end)
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            trainer.train()
        except NonFiniteError:
            pass  # the refused checkpoint ends the run
        finally:
            sys.setprofile(before)


def run_healthy(tmp_path, calls):
    trainer = build("sft", tmp_path, gradient_accumulation_steps=1, max_steps=3, logging_steps=50)
    calls.record(trainer, "get_batch_samples", "_maybe_log_save_evaluate", step=1)


def run_bad(tmp_path, calls):
    trainer = build("sft", tmp_path)
    planted = plant(trainer, Fault("loss", micro_step=1))
    calls.record(trainer, "get_batch_samples", "_maybe_log_save_evaluate", step=2)
    assert planted.triggered


def run_rewind(tmp_path, calls):
    trainer = build("sft", tmp_path, save_strategy="steps", save_steps=3)
    planted = plant(trainer, Fault("moment", parameter="model.layers.0.mlp.up_proj.weight"))
    calls.record(trainer, "_save_checkpoint", "_save_checkpoint", step=3)
    assert planted.triggered


def run_grpo(tmp_path, calls):
    trainer = build("grpo", tmp_path, max_steps=1)
    calls.record(trainer, "_generate_and_score_completions", "_generate_and_score_completions", step=0)


RUNS = {HEALTHY: run_healthy, BAD: run_bad, REWIND: run_rewind, GRPO: run_grpo}


def find_missing(walk, made):
    """Returns the first hop of a walk that was not called after those before it, `None` if all were."""
    calls = iter(made)
    return next((hop for hop in walk if hop not in calls), None)


# ---- names ----


@pytest.mark.parametrize("page", [PAGE, GUIDE], ids=["architecture", "contributing"])
def test_every_function_named_is_there(page):
    named = re.findall(HOP, page)
    assert named
    for file, name in named:
        assert (PACKAGE / file).is_file(), file
        assert name in find_definitions(file), f"{file}: {name}"


def test_every_folder_is_on_the_page():
    stated = [name for cells in find_tables(PAGE, "folder") for name in named_in(cells[:1])]
    assert sorted(stated) == sorted(f"{folder.replace('.', '/') or 'hf_nanguard'}/" for folder in FOLDERS)


def test_the_glossary_names_classes_of_the_files_it_gives():
    rows = find_tables(PAGE, "name")
    for cells in rows:
        [file] = named_in(cells[1:2])
        for name in named_in(cells[:1]):
            assert name in find_definitions(file), f"{file}: {name}"
            assert cells[2], name


def test_the_diagram_shows_methods_that_are_there():
    [diagram] = find_snippets(PAGE, "mermaid")
    files = ("hf/trainer/mixin.py", "hf/trainer/trainer_guard.py", "hf/trainer/guarded_step.py",
             "hf/trainer/step_recorder.py", "core/step/guard.py", "core/step/decision.py", "core/monitors/monitor_set.py")  # fmt: skip
    known = {name.rsplit(".", 1)[-1] for file in files for name in find_definitions(file)}
    shown = re.findall(r"\b(\w+)\(\)", diagram)
    assert len(shown) > 15
    assert set(shown) <= known
    assert not re.search(r"[;#]", diagram)  # either ends a message in Mermaid


def test_files_named_in_the_guide_exist():
    for file in re.findall(r"`((?:hf_nanguard|tests|docs|benchmarks|recipes|configs)/[\w/.-]+)`", GUIDE + PAGE):
        assert (ROOT / file).exists(), file
    for link in find_links(GUIDE):
        assert (ROOT / link).exists(), link
    assert set(find_anchors(GUIDE)) <= anchor_headings(GUIDE)


def test_the_snippet_of_the_guide_runs(tmp_path):
    [snippet] = find_snippets(GUIDE, "python")
    exec(compile(snippet, "CONTRIBUTING.md", "exec"), {"trainer": build("plain", tmp_path)})


def test_examples_in_the_guide_are_lines_of_the_code():
    code = {line.strip() for path in PACKAGE.rglob("*.py") for line in path.read_text(encoding="utf-8").splitlines()}
    examples = re.findall(r"^ *```python no-run\n(.*?)^ *```$", GUIDE, flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip() for example in examples for line in example.splitlines()]
    assert len(examples) >= 5
    assert [line for line in lines if line != "..." and line not in code] == []


def test_commands_of_the_guide_are_targets_of_make():
    targets = set(re.findall(r"^([a-z][\w-]*):", read_page("Makefile"), flags=re.MULTILINE))
    stated = set(re.findall(r"`make (\w+)`", GUIDE))
    assert stated <= targets
    assert {"demo", "test", "quick", "unit", "lint", "slow", "variants"} <= stated


# ---- walks ----


def test_a_healthy_step_is_short():
    assert 0 < len(WALKS[HEALTHY]) < MAX_HOPS


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_what_is_called(title, tmp_path):
    calls = Calls()
    RUNS[title](tmp_path, calls)
    assert find_missing(WALKS[title], calls.made) is None
    if title == HEALTHY:
        hidden = {hop for hop in calls.made if hop[0] in CENTRAL and "<" not in hop[1]}
        hidden -= {hop for hop in hidden if find_definitions(hop[0])[hop[1]]}
        assert hidden - set(re.findall(HOP, find_sections(PAGE, 3)[HEALTHY])) == set()


def test_a_wrong_walk_is_seen():
    made = [("a.py", "f"), ("a.py", "g"), ("a.py", "f")]
    assert find_missing([("a.py", "f"), ("a.py", "g")], made) is None
    assert find_missing([("a.py", "g"), ("a.py", "g")], made) == ("a.py", "g")
    assert find_missing([("a.py", "h")], made) == ("a.py", "h")
    assert "TrainerGuard.watches" in find_definitions("hf/trainer/trainer_guard.py")
    assert find_definitions("hf/trainer/trainer_guard.py")["TrainerGuard.watches"]
