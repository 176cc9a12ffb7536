"""Reads the project's own pages, so that tests can hold their tables, names and snippets against the code."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from trl import SFTConfig

from ..models import tiny_llama, tiny_tokenizer, token_dataset
from ..trainers import common_arguments

ROOT = Path(__file__).parent.parent.parent


def read_page(name: str) -> str:
    """Returns a page by its path from the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def find_snippets(page: str, language: str) -> list[str]:
    """Returns the code blocks of a language that have no further mark, as `no-run`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def run_snippet(snippet: str, name: str, folder: Path) -> None:
    """Runs a snippet of a page with what the pages take for granted: a model, arguments, a dataset and a tokenizer."""
    config: Any = SFTConfig if "SFT" in snippet else TrainingArguments
    args = config(**common_arguments(folder / "run", max_steps=2, gradient_accumulation_steps=1))
    names = {"model": tiny_llama(), "args": args, "dataset": token_dataset(8), "tokenizer": tiny_tokenizer()}
    exec(compile(snippet, name, "exec"), {"__name__": "page", **names})


def find_tables(page: str, first_column: str) -> list[list[str]]:
    """Returns the cells of all tables whose first column has this title, as one."""
    bodies = re.findall(rf"^\| {re.escape(first_column)} \|.*\n\|[-|]+\|\n((?:\|.*\n?)+)", page, flags=re.MULTILINE)
    assert bodies, f"there is no table {first_column!r}"
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for body in bodies for line in body.splitlines()]
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in rows]


def find_sections(page: str, level: int) -> dict[str, str]:
    """Returns what stands below the headings of a level, up to the next one of that level or above, by heading."""
    parts = re.split(rf"^(#{{1,{level}}}) (.*)\n", page, flags=re.MULTILINE)[1:]
    return {
        title: body
        for marks, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        if len(marks) == level
    }


def find_links(page: str) -> list[str]:
    """Returns the files that a page links to; not the places on itself or elsewhere."""
    return re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page)


def find_anchors(page: str) -> list[str]:
    """Returns the places on the page itself that it links to."""
    return re.findall(r"\]\(#([^)]+)\)", page)


def anchor_headings(page: str) -> set[str]:
    """Returns what the headings of a page are called in links."""
    titles = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def named_in(cells: list[str]) -> list[str]:
    """Returns what stands in backticks."""
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def in_use(enum: str) -> set[str]:
    """Returns the members of a closed list that the package's code mentions."""
    files = [path for path in (ROOT / "hf_nanguard").rglob("*.py") if path.name != "vocabulary.py"]
    return {name for path in files for name in re.findall(rf"\b{enum}\.([A-Z0-9_]+)", path.read_text(encoding="utf-8"))}


@cache
def find_texts() -> tuple[str, ...]:
    """Returns every text in the package's code, with a NUL for what is put in while it runs."""
    texts = []
    for path in (ROOT / "hf_nanguard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return tuple(texts)


def is_said(message: str) -> bool:
    """Returns whether one text of the code can be the message, in which `<...>` stands for what is put in."""
    parts = [re.escape(part.strip()) for part in re.split(r"<[^>]*>", message)]
    pattern = re.compile(".*".join(parts), flags=re.DOTALL)
    return any(pattern.search(text) for text in find_texts())
