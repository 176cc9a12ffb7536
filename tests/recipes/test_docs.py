"""The pages in docs/ tell the truth: their tables are those of the code, their Python runs, their messages can be said."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from hf_nanguard import GuardArguments, GuardedTrainer
from hf_nanguard.cli.shared.setting_flags import CONFIG_VARIABLE, gather
from hf_nanguard.core.autopsy.remedies.bounded_operators import BOUNDS
from hf_nanguard.core.event import SCHEMA, Culprit, Event
from hf_nanguard.core.optimizer.rounding_remedies import IDEAS
from hf_nanguard.core.settings import PREFIX, SETTINGS
from hf_nanguard.core.step.counters import Counter
from hf_nanguard.core.vocabulary import Action, Cause, Signal
from hf_nanguard.examples.recipe.presets import list_presets

from ..architectures import BY_NAME
from ..trainers import common_arguments, metric_rows_of
from .argument_tables import update_tables
from .markdown import (
    ROOT,
    anchor_headings,
    find_anchors,
    find_links,
    find_sections,
    find_snippets,
    find_tables,
    in_use,
    is_said,
    named_in,
    read_page,
    run_snippet,
)

NAMES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
ARGUMENTS, EVENTS, REMEDIES = (read_page(f"docs/{name}.md") for name in ("arguments", "events", "remedies"))
SNIPPETS = [(name, snippet) for name in NAMES for snippet in find_snippets(read_page(name), "python")]
CAUSES = {title.strip("`"): body for title, body in find_sections(REMEDIES, 3).items()}
LABELS = ("In the log", "It means", "Do", "Remedies")


def find_label(cause: str, label: str) -> str:
    """Returns what an entry says under a label."""
    [text] = re.findall(rf"^- \*\*{label}:\*\* (.*?)(?=^- \*\*|\Z)", CAUSES[cause], flags=re.DOTALL | re.MULTILINE)
    return " ".join(text.split())


# ---- all pages ----


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = read_page(name)
    for link in find_links(page):
        assert ((ROOT / name).parent / link).exists(), link
    assert set(find_anchors(page)) <= anchor_headings(page)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"docs/architecture.md"}))  # what no command shows
def test_a_page_begins_with_a_sentence_and_an_example(name):
    head, _, _ = read_page(name).partition("\n```")
    title, sentence, *_ = head.split("\n\n")
    assert title.startswith("# ")
    assert sentence[0].isupper() or sentence[0] == "`"
    assert len(head) < 1200


@pytest.mark.parametrize("name", NAMES)
def test_settings_named_in_backticks_exist(name):
    known = {field.name for field in fields(GuardArguments)}
    said = {word for text in named_in([read_page(name)]) for word in re.findall(r"\bnanguard_[a-z_]+", text)}
    assert said <= known | {"nanguard_state"}  # of a file's name


@pytest.mark.parametrize(("name", "snippet"), SNIPPETS, ids=[f"{Path(n).stem}{i}" for i, (n, _) in enumerate(SNIPPETS)])
def test_snippets_run(name, snippet, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine" / "nanguard"
    folder.mkdir(parents=True)
    [event] = find_snippets(EVENTS, "json")
    (folder / "events.jsonl").write_text(json.dumps(json.loads(event)) + "\n", encoding="utf-8")
    run_snippet(snippet, name, tmp_path)
    if "read_events" in snippet:
        assert "40 loss_nonfinite skipped div_by_zero ['guarded_division', 'drop_rows']" in capsys.readouterr().out


# ---- arguments.md ----


def test_argument_tables_are_those_of_the_code():
    assert update_tables(ARGUMENTS) == ARGUMENTS, "run python -m tests.recipes.argument_tables"
    assert [cells[0] for cells in find_tables(ARGUMENTS, "field")] == [f"`{f.name}`" for f in fields(GuardArguments)]


def test_tables_that_are_out_of_date_are_seen():
    for stale in (ARGUMENTS.replace("`nanguard_stall_steps` | `int`", "`nanguard_stall_steps` | `float`"),
                  re.sub(r"\| `nanguard_full_metrics`.*\n", "", ARGUMENTS)):  # fmt: skip
        assert stale != ARGUMENTS
        assert update_tables(stale) == ARGUMENTS


def test_every_choice_is_explained():
    meanings = {cells[0].strip("`"): named_in(cells[3:]) for cells in find_tables(ARGUMENTS, "field")}
    for name, setting in SETTINGS.items():
        assert set(setting.choices) <= set(meanings[f"{PREFIX}{name}"]), name


def test_the_yaml_and_the_spellings_are_read(tmp_path):
    [text] = find_snippets(ARGUMENTS, "yaml")
    file = tmp_path / "guard.yaml"
    file.write_text(text, encoding="utf-8")
    assert gather({}, {CONFIG_VARIABLE: str(file)}) == yaml.safe_load(text)
    flag, variable, line, by_file = (cells[2] for cells in find_tables(ARGUMENTS, "of `nanguard run`"))
    name, value = flag.strip("`").split()
    assert name in {f"--{PREFIX}{setting}" for setting in SETTINGS}
    expected = {name.removeprefix("--"): int(value)}
    assert gather({}, dict([variable.strip("`").split("=")])) == expected
    assert yaml.safe_load(line.strip("`")) == expected
    assert f"{CONFIG_VARIABLE}=guard.yaml" in named_in([by_file])


def test_all_presets_are_listed():
    stated = named_in([cells[1] for cells in find_tables(ARGUMENTS, "kind")])
    assert sorted(stated) == sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml"))
    named = re.findall(r"--preset (\w+)", ARGUMENTS)
    assert sorted(named) == list_presets("sft")


def test_files_named_exist():
    for page in (ARGUMENTS, EVENTS, REMEDIES):
        for file in re.findall(r"\b(?:recipes|configs|docs)/[\w/.]+\w", page):
            assert (ROOT / file).is_file(), file


# ---- events.md ----


def test_the_event_has_the_schema():
    [text] = find_snippets(EVENTS, "json")
    stated = json.loads(text)
    actual = Event(1, Signal.LOSS_NONFINITE, Action.SKIPPED, "", culprit=Culprit()).as_dict()
    assert list(stated) == ["run", *actual], "the file adds the id of the run"
    assert list(stated["culprit"]) == list(actual["culprit"])
    assert stated["schema"] == SCHEMA
    assert [stated["signal"], stated["action"], stated["cause"]] == [
        Signal(stated["signal"]), Action(stated["action"]), Cause(stated["cause"])
    ]  # fmt: skip
    assert named_in([cells[0] for cells in find_tables(EVENTS, "field")]) == ["run", *actual]
    assert named_in([cells[0] for cells in find_tables(EVENTS, "field of `culprit`")]) == list(actual["culprit"])


def test_the_example_is_of_the_code_as_it_is():
    """The line that the event and the autopsy in the README blame is the one they quote."""
    [text] = find_snippets(EVENTS, "json")
    stated = json.loads(text)
    [shown] = re.findall(r"outside the model, (\S+)\n  line:    (.*)", read_page("README.md"))
    for source, quoted in ((stated["culprit"]["source"], stated["values"]["autopsy"]["text"]), shown):
        file, line = source.split(":")
        [path] = (ROOT / "hf_nanguard").rglob(file)
        assert path.read_text(encoding="utf-8").splitlines()[int(line) - 1].strip() == quoted


def test_every_phase_is_named():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_nanguard").rglob("*.py"))
    [cells] = [cells for cells in find_tables(EVENTS, "field of `culprit`") if cells[0] == "`phase`"]
    assert set(named_in(cells[2:])) == set(re.findall(r"phase=\"(\w+)\"", code))


@pytest.mark.parametrize(("title", "enum"), [("`signal` in use", Signal), ("`action` in use", Action)])
def test_signals_and_actions_in_use(title, enum):
    stated = named_in([cells[0] for cells in find_tables(EVENTS, title)])
    assert {str(enum[name]) for name in in_use(enum.__name__)} == set(stated)
    assert len(stated) == len(set(stated))


def test_what_is_done_about_a_signal_is_an_action():
    for cells in find_tables(EVENTS, "`signal` in use"):
        done = named_in(cells[2:])
        assert done, cells[0]
        assert {name for name in done if not name.startswith(PREFIX)} <= set(Action), cells[0]


def test_metrics_are_those_of_the_code(tmp_path):
    """Those of a run with every monitor on, of a model that has all there is to see; the rest need more than a run."""
    periods = {f"nanguard_{name}_steps": 1 for name in ("activation", "attention", "weight_check")}
    samples = [{"input_ids": list(range(i, i + 16)), "labels": list(range(i, i + 16))} for i in range(4)]
    trainer = GuardedTrainer(
        BY_NAME["mixtral"].build(), TrainingArguments(**common_arguments(tmp_path, max_steps=2)),
        train_dataset=samples, guard=GuardArguments(**periods),
    )  # fmt: skip
    trainer.train()
    seen = {name for row in metric_rows_of(trainer) for name in row if name.startswith("nanguard/")}
    counter = Counter()
    counter.count_scaler_skip()
    counter.count_rewards(1, 1)
    counter.terms, counter.dropped_terms = {"<name>": (1.0, 1)}, {"<name>": 1}
    bounded = {
        "nanguard/bounded_ratio",
        "nanguard/bounded_kl",
    }  # of online trainers, see tests/hf/rl/test_grpo_learning.py
    stated = named_in([cells[0] for cells in find_tables(EVENTS, "metric")])
    assert len(stated) == len(set(stated))
    assert set(stated) == seen | counter.as_metrics().keys() | bounded


# ---- remedies.md ----


def test_every_cause_has_an_entry():
    assert list(CAUSES) == list(Cause)


@pytest.mark.parametrize("cause", Cause)
def test_entries_say_what_it_looks_like_means_and_needs(cause):
    assert re.findall(r"^- \*\*(.*?):\*\*", CAUSES[cause], flags=re.MULTILINE) == list(LABELS)
    assert all(find_label(cause, label) for label in LABELS)


@pytest.mark.parametrize("cause", Cause)
def test_the_log_can_say_it(cause):
    lines = named_in([find_label(cause, "In the log")])
    assert lines
    for line in lines:
        assert line == f"why: {cause}" or is_said(line), line


def test_halts_can_say_it():
    for cells in find_tables(REMEDIES, "the message says"):
        [message] = named_in(cells[:1])
        message = re.sub(r"weights themselves are|state of the optimizer is", "<what>", message)
        assert is_said(message), message


def test_every_signal_in_use_has_advice():
    stated = named_in([cells[0] for cells in find_tables(REMEDIES, "`signal`")])
    assert {str(Signal[name]) for name in in_use("Signal")} == set(stated)
    assert len(stated) == len(set(stated))


def test_every_remedy_is_told_and_belongs_to_a_cause():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_nanguard" / "core").rglob("*.py"))
    tried = set(re.findall(r"(?:Idea|_Trial)\(\s*\"(\w+)\"", code)) - {"unchanged"}
    tried |= set(re.findall(r"Cause\.\w+: \(\s*\"(\w+)\"", code))
    tried |= IDEAS.keys()
    told = named_in([cells[0] for cells in find_tables(REMEDIES, "remedy")])
    assert sorted(told) == sorted(tried)
    belonging = {name for cause in Cause for name in named_in([find_label(cause, "Remedies")])}
    assert belonging - {'nanguard_on_bad_reward="halt"'} == tried


def test_bounds_belong_to_their_causes():
    for cause, (name, _, _) in BOUNDS.items():
        assert named_in([find_label(cause, "Remedies")])[0] == name
    assert set(named_in([find_label(Cause.ROUNDING_STALL, "Remedies")])) == IDEAS.keys()
