"""Imports point one way: `errors <- core <- report <- hf <- {takeover, bundle_replay, verification, examples} <- cli`."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_nanguard"
MAY_IMPORT = {
    "errors": set(),
    "core": {"errors"},
    "report": {"errors", "core"},
    "hf": {"errors", "core", "report"},
    "testing": set(),
    "takeover": {"errors", "core", "report", "hf", "cli"},
    "bundle_replay": {"errors", "core", "report", "hf"},
    "verification": {"errors", "core", "report", "hf"},
    "examples": {"errors", "core", "report", "hf"},
    "cli": {"errors", "core", "report", "hf", "takeover", "bundle_replay", "verification", "examples"},
    "run": {"cli"},
}
HOSTS = {"transformers", "accelerate", "trl", "peft", "datasets"}
HOST_FOLDERS = {"hf", "takeover", "bundle_replay", "verification", "examples"}
TRL_FILES = {"hf/guarded_sft.py", "hf/guarded_grpo.py", "hf/compat/online_trainer.py"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@dataclass(frozen=True)
class Import:
    """One imported module, by its absolute name."""

    module: str
    line: int
    at_head: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def layer(self) -> str | None:
        parts = self.module.split(".")
        return parts[1] if parts[0] == "hf_nanguard" and len(parts) > 1 and parts[1] in MAY_IMPORT else None


def _is_late(block: ast.AST) -> bool:
    """Returns whether what is inside is not run when the module is imported."""
    types_only = isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
    return types_only or isinstance(block, (ast.FunctionDef, ast.Lambda))


def find_imports(path: Path) -> Iterator[Import]:
    package = ("hf_nanguard", *path.relative_to(PACKAGE).parts[:-1])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {node for block in ast.walk(tree) if _is_late(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        at_head = node not in late
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_head)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:  # `from . import compat` names a module, `from .compat import x` a thing in one
                yield Import(module if node.module else f"{module}.{alias.name}", node.lineno, at_head)


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_layer_imports_only_those_below(path):
    layer = layer_of(path)
    assert layer in MAY_IMPORT, f"{name_of(path)} belongs to no layer"
    allowed = MAY_IMPORT[layer] | {layer}
    wrong = [f"line {i.line}: {i.module}" for i in find_imports(path) if i.layer is not None and i.layer not in allowed]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_host_libraries_are_imported_in_their_place(path):
    layer, name = layer_of(path), name_of(path)
    hosts = [i for i in find_imports(path) if i.top in HOSTS]
    wrong = [i for i in hosts if i.top == "trl" and name not in TRL_FILES and layer != "examples"]
    wrong = wrong if layer in HOST_FOLDERS else hosts
    assert not [f"line {i.line}: {i.module}" for i in wrong]


@pytest.mark.parametrize("path", [p for p in FILES if layer_of(p) == "core"], ids=name_of)
def test_core_needs_torch_and_safetensors_only(path):
    known = {*sys.stdlib_module_names, "torch", "safetensors", "hf_nanguard"}
    assert not [f"line {i.line}: {i.module}" for i in find_imports(path) if i.top not in known]


@pytest.mark.parametrize("path", [p for p in FILES if layer_of(p) == "cli"], ids=name_of)
def test_commands_import_nothing_heavy_at_their_head(path):
    heavy = {"torch", "safetensors", "numpy", "rich", *HOSTS}
    assert not [
        f"line {i.line}: {i.module}"
        for i in find_imports(path)
        if i.at_head and (i.top in heavy or i.layer in ("core", *HOST_FOLDERS - {"takeover"}))
    ]


def test_the_recipe_of_a_plain_loop_uses_the_core_only():
    tree = ast.parse((ROOT / "recipes" / "plain_loop.py").read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    assert all(m.startswith("hf_nanguard.core") for m in modules if m.startswith("hf_nanguard"))
    assert not HOSTS & {m.split(".")[0] for m in modules}


HOST_OBJECTS = {"trainer", "accelerator", "optimizer", "lr_scheduler"}


def private_touches(path: Path) -> Iterator[tuple[str, int]]:
    """Yields private attributes of the host's objects, known by the names such objects have here."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else None
            if name in HOST_OBJECTS:
                yield node.attr, node.lineno


def overridden() -> set[str]:
    """Returns the private methods that the mixin overrides: its seam with the host, named there."""
    tree = ast.parse((PACKAGE / "hf" / "trainer" / "mixin.py").read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", [p for p in FILES if layer_of(p) == "hf" and p.parent.name != "compat"], ids=name_of)
def test_private_names_of_the_host_are_touched_in_compat_only(path):
    assert not [f"line {line}: {name}" for name, line in private_touches(path) if name not in overridden()]


def test_the_checks_see_what_they_should(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "core").mkdir()
    file = tmp_path / "core" / "bad.py"
    file.write_text("from ..hf import mixin\nfrom .. import report\ndef f():\n    import trl\n    trainer._secret\n")
    found = list(find_imports(file))
    assert [(i.module, i.at_head) for i in found] == [
        ("hf_nanguard.hf", True),
        ("hf_nanguard.report", True),
        ("trl", False),
    ]
    assert [i.layer for i in found] == ["hf", "report", None]
    assert list(private_touches(file)) == [("_secret", 5)]
