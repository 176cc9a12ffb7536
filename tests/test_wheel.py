"""The wheel holds all that a user needs: package, recipes and presets; it runs in an empty directory."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PARTS = ("hf_nanguard", "recipes", "configs", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, by the backend itself: no network, and nothing left behind in the clone."""
    copy, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], capture_output=True, text=True, cwd=copy)
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("*.whl")
    return file


def list_files(folder: str, pattern: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern)}


def test_everything_is_in_it(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    files = list_files("hf_nanguard", "*.py")
    extras = {f"hf_nanguard/{name}" for name in list_files("recipes", "*.py") | list_files("configs", "*.yaml")}
    assert len(extras) > 10
    assert (files | extras) - held == set()
    assert not [name for name in held if name.startswith(("tests", "benchmarks", "recipes", "configs"))]


def test_the_list_of_packages_is_complete():
    """It is written out, for recipes and presets come from beside the package; a new folder must be added."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {".".join(Path(name).parent.parts) for name in list_files("hf_nanguard", "__init__.py")}
    assert set(listed) == found | {"hf_nanguard.recipes", "hf_nanguard.configs"}


def test_it_trains_in_an_empty_directory(wheel, tmp_path):
    """With the wheel unpacked elsewhere and nothing of the clone on the path."""
    home, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(home)
    empty.mkdir()
    code = (
        "import sys, hf_nanguard\n"
        f"assert hf_nanguard.__file__.startswith({str(home)!r}), hf_nanguard.__file__\n"
        "from hf_nanguard.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["sft", "--preset", "balanced", "--max_steps", "2"]
    environment = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=empty, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  events +none$", done.stdout, flags=re.MULTILINE)
    assert "answer rate" in done.stdout
    assert {path.name for path in empty.iterdir()} == {"runs"}
    assert (empty / "runs" / "sft" / "model.safetensors").is_file()
