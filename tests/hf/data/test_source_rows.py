"""The row of a data file is found by the text of a sample, whatever was done to the dataset in between."""

import csv
import gzip
import json

import pytest
from datasets import Dataset, load_dataset

from hf_nanguard.hf.compat import prepared_dataset
from hf_nanguard.hf.compat.prepared_dataset import find_files, record_files
from hf_nanguard.hf.data import source_rows
from hf_nanguard.hf.data.source_rows import find_source
from hf_nanguard.testing import Fault, plant
from tests.models import text_rows
from tests.trainers import build, events_of

ROWS = [
    {"text": text, "doc_id": f"d{i}", "lang": "en"}
    for i, text in enumerate(
        ["The cat sat.", "A dog ran far away.", "The cat sat down.", "A dog ran far away.", "Yes."]
    )
]
CHATS = [
    {"url": f"u{i}", "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]}
    for i, text in enumerate(["How are you?", "Why are you here?"])
]


def write_rows(folder, rows, suffix):
    path = folder / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    elif suffix == "json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif suffix == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    return path


def chat(*texts):
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def load(path, kind="json"):
    """A dataset with the record that datasets makes before version 5, and our integrations make with any."""
    dataset = load_dataset(kind, data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))
    record_files(dataset, [str(path)])
    return dataset


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_file_row_and_ids_are_named(suffix, tmp_path):
    path = write_rows(tmp_path, ROWS, suffix)
    given = load(path, suffix if suffix in ("csv", "parquet") else "json")
    prepared = given.shuffle(seed=3).map(lambda row: {"input_ids": [1]}, remove_columns=given.column_names)
    assert prepared.column_names == ["input_ids"]
    for text, row in (("<s> the CAT  sat down.\n", 2), ("user: Yes. assistant:", 4)):
        assert find_source(prepared, text) == f"rows.{suffix} row {row}, doc_id: d{row}"


@pytest.mark.parametrize("inside", [False, True])
def test_a_dataset_inside_one_of_a_framework_is_known(inside, tmp_path):
    class Lazy:
        def __init__(self, dataset):
            self.dataset = dataset

    given = load(write_rows(tmp_path, CHATS, "jsonl"))
    dataset = Lazy(Lazy(given)) if inside else given
    assert find_source(dataset, "<|user|>Why are you here?<|assistant|>ok") == "rows.jsonl row 1, url: u1"


def test_a_record_that_is_lost_can_be_put_back(tmp_path):
    path = write_rows(tmp_path, ROWS, "jsonl")
    dataset = Dataset.from_dict({"input_ids": [[1]]})
    assert find_source(dataset, ROWS[0]["text"]) is None
    record_files(dataset, [str(path)])
    assert find_source(dataset, ROWS[0]["text"]) == "rows.jsonl row 0, doc_id: d0"
    kept = load(path)
    files = find_files(kept)
    record_files(kept, ["elsewhere.jsonl"])
    assert find_files(kept) == files


def test_a_folder_with_too_many_files_is_not_recorded(tmp_path, monkeypatch):
    """A link back to the folder makes no more of them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "again").symlink_to(tmp_path)
    path = write_rows(tmp_path / "data", ROWS, "jsonl")
    for limit, files in ((10, [str(path)]), (2, [])):
        monkeypatch.setattr(prepared_dataset, "MAX_PATHS", limit)
        dataset = Dataset.from_dict({"input_ids": [[1]]})
        record_files(dataset, [str(tmp_path)])
        assert find_files(dataset) == files


@pytest.mark.parametrize("suffix", ["txt", "tsv", "ndjson", "jsonl.gz", "csv.gz"])
def test_other_kinds_of_files_are_read(suffix, tmp_path):
    columns = ROWS[0].keys()
    lines = {
        "txt": [row["text"] for row in ROWS],
        "tsv": ["\t".join(each) for each in (columns, *(row.values() for row in ROWS))],
        "csv": [",".join(each) for each in (columns, *(row.values() for row in ROWS))],
    }
    text = "".join(f"{line}\n" for line in lines.get(suffix.removesuffix(".gz"), map(json.dumps, ROWS)))
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    dataset = Dataset.from_dict({"input_ids": [[1]]})
    record_files(dataset, [str(path)])
    ids = "" if suffix == "txt" else ", doc_id: d2"
    assert find_source(dataset, ROWS[2]["text"]) == f"rows.{suffix} row 2{ids}"


def test_folders_and_patterns_of_files_are_recorded_and_equal_names_told_apart(tmp_path):
    for number, folder in enumerate(("a", "b[1]")):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder, ROWS[2 * number :], "jsonl")
        (tmp_path / folder / "README.md").write_text("The cat sat down.")
    for sources in (
        [str(tmp_path)],
        [str(tmp_path / "*" / "*.jsonl"), "hub/rows"],
        [str(tmp_path / f) for f in ("a", "b[1]")],
    ):
        dataset = Dataset.from_dict({"input_ids": [[1]]})
        record_files(dataset, sources)
        assert find_source(dataset, "The cat sat.") == "a/rows.jsonl row 0, doc_id: d0"
        assert (
            find_source(dataset, ROWS[4]["text"]) == "a/rows.jsonl row 4, doc_id: d4; b[1]/rows.jsonl row 2, doc_id: d4"
        )


def test_parts_that_no_template_shows_do_not_hide_a_row(tmp_path):
    dataset = load(write_rows(tmp_path, CHATS, "jsonl"))
    assert find_source(dataset, "Why are you here? ok") == "rows.jsonl row 1, url: u1", "the roles are not in the text"
    rows = [{"q": f"{i} + 1 = ?", "a": "ok", "source": "a much longer name of a source"} for i in range(3)]
    sourced = load(write_rows(tmp_path, rows, "json"))
    assert find_source(sourced, "Q: 2 + 1 = ? A: ok") == "rows.json row 2"
    assert find_source(sourced, "Something that only ends the same way, which is ok") is None


def test_equal_rows_are_all_named_and_many_are_not(tmp_path):
    dataset = load(write_rows(tmp_path, ROWS, "jsonl"))
    assert find_source(dataset, ROWS[1]["text"]) == "rows.jsonl row 1, doc_id: d1; rows.jsonl row 3, doc_id: d3"
    many = load(write_rows(tmp_path, [{"text": "the same"}] * 4, "json"))
    assert find_source(many, "the same") is None


def test_all_rows_of_a_packed_text_are_named_in_their_order(tmp_path):
    dataset = load(write_rows(tmp_path, ROWS, "jsonl"))
    equal = "rows.jsonl row 1, doc_id: d1; rows.jsonl row 3, doc_id: d3"
    packed = f"{ROWS[2]['text']} {ROWS[1]['text']}{ROWS[4]['text']}"
    expected = f"packed from rows.jsonl row 2, doc_id: d2; {equal}; rows.jsonl row 4, doc_id: d4"
    assert find_source(dataset, packed) == expected
    rows = [{"text": f"{number} is a number"} for number in range(100, 150)]
    numbers = load(write_rows(tmp_path, rows, "json"))
    named = find_source(numbers, "".join(row["text"] for row in rows[5:45]))
    assert named.startswith("packed from rows.json row 5; rows.json row 6; ")
    assert named.endswith("rows.json row 34; and 10 more rows")


def test_rows_are_found_in_a_packed_text_of_a_template(tmp_path):
    rows = [
        {"text": f"{i}+{i}=7", **chat(f"{i}+{i}=", "7"), "instruction": f"{i}+{i}=", "output": "7"} for i in range(9)
    ]
    dataset = load(write_rows(tmp_path, rows, "json"))
    text = "".join(f"Human: {row['instruction']}\nAssistant: 7\n" for row in rows[4:6])
    assert find_source(dataset, text) == "packed from rows.json row 4; rows.json row 5"


def test_rows_that_share_parts_are_told_apart(tmp_path):
    system = "You are a helpful assistant."
    rows = [chat(system, f"What is {i} and {i}?", "Some number.") for i in range(10, 20)]
    dataset = load(write_rows(tmp_path, rows, "json"))
    text = [" ".join(part["content"] for part in row["messages"]) for row in rows]
    assert find_source(dataset, text[3]) == "rows.json row 3"
    assert find_source(dataset, f"{text[7]} {text[2]}") == "packed from rows.json row 7; rows.json row 2"


def test_what_lies_inside_a_named_row_or_is_too_short_is_not_named(tmp_path):
    long = [chat("Tell me of France, please.", f"The town number {i} is Paris, on the Seine.") for i in range(2)]
    rows = [*long, chat("Hi", "Paris"), *[chat("<eos>")] * 5]
    dataset = load(write_rows(tmp_path, rows, "json"))
    text = "<eos>".join(" ".join(part["content"] for part in row["messages"]) for row in long)
    assert find_source(dataset, text) == "packed from rows.json row 0; rows.json row 1"


def test_a_short_row_that_occurs_in_a_long_text_is_not_named(tmp_path):
    dataset = load(write_rows(tmp_path, ROWS, "jsonl"))
    assert find_source(dataset, f"{ROWS[1]['text']} Is that so? Yes.") == find_source(dataset, ROWS[1]["text"])


def test_a_long_text_may_be_cut_off(tmp_path):
    rows = [{"text": f"{i} " + "long story " * 50} for i in range(3)]
    dataset = load(write_rows(tmp_path, rows, "jsonl"))
    assert find_source(dataset, rows[1]["text"][:300]) == "rows.jsonl row 1"


def test_what_cannot_be_read_names_nothing(tmp_path, monkeypatch):
    path = write_rows(tmp_path, ROWS, "jsonl")
    dataset = load(path)
    monkeypatch.setattr(source_rows, "MAX_BYTES", path.stat().st_size - 1)
    assert find_source(dataset, ROWS[0]["text"]) is None
    monkeypatch.undo()
    assert find_source(dataset, "something else") is None
    assert find_source(dataset, "") is None
    path.unlink()
    assert find_source(dataset, ROWS[0]["text"]) is None
    for other in (None, [1, 2], Dataset.from_list(ROWS)):
        assert find_source(other, ROWS[0]["text"]) is None


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_autopsy_names_the_row_of_the_file(is_broken, tmp_path, caplog):
    rows = [{**row, "key": f"k{i}"} for i, row in enumerate(text_rows(48))]
    path = write_rows(tmp_path, rows, "jsonl")
    dataset = load(path).shuffle(seed=1).select_columns(["text"])
    if is_broken:
        path.write_text("no JSON")
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_length": 64}
    trainer = build("sft", tmp_path / "run", extra={"train_dataset": dataset}, **settings)
    planted = plant(trainer, Fault("loss", step=1, micro_step=0))
    trainer.train()
    [event] = events_of(trainer)
    text = trainer.processing_class.decode(planted.batches[1, 0][0], skip_special_tokens=True)
    [row] = [number for number, row in enumerate(rows) if row["text"] == text]
    assert event["culprit"]["rows"] != [row], "the shuffle must matter"
    named = "" if is_broken else f"(rows.jsonl row {row}, key: k{row}) "
    assert event["values"]["autopsy"]["texts"] == {"0": f"{named}{text}"}
    assert f"text:    [0] {named}{text}\n" in caplog.text
