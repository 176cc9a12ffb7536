"""Quarantined rows in real trainers: written with proof, left out later, and never anything else changed."""

import shutil

import pytest
import torch
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardArguments, guarded, read_events
from hf_nanguard.core.journal import Journal
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.vocabulary import Signal
from hf_nanguard.hf.compat.prepared_dataset import PreparedRows
from hf_nanguard.hf.data.dataset_fingerprint import find_fingerprint
from hf_nanguard.hf.data.quarantine_file import FILE, quarantine_rows, read_quarantine
from hf_nanguard.hf.data.row_quarantine import RowQuarantine

from ...models import VOCAB, text_rows, tiny_llama, tiny_tokenizer, token_rows
from ...trainers import common_arguments, reward_length

BAD = 5
QUIET = {"nanguard_doctor": "off"}


class Dividing(Trainer):
    """Divides by zero for every row that begins with the last token."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        is_bad = (inputs["input_ids"][:, 0] == VOCAB - 1).float()
        loss = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:], reduction="none"
        )
        loss = (loss.mean(1) / (1 - is_bad)).mean()
        return (loss, outputs) if return_outputs else loss


def rows(*bad):
    found = token_rows(16)
    for index, row in enumerate(found):
        row["input_ids"][0] = VOCAB - 1 if index in bad else 5
    return found


def train(folder, data, trainer_class=None, **settings):
    given = {"max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    args = TrainingArguments(**common_arguments(folder, **{**given, **settings.pop("arguments", {})}))
    guard = {} if trainer_class is not None else {"guard": GuardArguments(**QUIET, **settings)}
    trainer = (trainer_class or guarded(Dividing))(tiny_llama(), args, train_dataset=data, **guard)
    trainer.train()
    return trainer


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def events_of(folder):
    return [(event["signal"], event["action"]) for event in read_events(folder)]


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """A folder in which a run has proved a row to be bad."""
    folder = tmp_path_factory.mktemp("proved")
    train(folder, Dataset.from_list(rows(BAD)))
    return folder


def copied(proved, tmp_path):
    shutil.copytree(proved / "nanguard", tmp_path / "nanguard")
    return tmp_path


def test_a_row_that_an_autopsy_proves_is_written(proved):
    [entry] = read_quarantine(proved / "nanguard")[0]
    [event] = [event for event in read_events(proved) if event["signal"] == "loss_nonfinite"]
    assert entry.row == BAD
    assert (entry.run, entry.cause, entry.step) == (event["run"], "div_by_zero", event["step"])
    assert entry.dataset == find_fingerprint(Dataset.from_list(rows(BAD)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_later_run_trains_on_the_next_row_in_its_place_and_on_all_others_as_ever(proved, tmp_path, num_workers):
    arguments = {"arguments": {"dataloader_num_workers": num_workers}}
    later = train(copied(proved, tmp_path), Dataset.from_list(rows(BAD)), **arguments)
    other = rows()
    other[BAD] = other[BAD + 1]
    assert same_weights(later, train(tmp_path / "stock", Dataset.from_list(other), Dividing))
    [event] = read_events(tmp_path)
    assert (event["signal"], event["action"], event["culprit"]["rows"]) == ("rows_quarantined", "dropped", [BAD])
    assert f"dataset row {BAD}" in event["message"]


@pytest.mark.parametrize(
    "settings", [{"nanguard_quarantine": "record"}, {"nanguard_quarantine": "off"}, {"nanguard_mode": "observe"}]
)
def test_a_run_that_was_told_not_to_leaves_nothing_out(settings, proved, tmp_path):
    before = read_quarantine(proved / "nanguard")[0]
    train(copied(proved, tmp_path), Dataset.from_list(rows(BAD)), **settings)
    assert ("rows_quarantined", "dropped") not in events_of(tmp_path)
    assert read_quarantine(tmp_path / "nanguard")[0] == before


class Scalars(Sampler):
    """Yields rows as scalars of torch, as a user's own order may."""

    def __len__(self):
        return 16

    def __iter__(self):
        return iter(torch.arange(16))


class InOwnOrder(Dividing):
    def _get_train_sampler(self, train_dataset=None):
        return Scalars()


def test_rows_that_a_sampler_gives_as_tensors_are_named_and_left_out(proved, tmp_path):
    data, own = Dataset.from_list(rows(BAD)), guarded(InOwnOrder)
    first = train(tmp_path / "first", data, own, arguments={"max_steps": 2})
    assert first.nanguard.guard.counter.skipped_steps == 1
    assert [entry.row for entry in read_quarantine(tmp_path / "first" / "nanguard")[0]] == [BAD]
    later = train(copied(proved, tmp_path), data, own)
    assert later.nanguard.guard.counter.skipped_steps == 0
    assert events_of(tmp_path) == [("rows_quarantined", "dropped")]


@pytest.mark.parametrize(("on_spike", "action"), [("observe", "observed"), ("skip", "dropped")])
def test_a_row_with_a_finite_spike_is_left_out_only_if_spikes_are_acted_on(on_spike, action, tmp_path):
    data = Dataset.from_list(rows())
    given = {"dataset": find_fingerprint(data), "step": 3, "run": "r"}
    quarantine_rows(tmp_path / "nanguard", [BAD], signal=Signal.LOSS_SPIKE, **given)
    later = train(tmp_path, data, nanguard_on_spike=on_spike)
    [event] = read_events(tmp_path)
    assert (event["signal"], event["action"]) == ("rows_quarantined", action)
    assert ("finite spikes" in event["message"]) == (on_spike == "observe")
    stock = train(tmp_path / "stock", data, Dividing)
    assert same_weights(later, stock) == (on_spike == "observe")


def test_a_row_that_was_mended_is_trained_on_again(tmp_path):
    data = [{"x": index} for index in range(1000)]
    found = RowQuarantine(Policy(), Journal(Ranks()), lambda: 0)
    found.begin_run(tmp_path, "r", data, PreparedRows())
    autopsy = {"scope": "samples", "reproducible": True}
    event = {"signal": "loss_nonfinite", "step": 1, "cause": None, "values": {"autopsy": autopsy}}
    found.note({**event, "culprit": {"rows": [500, 501], "phase": "loss"}})
    found.honor()
    assert set(found.replacements) == {500, 501}
    data[501] = {"x": -1}
    found.begin_run(tmp_path, "s", data, PreparedRows())
    found.honor()
    assert set(found.replacements) == {500}
    found.note({**event, "culprit": {"rows": [500, 501], "phase": "loss"}})
    assert [entry.row for entry in read_quarantine(tmp_path)[0]] == [500, 501, 501]


def test_many_rows_in_a_row_are_replaced_at_once(tmp_path):
    """As the doctor may write them; the last ones are replaced by the first that is left."""
    found = RowQuarantine(Policy(), Journal(Ranks()), lambda: 0)
    found.dataset = range(200_000)
    replaced = found._replace({*range(5), *range(20_000, 200_000), 10**30})
    assert replaced[0] == replaced[4] == replaced[20_000] == replaced[199_999] == 5
    assert len(replaced) == 180_005


def test_off_writes_nothing(tmp_path):
    train(tmp_path, Dataset.from_list(rows(BAD)), nanguard_quarantine="off")
    assert ("loss_nonfinite", "skipped") in events_of(tmp_path)
    assert not (tmp_path / "nanguard" / FILE).exists()


def test_rows_of_another_dataset_are_reported_once_and_ignored(proved, tmp_path):
    folder, other = copied(proved, tmp_path), rows()
    other[0]["input_ids"][3] = 7
    later = train(folder, Dataset.from_list(other), arguments={"max_steps": 9})  # several epochs
    [event] = read_events(folder)
    assert (event["signal"], event["action"]) == ("rows_quarantined", "observed")
    assert "another dataset" in event["message"]
    assert same_weights(
        later, train(tmp_path / "stock", Dataset.from_list(other), Dividing, arguments={"max_steps": 9})
    )


def test_a_file_that_is_no_quarantine_is_reported_and_changes_nothing(tmp_path):
    (tmp_path / "nanguard").mkdir()
    (tmp_path / "nanguard" / FILE).write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.\n\x80\x04")
    later = train(tmp_path, Dataset.from_list(rows()))
    [event] = read_events(tmp_path)
    assert (event["signal"], event["action"]) == ("rows_quarantined", "observed")
    assert same_weights(later, train(tmp_path / "stock", Dataset.from_list(rows()), Dividing))


def test_a_stream_cannot_leave_rows_out_and_says_so(proved, tmp_path):
    stream = Dataset.from_list(rows(BAD)).to_iterable_dataset()
    train(copied(proved, tmp_path), stream)
    [event] = [event for event in read_events(tmp_path) if event["signal"] == "rows_quarantined"]
    assert event["message"] == f"{FILE} is ignored because the rows of this dataset have no numbers"


def test_a_prompt_of_grpo_is_replaced_in_its_whole_group(tmp_path):
    import trl

    data = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(4)])
    given = {"dataset": find_fingerprint(data), "signal": Signal.LOSS_NONFINITE, "step": 0, "run": "r"}
    quarantine_rows(tmp_path / "nanguard", [1, 2], **given)
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append(prompts)
        return reward_length(completions)

    arguments = {"num_generations": 2, "max_completion_length": 2, "max_steps": 4, "per_device_train_batch_size": 2}
    args = trl.GRPOConfig(**common_arguments(tmp_path, **arguments, gradient_accumulation_steps=1))
    guarded(trl.GRPOTrainer)(
        tiny_llama(), args=args, train_dataset=data, reward_funcs=reward, processing_class=tiny_tokenizer(),
        guard=GuardArguments(**QUIET),
    ).train()  # fmt: skip
    names = [data["prompt"].index(prompt) for prompts in seen for prompt in prompts]
    assert sorted(names) == [0, 0, 3, 3, 3, 3, 3, 3]
    assert all(first == second for first, second in zip(names[::2], names[1::2], strict=True))
