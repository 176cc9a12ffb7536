"""The rows an event names are those the loss really got: shuffled, by workers, after a resume, in a tail, in RL.

Every dataset row carries its own number as a token, so the batch itself tells which rows it is made of. Faults are
planted in chosen micro-batches, and each event is compared with the batch that the loss was given at that place.
"""

import pytest
import torch
from datasets import Dataset
from datasets import IterableDataset as HubIterable
from torch.utils.data import IterableDataset

from hf_nanguard import GuardArguments, GuardedGRPOTrainer, GuardedTrainer, guarded
from hf_nanguard.boundary import Boundary
from hf_nanguard.hf.data.dataset_rows import BatchRecord
from hf_nanguard.testing import Fault, plant

from ...models import text_rows, tiny_llama, tiny_tokenizer, token_dataset, token_rows
from ...trainers import build, common_arguments, events_of, reward_length

FIRST_TOKEN = 3  # row i of `token_rows` begins with token 3 + i
FIRST_WORD = 7  # word w<i> of the tiny tokenizer is token 7 + i


def _told(trainer):
    """The rows of every event, by place."""
    return {(event["step"], event["micro_step"]): event["culprit"]["rows"] for event in events_of(trainer)}


def _run(trainer, places, resume=None, kind="loss"):
    """Trains with faults at `places`; returns what the events say, and the rows of every batch the loss got."""
    trainer.nanguard.guard.escalation.max_bad_steps = 100
    planted = plant(trainer, *[Fault(kind, *place) for place in places])
    trainer.train(resume_from_checkpoint=resume)
    batches = {place: (ids[:, 0] - FIRST_TOKEN).tolist() for place, ids in planted.batches.items()}
    told = _told(trainer)
    assert told.keys() == set(places)
    return told, batches


class TorchDataset(torch.utils.data.Dataset):
    def __init__(self, num_rows):
        self.rows = token_rows(num_rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(IterableDataset):
    def __init__(self, num_rows):
        self.rows = token_rows(num_rows)

    def __iter__(self):
        return iter(self.rows)


DATASETS = {"datasets": token_dataset, "torch": TorchDataset, "list": token_rows}
PLACES = [(0, 0), (1, 1), (2, 2), (3, 0), (5, 1)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("made_of", DATASETS)
def test_shuffled_rows_over_several_epochs(made_of, workers, tmp_path):
    trainer = build(
        "plain", tmp_path, extra={"train_dataset": DATASETS[made_of](24)},
        max_steps=-1, num_train_epochs=2, dataloader_num_workers=workers,
    )  # fmt: skip
    places = [*PLACES, (7, 2)]
    told, batches = _run(trainer, places)
    assert told == {place: batches[place] for place in places}
    epochs = [[row for s, m in sorted(batches) if s // 4 == epoch for row in batches[s, m]] for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(24))] * 2
    assert epochs[0] != epochs[1] != list(range(24))  # the sampler has shuffled, differently each time


def test_sequential_rows_are_the_ones_counted_by_hand(tmp_path):
    trainer = build("plain", tmp_path, train_sampling_strategy="sequential")
    told, _ = _run(trainer, [(1, 1), (3, 2)])
    assert told == {(1, 1): [8, 9], (3, 2): [22, 23]}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_uneven_tail(workers, tmp_path):
    """15 rows in batches of 2 and groups of 3: the last group of an epoch has two micro-batches, the last batch one row."""
    trainer = build(
        "plain", tmp_path, extra={"train_dataset": token_dataset(15)},
        max_steps=-1, num_train_epochs=2, dataloader_num_workers=workers,
    )  # fmt: skip
    places = [(2, 0), (2, 1), (3, 0), (5, 1)]
    told, batches = _run(trainer, places)
    assert told == {place: batches[place] for place in places}
    assert [len(told[place]) for place in places] == [2, 1, 2, 1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ignore_data_skip", [False, True])
def test_rows_after_a_resume_in_mid_epoch(workers, ignore_data_skip, tmp_path):
    settings = {
        "max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3,
        "dataloader_num_workers": workers, "ignore_data_skip": ignore_data_skip,
        "extra": {"train_dataset": token_dataset(30)},
    }  # fmt: skip
    whole = build("plain", tmp_path / "whole", **settings)
    _, expected = _run(whole, [])
    assert whole.state.global_step == 10
    resumed = build("plain", tmp_path / "resumed", **settings)
    places = [(3, 0), (4, 2), (5, 1), (8, 0)]
    told, batches = _run(resumed, places, resume=str(tmp_path / "whole" / "checkpoint-3"))
    assert told == {place: batches[place] for place in places}
    if not ignore_data_skip:
        assert told == {place: expected[place] for place in places}


def test_a_second_call_of_train_begins_at_the_first_row_again(tmp_path):
    trainer = build("plain", tmp_path, train_sampling_strategy="sequential", max_steps=2)
    trainer.train()
    told, _ = _run(trainer, [(1, 1)])
    assert told == {(1, 1): [8, 9]}


@pytest.mark.parametrize("kind", ["loss", "gradient", "error", "label"])
def test_every_kind_of_fault_names_its_rows(kind, tmp_path):
    extra = {"guard": GuardArguments(nanguard_on_loss_error="drop")}
    trainer = build("plain", tmp_path, extra=extra, train_sampling_strategy="sequential")
    plant(trainer, Fault(kind, 1, 2, value=999 if kind == "label" else float("nan")))
    trainer.train()
    assert _told(trainer) == {(1, 2): [10, 11]}


def test_a_refused_error_names_its_rows(tmp_path):
    trainer = build("plain", tmp_path, train_sampling_strategy="sequential")
    plant(trainer, Fault("error", 1, 2))
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert _told(trainer) == {(1, 2): [10, 11]}


def test_a_finding_names_the_row_of_its_sample_only(tmp_path):
    rows = token_rows(48)
    rows[9]["labels"][3] = 4711
    trainer = build("plain", tmp_path, extra={"train_dataset": Dataset.from_list(rows)}, max_steps=8)
    planted = plant(trainer)
    trainer.train()
    batches = {place: (ids[:, 0] - FIRST_TOKEN).tolist() for place, ids in planted.batches.items()}
    [event] = events_of(trainer)
    place = (event["step"], event["micro_step"])
    assert event["culprit"]["rows"] == [9]
    assert [batches[place][sample] for sample in event["culprit"]["samples"]] == [9]


# ---- streams ----


@pytest.mark.parametrize("make", [Stream, lambda n: token_dataset(n).to_iterable_dataset()], ids=["torch", "datasets"])
def test_one_process_counts_the_rows_of_a_stream(make, tmp_path):
    """9 rows in batches of 2: the last batch of each pass is short, and the next pass begins at row 0."""
    trainer = build(
        "plain", tmp_path, extra={"train_dataset": make(9)}, gradient_accumulation_steps=1, max_steps=10
    )  # fmt: skip
    places = [(0, 0), (3, 0), (4, 0), (5, 0), (9, 0)]
    told, batches = _run(trainer, places)
    assert told == {place: batches[place] for place in places}
    assert told == {(0, 0): [0, 1], (3, 0): [6, 7], (4, 0): [8], (5, 0): [0, 1], (9, 0): [8]}


def test_a_stream_that_ends_inside_a_group(tmp_path):
    """7 rows in batches of 2 and groups of 3: the host leaves the gradient of the last row to the next pass's first step."""
    trainer = build("plain", tmp_path, extra={"train_dataset": Stream(7)}, max_steps=2)
    planted = plant(trainer, Fault("loss", 1, 0))
    trainer.train()
    batches = {place: (ids[:, 0] - FIRST_TOKEN).tolist() for place, ids in planted.batches.items()}
    assert batches[1, 0] == [6]
    assert [(event["cause"], event["culprit"]["rows"]) for event in events_of(trainer)] == [("unknown", [6])]


def test_a_stream_is_counted_on_after_a_resume(tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "extra": {"train_dataset": Stream(40)}}
    build("plain", tmp_path / "begun", **settings).train()
    resumed = build("plain", tmp_path / "resumed", **settings)
    told, batches = _run(resumed, [(2, 0), (4, 2)], resume=str(tmp_path / "begun" / "checkpoint-2"))
    assert told == {place: batches[place] for place in told}
    assert told == {(2, 0): [12, 13], (4, 2): [28, 29]}


def test_rows_of_a_stream_read_by_workers_are_not_guessed(tmp_path):
    class Sharded(Stream):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            return iter(self.rows[worker.id :: worker.num_workers])

    trainer = build(
        "plain", tmp_path, extra={"train_dataset": Sharded(24)}, dataloader_num_workers=2, max_steps=2
    )  # fmt: skip
    told, _ = _run(trainer, [(1, 1)])
    assert told == {(1, 1): None}


# ---- SFT and RL ----


def test_sft_rows_are_those_of_its_own_dataset(tmp_path):
    trainer = build("sft", tmp_path)
    tokens = [row["input_ids"] for row in trainer.train_dataset]
    planted = plant(trainer, Fault("loss", 1, 2), Fault("loss", 3, 0))
    trainer.train()
    batches = {place: [tokens.index(ids) for ids in batch.tolist()] for place, batch in planted.batches.items()}
    assert _told(trainer) == {place: batches[place] for place in ((1, 2), (3, 0))}


def _online(kind, tmp_path, **overrides):
    """GRPO or RLOO on prompts that begin with their own row number."""
    import trl

    rows = [{"prompt": f"w{i} {row['text']}"} for i, row in enumerate(text_rows(24))]
    arguments = common_arguments(tmp_path, **{"num_generations": 2, "max_completion_length": 4, **overrides})
    shared = {
        "reward_funcs": reward_length,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tiny_tokenizer(),
        "guard": GuardArguments(nanguard_max_bad_steps=100),
    }
    if kind == "grpo":
        return GuardedGRPOTrainer(tiny_llama(), args=trl.GRPOConfig(**arguments), **shared)
    return guarded(trl.RLOOTrainer)(tiny_llama(), args=trl.RLOOConfig(**arguments, beta=0.0), **shared)


VARIANTS = {
    "default": {},
    "a generation for two steps": {"steps_per_generation": 6},
    "every generation used twice": {"num_iterations": 2},
    "workers": {"dataloader_num_workers": 2},
}


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rl_rows_are_the_prompts_in_that_micro_batch(kind, variant, tmp_path):
    trainer = _online(kind, tmp_path, per_device_train_batch_size=4, max_steps=3, **VARIANTS[variant])
    batches = {}
    original = trainer.compute_loss

    def witness(model, inputs, *args, **kwargs):
        if not trainer.nanguard.replaying:
            step = trainer.state.global_step
            micro_step = sum(1 for when, _ in batches if when == step)
            batches[step, micro_step] = (inputs["prompt_ids"][:, 0] - FIRST_WORD).tolist()
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = witness
    # Step 1 uses the batches of step 0 again in one of the variants, and the fault belongs to the batch.
    places = [(step, micro) for step in (0, 1, 2) for micro in (0, 2)]
    plant(trainer, *[Fault("loss", *place) for place in places])
    trainer.train()
    assert _told(trainer) == {place: batches[place] for place in places}
    # Completions were shuffled: a group of two is not side by side everywhere, as it is in the sampler's order.
    assert any(rows[0::2] != rows[1::2] for rows in batches.values())


def test_the_model_never_sees_the_rows(tmp_path):
    seen = set()

    class Curious(GuardedGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            seen.update(kwargs)
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    import trl

    data = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(24)])
    args = trl.GRPOConfig(**common_arguments(tmp_path, num_generations=2, max_completion_length=4, max_steps=1))
    Curious(
        tiny_llama(), args=args, train_dataset=data, reward_funcs=reward_length, processing_class=tiny_tokenizer()
    ).train()
    assert seen
    assert not any("nanguard" in name for name in seen)


# ---- the record itself ----


def test_a_record_that_follows_nothing_knows_nothing():
    assert BatchRecord(Boundary()).next({"input_ids": torch.zeros(2, 3)})[2] is None


def test_batches_without_a_batch_sampler_have_no_rows(tmp_path):
    class Whole(torch.utils.data.Dataset):
        """Makes batches by itself."""

        def __len__(self):
            return 12

        def __getitem__(self, index):
            rows = token_rows(24)[2 * index : 2 * index + 2]
            return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}

    class Batched(GuardedTrainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=None)

    from transformers import TrainingArguments

    trainer = Batched(tiny_llama(), TrainingArguments(**common_arguments(tmp_path)), train_dataset=Whole())
    plant(trainer, Fault("loss", 1, 1))
    trainer.train()
    assert _told(trainer) == {(1, 1): None}


def test_a_hub_stream_is_a_torch_stream():
    """What `BatchRecord.recording` relies on: `datasets` makes its streams pass for torch's in a DataLoader."""
    stream = token_dataset(3).to_iterable_dataset()
    assert isinstance(stream, HubIterable)
    assert isinstance(stream.with_format("torch"), IterableDataset)
