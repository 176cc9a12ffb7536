"""The row of a data file that a sample was made from, found by its text.

Frameworks shuffle, filter and pack a dataset, and leave out its id columns, before a trainer gets it. What is left is the text
and, in the dataset's own record, the files it was loaded from. They are read again, once for each sample that an autopsy blames.
Only JSON, JSON lines, CSV, TSV, text (a row is a line) and Parquet files on this machine are read, the former also if compressed with
gzip, up to `MAX_BYTES` in all.
"""

import csv
import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from ..compat.prepared_dataset import find_files, format_ids, pick_ids

MAX_BYTES = 256 * 2**20
MAX_NAMED = 3  # rows; more that have the text equally well say nothing
HEAD = 200  # characters of a text that are compared: what follows may be cut off
KINDS = (".parquet", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


def find_source(dataset: object, text: str) -> str | None:
    """Returns file, row and ids of the row that a text was made from, `None` if that cannot be said.

    Args:
        dataset (`Any`):
            The dataset of the trainer.
        text (`str`):
            The text of the sample, as long as it is.
    """
    files = [path for path in map(Path, find_files(dataset)) if path.is_file() and _find_kind(path) in KINDS]
    if not files or sum(path.stat().st_size for path in files) > MAX_BYTES:
        return None
    whole, found, names = _squeeze(text), [], [path.name for path in files]
    for path in files:
        name = path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
        for number, row in enumerate(_read_rows(path)):
            score, place = _match(row, whole)
            if score:
                found.append((score, place, name, number, pick_ids(row)))
    return _format(found)


def _match(row: Mapping[str, object], text: str) -> tuple[int, tuple[int, int]]:
    """Returns how many characters of a row a text has, and where the longest part of them is; 0 unless that is the longest part
    of the row, or they are half of the text."""
    ids = pick_ids(row)
    parts = [_squeeze(part) for name, value in row.items() if name not in ids for part in _find_texts(value)]
    inside = [part for part in parts if part and part[:HEAD] in text]
    longest, score = max(inside, key=len, default=""), sum(map(len, inside))
    if not inside or (len(longest) < max(map(len, parts)) and 2 * score < len(text)):
        return 0, (0, 0)
    begin = text.find(longest[:HEAD])
    return score, (begin, begin + len(longest))


def _format(found: list[tuple[int, tuple[int, int], str, int, dict[str, str | int]]]) -> str | None:
    """Returns the rows that match best. A text that holds a row besides the best one was made from several rows."""
    if not found:
        return None
    best, place, *_ = max(found, key=lambda match: match[0])
    others = [match for match in found if 2 * match[0] >= best and (match[1][0] >= place[1] or match[1][1] <= place[0])]
    named = [match for match in found if match[0] == best]
    if others or len(named) > MAX_NAMED:
        return None
    return "; ".join(
        ", ".join(filter(None, [f"{name} row {number}", format_ids(ids)])) for _, _, name, number, ids in named
    )


def _find_kind(path: Path) -> str:
    """Returns the ending of a file's name, without that of its compression."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _read_rows(path: Path) -> Iterator[Mapping[str, object]]:
    """Yields the rows of a file in their order."""
    if (kind := _find_kind(path)) == ".parquet":
        import pyarrow.parquet  # a dependency of datasets, with which the file was read

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline="") as file:
        if kind in (".csv", ".tsv"):
            yield from csv.DictReader(file, delimiter="\t" if kind == ".tsv" else ",")
        elif kind == ".txt":
            yield from ({"text": line} for line in file)
        else:
            yield from _read_json(file)


def _read_json(file: TextIO) -> Iterator[Mapping[str, object]]:
    is_list = file.read(1) == "["
    file.seek(0)
    rows = json.load(file) if is_list else (json.loads(line) for line in file if line.strip())
    yield from (row if isinstance(row, dict) else {} for row in rows)


def _find_texts(value: object) -> Iterator[str]:
    """Yields the texts inside a value of a row: itself, or those of messages, without the names of those who speak."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        value = [part for name, part in value.items() if name not in ("role", "from")]
    if isinstance(value, list):
        for part in value:
            yield from _find_texts(part)


def _squeeze(text: str) -> str:
    """Returns a text without what tokenizers change: white space and case."""
    return "".join(text.split()).casefold()
