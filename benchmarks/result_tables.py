"""What a benchmark found: printed with its method and versions, stored as JSON, and shown as a table in the documentation.

    python benchmarks/peers.py --json benchmarks/results/peers.json
    python -m benchmarks.result_tables      # writes the tables of README and docs anew from benchmarks/results/

A page marks a table by `<!-- peers -->` before it and `<!-- end of peers -->` behind it. Stored are counts and ratios only,
because times of one machine mean nothing on another.
"""

import argparse
import json
import platform
import re
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/checkpoints.md")
PACKAGES = ("torch", "transformers", "accelerate", "safetensors")
Rows = Sequence[dict[str, str | float]]


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag for the file that [`publish`] writes."""
    parser.add_argument("--json", type=Path, help="also write method, versions and ratios to this file")


def find_spread(times: Sequence[float]) -> float:
    """Returns how far the median of several times is above the fastest, as a ratio."""
    return statistics.median(times) / min(times)


def publish(method: str, rows: Rows, file: Path | None) -> None:
    """Prints how something was measured and with which versions, and stores it with the rows if a file is given."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    print(f"method: {method}")
    print(f"versions: {', '.join(f'{name} {number}' for name, number in versions.items())}")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"method": method, "versions": versions, "rows": [*rows]}
        file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def format_table(file: Path) -> str:
    """Returns a stored result as a table in Markdown, with its versions below."""
    content = json.loads(file.read_text(encoding="utf-8"))
    rows = content["rows"]
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    shown = ", ".join(f"{name} {content['versions'][name]}" for name in ("python", "torch", "transformers"))
    return f"{table}\n\nMeasured with {shown}.\n"


def update_tables(page: str) -> str:
    """Returns a page with the tables of the stored results."""

    def replace(found: re.Match) -> str:
        return f"<!-- {found[1]} -->\n{format_table(RESULTS / f'{found[1]}.json')}<!-- end of {found[1]} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end of \1 -->", replace, page, flags=re.DOTALL)


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(update_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
