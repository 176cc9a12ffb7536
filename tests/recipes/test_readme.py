"""The README tells the truth: its Python runs, and its tables are those of the code."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import SFTConfig

from hf_nanguard import GuardArguments, GuardedTrainer
from hf_nanguard.core.autopsy.rounding import IDEAS
from hf_nanguard.core.counter import Counter
from hf_nanguard.core.event import Culprit, Event
from hf_nanguard.core.signal import Action, Signal

from ..architectures import BY_NAME
from ..models import tiny_llama, tiny_tokenizer, token_dataset
from ..trainers import common_arguments

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def find_table(first_column: str) -> list[list[str]]:
    """Returns the cells of the table whose first column has this title."""
    [body] = re.findall(rf"^\| {re.escape(first_column)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", README, flags=re.MULTILINE)
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines()]
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in rows]


def named_in(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def in_use(enum: str) -> set[str]:
    """Returns the members of a closed list that the package's code mentions."""
    files = [path for path in (ROOT / "hf_nanguard").rglob("*.py") if path.name != "signal.py"]
    return {name for path in files for name in re.findall(rf"\b{enum}\.([A-Z0-9_]+)", path.read_text(encoding="utf-8"))}


def test_there_are_snippets():
    assert len(SNIPPETS) >= 6


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[f"snippet{i}" for i in range(len(SNIPPETS))])
def test_snippets_run(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = SFTConfig if "SFT" in snippet else TrainingArguments
    args = config(
        output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        bf16=False, save_strategy="no", dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    names = {"model": tiny_llama(), "args": args, "dataset": token_dataset(8), "tokenizer": tiny_tokenizer()}
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme", **names})


def test_argument_table_is_that_of_the_code():
    stated = {cells[0]: cells[1:3] for cells in find_table("field")}
    actual = {}
    for field in fields(GuardArguments):
        kind = GuardArguments.__annotations__[field.name]  # HfArgumentParser writes into `field.type`
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
        actual[f"`{field.name}`"] = [f"`{name}`", f"`{default}`"]
    assert stated == actual
    assert all(cells[3] for cells in find_table("field"))


def test_signals_and_actions_in_use():
    for title, enum in (("`signal` in use", Signal), ("`action` in use", Action)):
        stated = named_in([cells[0] for cells in find_table(title)])
        assert {str(enum[name]) for name in in_use(enum.__name__)} == set(stated)
        assert len(stated) == len(set(stated))


def test_metrics_are_those_of_the_code(tmp_path):
    """Those of a run with every monitor on, of a model that has all there is to see; the rest need more than a run."""
    periods = {f"nanguard_{name}_steps": 1 for name in ("activation", "attention", "weight_check")}
    samples = [{"input_ids": list(range(i, i + 16)), "labels": list(range(i, i + 16))} for i in range(4)]
    trainer = GuardedTrainer(
        BY_NAME["mixtral"].build(), TrainingArguments(**common_arguments(tmp_path, max_steps=2)),
        train_dataset=samples, guard=GuardArguments(**periods),
    )  # fmt: skip
    trainer.train()
    seen = {name for row in trainer.state.log_history for name in row if name.startswith("nanguard/")}
    counter = Counter()
    counter.scaler_skips = 1
    counter.terms, counter.dropped_terms = {"<name>": (1.0, 1)}, {"<name>": 1}
    bounded = {
        "nanguard/bounded_ratio",
        "nanguard/bounded_kl",
    }  # of online trainers, see tests/hf/test_grpo_learning.py
    stated = named_in([cells[0] for cells in find_table("metric")])
    assert len(stated) == len(set(stated))
    assert set(stated) == seen | counter.as_metrics().keys() | bounded


def test_the_event_has_the_schema():
    [text] = re.findall(r"^```json\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    stated = json.loads(text)
    actual = Event(1, Signal.LOSS_NONFINITE, Action.SKIPPED, "", culprit=Culprit()).as_dict()
    assert list(stated) == list(actual)
    assert list(stated["culprit"]) == list(actual["culprit"])


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


def test_cause_table_names_every_cause_in_use():
    named = named_in([cells[0] for cells in find_table("`cause`")])
    assert len(named) == len(set(named))
    assert {name.upper() for name in named} == in_use("Cause")


def test_every_remedy_is_named():
    folder = ROOT / "hf_nanguard" / "core" / "autopsy"
    code = "".join((folder / name).read_text(encoding="utf-8") for name in ("remedy.py", "bound.py", "update.py"))
    tried = set(re.findall(r"(?:Idea|_Trial)\(\s*\"(\w+)\"", code)) - {"unchanged"}
    tried |= set(re.findall(r"Cause\.\w+: \(\s*\"(\w+)\"", code))
    tried |= IDEAS.keys()
    [sentence] = re.findall(r"^Remedies that may be tried:(.*?)\"Works\"", README, flags=re.DOTALL | re.MULTILINE)
    assert set(named_in([sentence])) == tried
