"""The row of a data file that a sample was made from, found by its text.

Frameworks shuffle, filter and pack a dataset, and leave out its id columns, before a trainer gets it. What is left is the text
and, in the dataset's own record, the files it was loaded from. They are read again, once for each sample that an autopsy blames.
Only JSON, JSON lines, CSV, TSV, text (a row is a line) and Parquet files on this machine are read, the former also if compressed with
gzip, up to `MAX_BYTES` in all.
"""

import csv
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from ..compat.prepared_dataset import find_files, format_ids, pick_ids

MAX_BYTES = 256 * 2**20
MAX_EQUAL = 3  # rows; more that have the same text equally well say nothing
MAX_NAMED = 30  # rows of a packed text
LEAST = 16  # characters of a row of a packed text, if that has much longer ones
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
    whole, names = _squeeze(text), [path.name for path in files]
    found: list[Match] = []
    for path in files:
        name = path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
        for number, row in enumerate(_read_rows(path)):
            found += _match(row, whole, f"{name} row {number}")
    return _format(found, whole)


class Match(NamedTuple):
    """A row of which a text has a part.

    Args:
        parts (`list[str]`):
            Its parts that the text has.
        name (`str`):
            File, row and ids.
    """

    parts: list[str]
    name: str

    @property
    def score(self) -> int:
        """How many characters of the row the text has."""
        return sum(map(len, self.parts))


def _match(row: Mapping[str, object], text: str, name: str) -> list[Match]:
    """Returns a match if the text has the longest part of the row, or parts that are half of the row or of the text."""
    ids = pick_ids(row)
    parts = [_squeeze(part) for name, value in row.items() if name not in ids for part in _find_texts(value)]
    inside = [part for part in parts if part and part[:HEAD] in text]
    is_whole = max(map(len, inside), default=0) == max(map(len, parts), default=0)
    score = sum(map(len, inside))
    if not inside or not (is_whole or 2 * score >= min(len(text), sum(map(len, parts)))):
        return []
    return [Match(inside, ", ".join(filter(None, [name, format_ids(ids)])))]


def _format(found: list[Match], text: str) -> str | None:
    """Returns the row that matches best, or all that do so equally; of a packed text every row it has, in their order in it."""
    counts = Counter(part for match in found for part in {*match.parts})
    taken = bytearray(len(text))  # which characters belong to a row that is named
    places: dict[tuple[int, int], list[Match]] = {}
    ranked = sorted(found, key=lambda match: -match.score)
    for match in ranked:
        # Rows of a packed text may share a prompt or an answer: each is where its own part is.
        own = min(match.parts, key=lambda part: (counts[part], -len(part)))
        begin = text.find(own[:HEAD])
        place = begin, min(begin + len(own), len(text))
        if not any(taken[slice(*place)]):
            places[place] = [match]
            for part in match.parts:
                begin = text.find(part[:HEAD])
                end = min(begin + len(part), len(text))
                taken[begin:end] = b"x" * (end - begin)
        elif place in places and places[place][0].score == match.score:
            places[place].append(match)
    best = ranked[0].score if ranked else 0
    is_packed = sum(2 * matches[0].score >= best for matches in places.values()) > 1  # a short row may occur by chance
    enough = min(best / 4, LEAST) if is_packed else best
    certain = {
        place: matches for place, matches in places.items() if matches[0].score >= enough and len(matches) <= MAX_EQUAL
    }
    named = [match.name for place in sorted(certain) for match in certain[place]]
    if not named:
        return None
    more = f"; and {len(named) - MAX_NAMED} more rows" if len(named) > MAX_NAMED else ""
    return ("packed from " if is_packed else "") + "; ".join(named[:MAX_NAMED]) + more


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
