"""The structure of the package: what each folder holds, what it may import, and where private names of hosts are used."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_nanguard"
MAX_FILES = 13

# folder -> (what belongs there, the folders it may import; "" is the package itself: boundary, errors, plain_text, safe_files)
FOLDERS: dict[str, tuple[str, str]] = {
    "": (
        "errors, printable text, files and the boundary, which everybody may import; `python -m hf_nanguard.run`",
        "cli",
    ),
    "core": ("plain tools on tensors, the vocabulary and the event", ""),
    "core.rerun": ("a micro-batch held so that it can be run again exactly", "core"),
    "core.optimizer": ("what an update did to weights, and which settings would have helped", "core"),
    "core.autopsy.trace": ("one pass, operator by operator, and the walk back to the origin", "core core.rerun"),
    "core.autopsy.evidence": (
        "a bad micro-batch under examination, and what was found",
        "core core.rerun core.autopsy.trace",
    ),
    "core.autopsy.remedies": (
        "changes tried on the bad micro-batch",
        "core core.rerun core.autopsy.trace core.autopsy.evidence",
    ),
    "core.autopsy.bundle": (
        "a bad micro-batch on disk",
        "core core.rerun core.autopsy.trace core.autopsy.evidence",
    ),
    "core.autopsy": (
        "a bad micro-batch run again to explain it",
        "core core.rerun core.optimizer core.autopsy.trace core.autopsy.evidence core.autopsy.remedies core.autopsy.bundle",
    ),
    "core.monitors": ("what is measured of a healthy run every N steps", "core core.rerun core.optimizer"),
    "core.spikes": (
        "a finite step that is out of line, examined sample by sample",
        "core core.rerun core.autopsy.evidence core.monitors",
    ),
    "core.step": (
        "what happens to one optimizer step: decide, redo, skip, halt",
        "core core.rerun core.optimizer core.autopsy core.autopsy.evidence core.monitors core.spikes",
    ),
    "checkpoints": ("scan and custody of what is on disk, without transformers", "core"),
    "report": ("the files of a run, and the console on which they are shown", "core"),
    "testing": ("public: the fault injector, the counter of host reads and operations", "core core.rerun"),
    "hf.compat": ("every private name of the hosts, each with the condition under which it can go", "core"),
    "hf.data": ("batches on the CPU, before a device", "core core.rerun hf.compat"),
    "hf.generation": ("scores and sampling", "core hf.compat"),
    "hf.monitors": (
        "monitors that know transformers, of training and of evaluation",
        "core core.monitors core.step hf.compat",
    ),
    "hf.custody": (
        "the checkpoints that a trainer saves, resumes from, and leaves behind when it is halted",
        "core core.monitors core.rerun core.step checkpoints hf.compat",
    ),
    "hf.trainer": (
        "the guard of one trainer, in the order of a step",
        "hf.custody core core.rerun core.autopsy core.autopsy.evidence core.monitors core.step report hf.compat hf.data hf.generation "
        "hf.monitors doctor doctor.facts",
    ),
    "hf.rl": (
        "completions, rewards and log-ratios of online trainers",
        "core core.rerun core.step hf.compat hf.data hf.generation hf.trainer",
    ),
    "hf": ("the guarded classes, and how any trainer becomes guarded", "core hf.compat hf.trainer hf.rl"),
    "hf.callbacks": (
        "callbacks for any trainer, one a file",
        "hf.custody core core.rerun core.monitors core.step report hf hf.compat hf.data hf.monitors hf.trainer",
    ),
    "integrations": (
        "the guard inside other training frameworks, one file each; nothing of them is imported at the head",
        "core hf hf.callbacks hf.compat hf.trainer",
    ),
    "takeover": (
        "`nanguard run`: every Trainer that a script builds becomes guarded",
        "core checkpoints report hf hf.compat hf.trainer hf.rl takeover.startup",
    ),
    "takeover.startup": (
        "what a guarded process imports when it starts: nothing of ours, until transformers comes",
        "",
    ),
    "bundle_replay": (
        "model and loss of a bundle built again, without trust",
        "core core.rerun core.autopsy core.autopsy.evidence core.autopsy.bundle hf hf.compat hf.trainer",
    ),
    "doctor.rules": ("rules over plain facts, and what they find", "core"),
    "doctor.facts": (
        "facts about a run from its trainer, its arguments or a file",
        "core hf.compat doctor.rules",
    ),
    "doctor.data": (
        "a sample of the training data, through the trainer's own collator, and checks of it",
        "core core.rerun hf.compat hf.data doctor.facts doctor.rules",
    ),
    "doctor": (
        "what is checked before a run: configuration, data, and both at the start of every run",
        "core report hf.compat doctor.facts doctor.data doctor.rules",
    ),
    "doctor.trial": (
        "a trainer lent out for trial runs that leave no trace in it",
        "core core.rerun hf.compat hf.trainer hf.generation doctor.rules",
    ),
    "doctor.laws": (
        "relations that must hold for a trainer, tried on it: `prove`",
        "core core.rerun hf.compat doctor.rules doctor.trial",
    ),
    "verification": (
        "a few measured steps of somebody's configuration, and a grade",
        "core core.rerun core.monitors report hf hf.compat hf.trainer",
    ),
    "doctor.command": (
        "the stages of `nanguard doctor` and what they print",
        "core report hf.compat hf.data doctor doctor.facts doctor.data doctor.rules doctor.laws doctor.trial verification",
    ),
    "examples.tasks": ("models, data and rewards made in code", ""),
    "examples": (
        "failures made in code, and the same run twice: stock and guarded",
        "core report examples.tasks",
    ),
    "examples.demo": ("the scenarios of `nanguard demo`", "core report hf hf.trainer examples examples.tasks"),
    "examples.recipe": (
        "what the recipes share: command line, run, end",
        "core report hf hf.trainer examples examples.tasks examples.demo",
    ),
    "cli.shared": ("what the commands share: parsers, settings as flags, output", "core report examples.recipe"),
    "cli": (
        "one command a file, nothing heavy at the head",
        "cli.shared checkpoints core core.autopsy core.autopsy.evidence core.autopsy.bundle report hf.trainer takeover "
        "takeover.startup bundle_replay verification doctor.facts doctor.command "
        "examples examples.demo examples.recipe",
    ),
}
EVERYWHERE = {
    "boundary",
    "command_errors",
    "command_exit",
    "errors",
    "harmless_log",
    "own_fields",
    "plain_text",
    "safe_files",
    "yaml_file",
    "__version__",
}
HOSTS = {"transformers", "accelerate", "trl", "peft", "datasets"}
HOST_FOLDERS = ("hf", "integrations", "takeover", "bundle_replay", "verification", "doctor", "examples", "testing")
TRL_FILES = ("hf/guarded_sft.py", "hf/guarded_grpo.py", "hf/compat/online_trainer.py", "doctor/facts/host_configs.py")
COMMANDS = {path.stem for path in (PACKAGE / "cli").glob("*.py")}  # a command may have the name of what it runs
FACADES = (PACKAGE / "__init__.py", PACKAGE / "examples" / "__init__.py")  # the names they list are loaded on first use
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path not in FACADES)


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
    def ours(self) -> str | None:
        """The module below the package, `None` if it is not ours."""
        return self.module.removeprefix("hf_nanguard").removeprefix(".") if self.top == "hf_nanguard" else None


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
            for (
                alias
            ) in node.names:  # `from .compat import trainer` names a module, `from .trainer import x` a thing in one
                named = f"{module}.{alias.name}"
                is_module = (ROOT / named.replace(".", "/")).with_suffix(".py").is_file()
                yield Import(named if is_module or not node.module else module, node.lineno, at_head)


def folder_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).parts[:-1])


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def folder_of_module(module: str) -> str:
    """Returns the folder of an imported module: itself if it is a package."""
    return module if (PACKAGE / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


# ---- the table ----


def test_every_folder_is_in_the_table():
    assert {folder_of(path) for path in FILES if path.name != "__init__.py"} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_few_files(folder):
    files = [path.name for path in FILES if folder_of(path) == folder and path.name != "__init__.py"]
    assert len(files) <= MAX_FILES, f"{len(files)} files in {folder}"


def test_no_two_files_have_the_same_name():
    names = [path.stem for path in FILES if path.name != "__init__.py" and folder_of(path) != "cli"]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_folder_imports_what_the_table_allows(path):
    folder = folder_of(path)
    allowed = {folder, *FOLDERS[folder][1].split()}
    wrong = [
        f"line {i.line}: {i.module}"
        for i in find_imports(path)
        if i.ours and i.ours not in EVERYWHERE and folder_of_module(i.ours) not in allowed
    ]
    assert not wrong


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """Returns the nodes of a cycle, none if there is none."""
    done: set[str] = set()

    def visit(node: str, above: tuple[str, ...]) -> list[str]:
        if node in above:
            return [*above[above.index(node) :], node]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            if found := visit(other, (*above, node)):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := visit(node, ()))), [])


def test_the_table_has_no_cycle():
    assert find_cycle({folder: set(row[1].split()) for folder, row in FOLDERS.items()}) == []


def test_no_module_is_part_of_a_cycle():
    """Imports inside functions count: a cycle that is broken at run time is one all the same."""
    edges = {
        name_of(path).removesuffix(".py").replace("/", "."): {i.ours for i in find_imports(path) if i.ours}
        for path in FILES
        if path.name != "__init__.py"
    }
    assert find_cycle(edges) == []


# ---- host libraries ----


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_host_libraries_are_imported_in_their_place(path):
    layer, name = folder_of(path).split(".")[0], name_of(path)
    hosts = [i for i in find_imports(path) if i.top in HOSTS]
    wrong = [i for i in hosts if i.top == "trl" and name not in TRL_FILES and layer != "examples"]
    wrong = wrong if layer in HOST_FOLDERS else hosts
    assert not [f"line {i.line}: {i.module}" for i in wrong]


@pytest.mark.parametrize("path", [p for p in FILES if folder_of(p).split(".")[0] == "core"], ids=name_of)
def test_core_needs_torch_and_safetensors_only(path):
    known = {*sys.stdlib_module_names, "torch", "safetensors", "hf_nanguard"}
    assert not [f"line {i.line}: {i.module}" for i in find_imports(path) if i.top not in known]


@pytest.mark.parametrize("path", [p for p in FILES if folder_of(p) == "cli"], ids=name_of)
def test_commands_import_nothing_heavy_at_their_head(path):
    heavy = {"torch", "safetensors", "numpy", "rich", *HOSTS}
    light = ("core.settings", "takeover.", "report.")
    assert not [
        f"line {i.line}: {i.module}"
        for i in find_imports(path)
        if i.at_head
        and (i.top in heavy or (i.ours and i.ours not in EVERYWHERE and not i.ours.startswith(("cli", *light))))
    ]


RECIPES = sorted((ROOT / "recipes").glob("*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_use_public_names_only(path):
    """A recipe is copied: what it imports must stay."""
    import hf_nanguard
    from hf_nanguard import examples

    public = {"hf_nanguard": {*hf_nanguard.__all__, "examples"}, "hf_nanguard.examples": set(examples.__all__)}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in plain if name.startswith("hf_nanguard")]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    assert not [node.module for node in imports if node.module.startswith(("recipes", "tests", "benchmarks"))]
    for node in imports:
        if node.module.startswith("hf_nanguard"):
            assert {alias.name for alias in node.names} <= public.get(node.module, set()), node.module
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    assert {node.attr for node in used if node.value.id == "examples"} <= public["hf_nanguard.examples"]
    if path.stem == "plain_loop":
        assert not HOSTS & {node.module.split(".")[0] for node in imports}


# ---- files ----

# Files of the machine, of this process alone, of a script that Python is about to read, or of an archive in memory.
OPENS_FILES = {
    "safe_files.py", "doctor/facts/saved_arguments.py", "harmless_log.py", "cli/main.py", "core/rerun/host_memory.py",
    "takeover/run_progress.py", "takeover/script_target.py",
}  # fmt: skip


def opened_files(path: Path) -> Iterator[int]:
    """Yields the lines at which a module opens a file by itself: a pipe in its place would block, and a large one fill the memory."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("read_text", "read_bytes", "write_text", "write_bytes") or (called == "open" and node.args):
            yield node.lineno


def test_files_are_opened_by_safe_files_only():
    found = {path.relative_to(PACKAGE).as_posix(): list(opened_files(path)) for path in PACKAGE.rglob("*.py")}
    assert {name for name, lines in found.items() if lines} <= OPENS_FILES, found


# ---- private names ----

HOST_OBJECTS = {"trainer", "accelerator", "optimizer", "lr_scheduler"}
TORCH_OBJECTS = {"torch", "tensor", "scaler", "reducer", "node", "module", "parameter"}


def private_touches(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yields owner, name and line of private attributes of objects that are not `self`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name not in ("self", "cls", "super"):
                yield name, node.attr, node.lineno


def overridden() -> set[str]:
    """Returns the private methods that the mixin overrides: its seam with the host, named there."""
    tree = ast.parse((PACKAGE / "hf" / "trainer" / "mixin.py").read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name != "compat"], ids=name_of)
def test_private_names_of_hosts_are_used_in_compat_only(path):
    touches = private_touches(path)
    assert not [
        f"line {line}: {name}" for owner, name, line in touches if owner in HOST_OBJECTS and name not in overridden()
    ]


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "torch_private.py"], ids=name_of)
def test_private_names_of_torch_are_used_in_one_file_only(path):
    assert not [f"line {line}: {owner}.{name}" for owner, name, line in private_touches(path) if owner in TORCH_OBJECTS]


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name != "compat" and p.name != "torch_private.py"], ids=name_of
)
def test_private_modules_are_imported_in_their_place_only(path):
    outside = [i for i in find_imports(path) if i.top in {"torch", *HOSTS}]
    assert not [
        f"line {i.line}: {i.module}" for i in outside if any(part.startswith("_") for part in i.module.split("."))
    ]


# The pages for hosts and torch, the function that all others use, and two that read a namespace of argparse as it documents.
USE_VARS = {"core/torch_private.py", "own_fields.py", "cli/run.py", "examples/recipe/recipe_parser.py"}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name != "compat"], ids=name_of)
def test_dictionaries_of_objects_are_read_in_their_place_only(path):
    names = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)]
    found = [f"line {node.lineno}" for node in names if node.id == "vars"]
    assert name_of(path) in USE_VARS or not found


# ---- state ----

# Objects of the hosts, and of torch: their attributes are changed where a test run or a replay needs it.
BORROWED = {
    "trainer", "args", "run_args", "training_args", "accelerator", "host", "model", "parameter", "tensor", "target", "copied",
    "logger", "record", "ctx", "raised", "trainer_class",
}  # fmt: skip


def own_attributes(path: Path) -> set[str]:
    """Returns the attributes that the classes of a file have of their own: fields, and what a method assigns to `self`."""
    found = set()
    for cls in (
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
    ):
        found |= {
            node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        found |= {
            node.attr
            for node in assigned_attributes(cls)
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
    return found


def assigned_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return (node for node in stored if not isinstance(node.ctx, ast.Load))


def foreign_writes(path: Path, owners: dict[str, set[str]]) -> Iterator[str]:
    """Yields where a file assigns an attribute that only classes of other files of ours have."""
    for node in assigned_attributes(ast.parse(path.read_text(encoding="utf-8"))):
        owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
        if owner not in {"self", "cls", *BORROWED} and owners.get(node.attr) and name_of(path) not in owners[node.attr]:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_an_object_is_changed_by_its_own_file_only():
    owners: dict[str, set[str]] = {}
    for path in FILES:
        for name in own_attributes(path):
            owners.setdefault(name, set()).add(name_of(path))
    assert {name_of(path): wrong for path in FILES if (wrong := list(foreign_writes(path, owners)))} == {}


# ---- reads through objects ----

MAX_CHAINS = 6


class OurObjects:
    """Which attributes of our classes hold objects of our classes that do something. Enums, errors and frozen dataclasses, such
    as settings, are values: reading one through another object is no call through it."""

    def __init__(self, paths: list[Path]):
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
        found = [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.classes = {node.name: node for node in found if not self._is_value(node)}
        self.types: dict[str, dict[str, str]] = {name: {} for name in self.classes}
        for _ in range(4):  # what a class takes from others is known once theirs is
            for name, node in self.classes.items():
                self._learn(name, node)

    @staticmethod
    def _is_value(node: ast.ClassDef) -> bool:
        head = " ".join(ast.unparse(part) for part in (*node.decorator_list, *node.bases))
        return re.search(r"frozen=True|Enum|NamedTuple|TypedDict|Error", head) is not None

    def class_of(self, annotation: ast.AST | None) -> str | None:
        """Returns the class that an annotation names, `None` for another's; of a union, the first of ours."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self.class_of(annotation.left) or self.class_of(annotation.right)
        return annotation.id if isinstance(annotation, ast.Name) and annotation.id in self.classes else None

    def attribute(self, owner: str, name: str) -> str | None:
        bases = [base.id for base in self.classes[owner].bases if isinstance(base, ast.Name) and base.id in self.types]
        found = self.types[owner].get(name)
        return found or next((t for base in bases if (t := self.attribute(base, name)) is not None), None)

    def type_of(self, value: ast.AST, known: dict[str, str | None]) -> str | None:
        """Returns the class of an expression, as far as it follows from annotations and constructors."""
        if isinstance(value, ast.Name):
            return known.get(value.id)
        if isinstance(value, ast.Attribute):
            owner = self.type_of(value.value, known)
            return None if owner is None else self.attribute(owner, value.attr)
        if isinstance(value, ast.Call):
            return self.class_of(value.func)
        if isinstance(value, (ast.BoolOp, ast.IfExp)):
            parts = value.values if isinstance(value, ast.BoolOp) else [value.body, value.orelse]
            return next((t for part in parts if (t := self.type_of(part, known)) is not None), None)
        return None

    def names_in(self, function: ast.FunctionDef, owner: str | None) -> dict[str, str | None]:
        """Returns the classes of the names of a function: what it is given, and what it assigns."""
        given = [*function.args.args, *function.args.kwonlyargs]
        known = {argument.arg: self.class_of(argument.annotation) for argument in given}
        if owner is not None and "self" in known:
            known["self"] = owner
        for target, value in self.assignments(function):
            if isinstance(target, ast.Name) and known.get(target.id) is None:
                known[target.id] = self.type_of(value, known)
        return known

    @staticmethod
    def assignments(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, value = node.targets[0], node.value
                both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                yield from zip(target.elts, value.elts, strict=True) if both else [(target, value)]

    def _learn(self, name: str, node: ast.ClassDef) -> None:
        types = self.types[name]
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and (found := self.class_of(part.annotation)) is not None:
                types.setdefault(part.target.id, found)
            if isinstance(part, ast.FunctionDef):
                is_property = any("property" in ast.unparse(decorator) for decorator in part.decorator_list)
                if is_property and (found := self.class_of(part.returns)) is not None:
                    types.setdefault(part.name, found)
                self._learn_assigned(types, part, name)

    def _learn_assigned(self, types: dict[str, str], function: ast.FunctionDef, owner: str) -> None:
        known = self.names_in(function, owner)
        annotated = (node for node in ast.walk(function) if isinstance(node, ast.AnnAssign))
        pairs = [(node.target, self.class_of(node.annotation)) for node in annotated]
        pairs += [(target, self.type_of(value, known)) for target, value in self.assignments(function)]
        for target, found in pairs:
            if found is not None and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                types.setdefault(target.attr, found)

    def chains(self) -> Iterator[str]:
        """Yields the reads `a.b.c.d` through two objects of ours, b and c, which a function was not given."""
        for path, tree in self.trees.items():
            owners = {
                part: node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body
            }
            for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                owner = owners.get(function)
                known = self.names_in(function, owner if owner in self.classes else None)
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                        inner = node.value
                        through = isinstance(inner.value, ast.Attribute) and self.type_of(inner.value, known)
                        if through and self.type_of(inner, known):
                            yield f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"


def test_few_reads_go_through_two_of_our_objects():
    found = sorted(set(OurObjects(FILES).chains()))
    assert len(found) <= MAX_CHAINS, "\n".join(found)


# ---- types and errors ----


def test_few_types_are_any_and_few_errors_are_caught_blindly():
    """Of 1,000 lines: `Any` says that a type is not known, a blanket `except` that an error is not."""
    text = "".join(path.read_text(encoding="utf-8") for path in [*FILES, *RECIPES])
    words = re.findall(r"\w+", text)
    thousands = text.count("\n") / 1000
    assert words.count("Any") <= 12 * thousands
    assert len(re.findall(r"^ *except (?:Base)?Exception\b", text, flags=re.MULTILINE)) <= thousands


# ---- tests ----

TESTS = ROOT / "tests"
ACROSS = {"acceptance", "distributed", "laws", "recipes"}  # tests of the whole, and of what is not in the package
# Folders whose files are tested through what uses them: where.
TESTED_BY = {
    "doctor/command": "cli/test_doctor.py", "doctor/data": "doctor/test_dataset_check.py",
    "doctor/trial": "doctor/laws/test_prove.py", "examples/demo": "cli/test_demo.py",
}  # fmt: skip


def misplaced_tests(root: Path) -> Iterator[str]:
    """Yields the tests in a folder that the package does not have, or that have the name of a file of another folder."""
    folders: dict[str, set[Path]] = {}
    for path in FILES:
        folders.setdefault(path.stem, set()).add(path.relative_to(PACKAGE).parent)
    for path in sorted(root.rglob("test_*.py")):
        folder = path.relative_to(root).parent
        if folder.parts[:1] and folder.parts[0] in ACROSS:
            continue
        if not (PACKAGE / folder).is_dir() or folder not in folders.get(path.stem[5:], {folder}):
            yield f"{path.relative_to(root)}"


def test_the_tests_mirror_the_source():
    assert list(misplaced_tests(TESTS)) == []
    folders = {path.relative_to(PACKAGE).parent for path in FILES if path.name != "__init__.py"}
    untested = {folder.as_posix() for folder in folders if not list((TESTS / folder).glob("test_*.py"))}
    assert untested == set(TESTED_BY)
    assert all((TESTS / file).is_file() for file in TESTED_BY.values())


# ---- the checks themselves ----


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
    assert [i.ours for i in found] == ["hf", "report", None]
    assert list(private_touches(file)) == [("trainer", "_secret", 5)]
    file.write_text(
        "class A:\n    x: int\n    def f(self):\n        self.y = trainer.x = 1\n        one.x, two.three.y = 2, 3\n"
    )
    assert own_attributes(file) == {"x", "y"}
    assert list(foreign_writes(file, {"x": {"a.py"}, "y": {"a.py"}})) == ["line 5: one.x", "line 5: two.three.y"]
    assert list(foreign_writes(file, {"x": {"core/bad.py"}})) == []
    file.write_text(
        "class A:\n    def f(self):\n        return self.x.y.z, self.x.y\n"
        "    def __init__(self, x: B):\n        self.x = x\n"
        "class B:\n    def __init__(self, c: 'C | None'):\n        self.w, self.y = 1, c or C()\n"
        "class C:\n    z = 0\n"
    )
    assert list(OurObjects([file]).chains()) == ["core/bad.py:3: self.x.y.z"]
    for name in ("core/test_guard.py", "core/test_bad.py", "elsewhere/test_x.py", "laws/test_guard.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    monkeypatch.setattr(f"{__name__}.FILES", [file, tmp_path / "step" / "guard.py"])
    assert list(misplaced_tests(tmp_path / "tests")) == ["core/test_guard.py", "elsewhere/test_x.py"]
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
