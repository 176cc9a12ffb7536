"""YAML files: what is accepted is what PyYAML's safe loader returns; what is hostile or damaged is one sentence, at once."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from hf_nanguard import ArgumentError
from hf_nanguard.cli.main import main
from hf_nanguard.examples.recipe.presets import find_configs
from hf_nanguard.yaml_file import MAX_BYTES, MAX_LEVELS, MAX_NODES, read_yaml

LETTERS = "abcdefghij"
# Every level names the one before it nine times: 9^9 values if they were written out.
LAUGHS = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise(LETTERS)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in pairwise(LETTERS)
)
# Content and what the sentence says about it.
REFUSED = {
    "impossible date": ("a: 2024-13-45\n", "month must be in 1..12"),
    "impossible time": ("a: 2024-01-05 25:00:00\n", "hour must be in 0..23"),
    "huge integer": (f"a: {'9' * 5000}\n", "is too long"),
    "large integer": (f"a: {2**65}\n", "is too large"),
    "huge hexadecimal": (f"a: 0x{'f' * 100_000}\n", "is too long"),
    "base 60": (f"a: {'1:' * 300_000}1\n", "is too long"),
    "deep list": (f"a: {'[' * 5000}", f"more than {MAX_LEVELS} levels"),
    "deep mapping": ("".join(f"{' ' * level}a:\n" for level in range(500)), f"more than {MAX_LEVELS} levels"),
    "deep keys": ("? " * 10_000, f"more than {MAX_LEVELS} levels"),
    "aliases": (LAUGHS, f"more than {MAX_NODES} values"),
    "merged aliases": (MERGES, f"more than {MAX_NODES} values"),
    "alias of itself": ("a: &a [*a]\n", f"more than {MAX_NODES} values"),
    "merge of itself": ("a: &a\n  <<: *a\n", f"more than {MAX_NODES} values"),
    "many values": (f"a: [{'1,' * 50_000}]", f"more than {MAX_NODES} values"),
    "undefined alias": ("a: *b\n", "undefined alias"),
    "name twice": ("a: 1\nb: 2\na: 3\n", "line 3: 'a' occurs twice"),
    "inner name twice": ("a: {b: 1, b: 2}\n", "'b' occurs twice"),
    "equal names": ("yes: 1\ntrue: 2\n", "True occurs twice"),
    "list as name": ("? [a]\n: 1\n", "unhashable"),
    "python object": ("a: !!python/object/apply:os.mkdir ['made']\n", "python/object/apply:os.mkdir"),
    "python name": ("a: !!python/name:os.system\n", "python/name:os.system"),
    "own tag": ("a: !mine x\n", "'!mine'"),
    "set": ("a: !!set {x, y}\n", "2002:set"),
    "binary": ("a: !!binary aGk=\n", "2002:binary"),
    "no bool": ("a: !!bool maybe\n", "not a valid bool"),
    "no integer": ("a: !!int ''\n", "not a valid int"),
    "no date": ("a: !!timestamp x\n", "not a valid timestamp"),
    "open bracket": ("a: [1, 2\n", "line 2: "),
    "two documents": ("a: 1\n---\nb: 2\n", "another document"),
    "escape sequence": ("a: [\x1b[2J\n", "special characters"),
    "list": ("- a\n- b\n", "names and values"),
    "nothing": ("", "names and values"),
    "too large": ("#" * (MAX_BYTES + 1), "larger than 1 MiB"),
    "not UTF-8": (b"a: \xff\xfe\n", "not text"),
    "UTF-16": ("a: 1\n".encode("utf-16"), "not text"),
    "zeros": (b"\0" * 64, "special characters"),
}


def refusal(path: str) -> str:
    with pytest.raises(ArgumentError) as error:
        read_yaml(path)
    text = str(error.value)
    assert len(text) < 500
    assert text.isprintable()  # so it is one line too
    return text


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, told = REFUSED[name]
    Path("own.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert told in refusal("own.yaml")
    assert os.listdir() == ["own.yaml"]


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it to read would wait for a writer
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    told = {name: refusal(str(tmp_path / name)) for name in ("pipe", "loop", "device", "folder", "missing")}
    assert "(not a regular file)" in told["pipe"]
    assert "(not a regular file)" in told["device"]
    assert "(Too many levels of symbolic links)" in told["loop"]
    assert "(Is a directory)" in told["folder"]
    assert "(No such file or directory)" in told["missing"]
    assert "(embedded null byte)" in refusal("a\0b")


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: 0.5\nc: text\nd: true\ne: null\nf: [1, x]\ng: {h: 1e-3}\n",
        "base: &base {x: 1, y: 2}\nmine:\n  <<: *base\n  x: 3\n",
        "a: &a [1, 2]\nb: *a\nc: *a\n",
        "\ufeffa: 1\n",
        f"a: {2**63}\n",
        f"a: {'x' * 5000}\n",
    ],
)
def test_the_same_values_as_with_pyyaml(text, tmp_path):
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    assert read_yaml(str(tmp_path / "own.yaml")) == yaml.safe_load(text)


def test_every_preset_is_accepted():
    files = sorted(find_configs().glob("*/*.yaml"))
    assert files
    assert [path for path in files if read_yaml(str(path)) != yaml.safe_load(path.read_text(encoding="utf-8"))] == []


def test_links_to_files_are_followed_and_dates_stay_text(tmp_path):
    (tmp_path / "own.yaml").write_text("run_name: 2024-01-05\n")
    (tmp_path / "link.yaml").symlink_to("own.yaml")
    assert read_yaml(str(tmp_path / "link.yaml")) == {"run_name": "2024-01-05"}


@pytest.mark.parametrize("content", [None, "nanguard_mode: act\nnanguard_mode: off\n", "nanguard_loss_floor: 1e999\n"])
@pytest.mark.parametrize("way", ["flag", "variable"])
def test_a_command_ends_with_2_and_one_line(content, way, tmp_path, monkeypatch, capsys):
    file = tmp_path / "guard.yaml"
    os.mkfifo(file) if content is None else file.write_text(content)
    if way == "variable":
        monkeypatch.setenv("NANGUARD_CONFIG", str(file))
    assert main(["run", *(["--config", str(file)] if way == "flag" else []), "train.py"]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n"), str(file) in output.err) == ("", 1, True)
