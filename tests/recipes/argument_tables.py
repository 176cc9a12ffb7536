"""Generates the tables of settings in docs/arguments.md: `python -m tests.recipes.argument_tables` rewrites them."""

import re
from itertools import pairwise

from hf_nanguard.core.settings import PREFIX, SETTINGS, Setting

from .markdown import ROOT, read_page

PAGE = "docs/arguments.md"
TABLE = re.compile(r"^\| field \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", flags=re.MULTILINE)
HEAD = "| field | values | default | meaning |\n|---|---|---|---|\n"


def format_row(setting: Setting) -> str:
    kind = f"`{setting.value_type.__name__}`" + (" or `None`" if setting.is_optional else "")
    values = ", ".join(f"`{choice}`" for choice in setting.choices) or ", ".join(filter(None, [kind, setting.bounds]))
    return f"| `{PREFIX}{setting.name}` | {values} | `{setting.default_text}` | {setting.help} |\n"


def update_tables(page: str) -> str:
    """Returns the page with current tables. A table has the settings from its first row to the first row of the next."""
    names = list(SETTINGS)
    first_rows = [re.match(rf"\| `{PREFIX}(\w+)`", rows) for rows in TABLE.findall(page)]
    starts = [0, *(names.index(row[1]) for row in first_rows[1:]), len(names)]
    tables = iter(HEAD + "".join(format_row(SETTINGS[name]) for name in names[a:b]) for a, b in pairwise(starts))
    return TABLE.sub(lambda _: next(tables), page)


if __name__ == "__main__":
    (ROOT / PAGE).write_text(update_tables(read_page(PAGE)), encoding="utf-8")
