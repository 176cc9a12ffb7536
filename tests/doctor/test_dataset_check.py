"""Every check of data on real trainers: rows that it must find, alone, and rows that it must find sound."""

import random
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

from hf_nanguard import ArgumentError, check_dataset
from hf_nanguard.core.rng import RngState
from hf_nanguard.doctor.data.sampled_rows import is_repeatable
from hf_nanguard.doctor.dataset_check import DATA_CHECKS

from ..architectures import BY_NAME
from ..models import CHAT_TEMPLATE, tiny_llama, tiny_t5, tiny_tokenizer, token_rows
from ..trainers import build

END = 2  # the stop token


def plain(rows: Any, model: Any = None, **extra: Any) -> Trainer:
    arguments = {"output_dir": "unused", "use_cpu": True, "report_to": [], "per_device_train_batch_size": 4}
    return Trainer(model or tiny_llama(), TrainingArguments(**arguments), train_dataset=rows, **extra)


def tokens(change: Any = None, bad: tuple[int, ...] = (3, 7), num_rows: int = 16, length: int = 8) -> list[dict]:
    """Rows that end with the stop token, some of them changed."""
    rows = token_rows(num_rows, length)
    for number, row in enumerate(rows):
        row["input_ids"][-1] = row["labels"][-1] = END
        if change is not None and number in bad:
            change(row)
    return rows


def set_field(name: str, position: int | None, value: int) -> Any:
    def change(row: dict) -> None:
        row[name] = (
            [value] * len(row[name]) if position is None else [*row[name][:position], value, *row[name][position + 1 :]]
        )

    return change


def images(change: Any = None) -> Trainer:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": index % 2} for index in range(8)]
    if change is not None:
        change(rows[3]["pixel_values"])
    return plain(rows, ViTForImageClassification(config))


def sft(tmp_path, rows: list[dict]) -> Trainer:
    return build("sft", tmp_path, guard=False, extra={"train_dataset": Dataset.from_list(rows)})


def answers(length: int = 2) -> list[dict]:
    """Prompts and completions, one of which has a prompt of another length."""
    rows = [{"prompt": f"w1 w{i}", "completion": " w3 w4"} for i in range(12)]
    rows[5]["prompt"] = "w1 " * length
    return rows


def processed(last: int) -> list[dict]:
    rng = random.Random(0)
    return [{"input_ids": [*(rng.randrange(3, 60) for _ in range(6)), last]} for _ in range(12)]


def known(trainer: Trainer) -> Trainer:
    """The same, as if its model had been loaded."""
    trainer.model.config.name_or_path = "org/model"
    return trainer


def pairs(folder, *equal: int):
    """A DPO trainer of eight pairs, some of which are equal (these and those four rows later)."""
    texts = [f"w{i} w{i + 1}" for i in range(16)]
    rows = [
        {"prompt": f"w{i + 20}", "chosen": f" {texts[i]}", "rejected": f" {texts[i if i % 4 in equal else i + 8]}"}
        for i in range(8)
    ]
    args = trl.DPOConfig(str(folder), use_cpu=True, bf16=False, report_to=[], precompute_ref_log_probs=True)
    return trl.DPOTrainer(
        tiny_llama(), args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer()
    )


def prompts(tmp_path, texts: list[str]) -> Trainer:
    data = Dataset.from_list([{"prompt": text} for text in texts])
    trainer = build("grpo", tmp_path, guard=False)
    trainer.train_dataset = data
    return trainer


def talks(tmp_path, template: str) -> Trainer:
    """An SFT trainer of conversations with a system message."""
    tokenizer, rng = tiny_tokenizer(), random.Random(0)
    tokenizer.chat_template = template
    roles = ("system", "user", "assistant")
    rows = [
        {"messages": [{"role": role, "content": f"w{rng.randrange(40)} w{rng.randrange(40)}"} for role in roles]}
        for _ in range(8)
    ]
    return build(
        "sft", tmp_path, guard=False, extra={"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    )


def start_twice(rows: list[dict]) -> list[dict]:
    return [{name: [1, *values] for name, values in row.items()} for row in rows]


def cut(examples: list[dict]) -> dict:
    """A collator that drops the end of every row."""
    return default_data_collator([{name: values[:5] for name, values in row.items()} for row in examples])


def classes(*labels: int) -> Trainer:
    trainer = images()
    torch.manual_seed(1)
    trainer.train_dataset = [
        {"pixel_values": torch.randn(3, 8, 8), "labels": labels[i % len(labels)]} for i in range(16)
    ]
    return trainer


LEARNS = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'ROLE' %}{% generation %}{{ m['content'] }} {{ eos_token }}{% endgeneration %} "
    "{% else %}{{ m['content'] }} {{ eos_token }} {% endif %}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def learns(tmp_path, role: str) -> Trainer:
    """An SFT trainer that learns what one role says."""
    tokenizer, rng = tiny_tokenizer(), random.Random(0)
    tokenizer.chat_template = LEARNS.replace("ROLE", role)
    say = lambda: f"w{rng.randrange(40)} w{rng.randrange(40)} w{rng.randrange(40)}"  # noqa: E731
    rows = [{"messages": [{"role": name, "content": say()} for name in ("user", "assistant")]} for _ in range(8)]
    return build("sft", tmp_path, guard=False, assistant_only_loss=True,
                 extra={"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer})  # fmt: skip


def translations(change: Any = None) -> Trainer:
    """A T5 trainer whose labels of some rows are changed."""
    rows = tokens()
    for number in (3, 7):
        if change is not None:
            change(rows[number])
    return plain(rows, tiny_t5(), processing_class=tiny_tokenizer())


def pad_labels(row: dict) -> None:
    row["labels"] = [*row["labels"][:3], END, 0, 0, 0, 0]


def begun(rows: list[dict]) -> list[dict]:
    return [{**row, "labels": [0, *row["labels"][1:]]} for row in rows]


def with_new_tokens(tmp_path, trains: bool) -> Trainer:
    """An SFT trainer of an adapter, whose rows have a token that was added to the checkpoint."""
    from peft import LoraConfig, get_peft_model

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["new"])
    tiny_llama(dropout=0.0).save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(len(tokenizer))
    more = {"trainable_token_indices": [64]} if trains else {}
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **more))
    rows = [{"input_ids": [*row["input_ids"][:4], 64, *row["input_ids"][5:]]} for row in tokens()]
    args = trl.SFTConfig(str(tmp_path), max_length=16, report_to=[], use_cpu=True, bf16=False, learning_rate=1e-4)
    return trl.SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)


def with_places(tmp_path, has_images: bool) -> Trainer:
    """A LLaVA whose rows have places for images, and the images or not."""
    llava = BY_NAME["llava"]
    fields = {name: values for name, values in llava.inputs().items() if has_images or name != "pixel_values"}
    fields["labels"][:, -3:] = END
    return plain([{name: values[i] for name, values in fields.items()} for i in range(3)], llava.build())


def two_classes(values: tuple) -> Trainer:
    """A BERT with one label."""
    config = BertConfig(
        vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=1
    )
    rows = [{**row, "labels": values[i % 2]} for i, row in enumerate(tokens())]
    return plain(rows, BertForSequenceClassification(config))


# check -> (a trainer with bad rows, these rows, one without)
CASES: dict[str, tuple[Any, list[int], Any]] = {
    "collation": (
        lambda folder: plain([*tokens(num_rows=3), *tokens(num_rows=3, length=9)], data_collator=default_data_collator),
        [],
        lambda folder: plain(tokens()),
    ),
    "labels-masked": (
        lambda folder: plain(tokens(set_field("labels", None, -100))), [3, 7], lambda folder: plain(tokens(set_field("labels", 2, -100))),
    ),
    "rows-removed": (lambda folder: sft(folder, answers(30)), [5], lambda folder: sft(folder, answers())),
    "labels-missing": (
        lambda folder: plain([{"input_ids": row["input_ids"]} for row in tokens()]), [], lambda folder: plain(tokens()),
    ),
    "stop-token": (lambda folder: sft(folder, processed(5)), [], lambda folder: sft(folder, processed(END))),
    "answers": (lambda folder: learns(folder, "user"), list(range(8)), lambda folder: learns(folder, "assistant")),
    "padding-labels": (lambda folder: translations(pad_labels), [3, 7], lambda folder: translations()),
    "decoder-start": (
        lambda folder: plain(begun(tokens()), tiny_t5()), list(range(16)), lambda folder: plain(tokens(), tiny_t5()),
    ),
    "new-tokens": (
        lambda folder: with_new_tokens(folder, False), list(range(16)), lambda folder: with_new_tokens(folder, True),
    ),
    "images-missing": (
        lambda folder: with_places(folder, False), [0, 1, 2], lambda folder: with_places(folder, True),
    ),
    "regression": (lambda folder: two_classes((0, 1)), [], lambda folder: two_classes((0.0, 1.0))),
    "messages": (
        lambda folder: talks(folder, CHAT_TEMPLATE.replace("in messages %}", "in messages if m['role'] != 'system' %}")), list(range(8)),
        lambda folder: talks(folder, CHAT_TEMPLATE),
    ),
    "start-token": (
        lambda folder: plain(start_twice(start_twice(tokens())), processing_class=tiny_tokenizer()), list(range(16)),
        lambda folder: plain(start_twice(tokens()), processing_class=tiny_tokenizer()),
    ),
    "collator-cut": (lambda folder: plain(tokens(), data_collator=cut), list(range(16)), lambda folder: plain(tokens())),
    "pairs": (lambda folder: pairs(folder, 3), [3, 7], lambda folder: pairs(folder)),
    "classes": (lambda folder: classes(1), [], lambda folder: classes(0, 1)),
    "ids": (lambda folder: plain(tokens(set_field("input_ids", 2, 64))), [3, 7], lambda folder: plain(tokens(set_field("input_ids", 2, 63)))),
    "label-values": (lambda folder: plain(tokens(set_field("labels", 2, 64))), [3, 7], lambda folder: plain(tokens())),
    "finite-inputs": (lambda folder: images(lambda pixels: pixels[0, 0].fill_(float("nan"))), [3], lambda folder: images()),
    "attention-mask": (
        lambda folder: plain(tokens(set_field("attention_mask", None, 0))), [3, 7], lambda folder: plain(tokens(set_field("attention_mask", 0, 0))),
    ),
    "empty-rows": (
        lambda folder: prompts(folder, ["w1", " ", "w2", "w3"]), [1], lambda folder: prompts(folder, ["w1", "w2", "w3", "w4"]),
    ),
    "long-rows": (lambda folder: plain(tokens(length=65)), list(range(16)), lambda folder: plain(tokens(length=64))),
    "duplicates": (
        lambda folder: known(plain([tokens()[0]] * 8)), list(range(1, 8)), lambda folder: known(plain(tokens())),
    ),
    "constant-images": (lambda folder: images(lambda pixels: pixels.fill_(0.5)), [3], lambda folder: images()),
}  # fmt: skip


def test_every_check_has_both_cases():
    assert list(CASES) == [check.name for check in DATA_CHECKS]


@pytest.mark.parametrize("name", CASES)
def test_a_check_finds_its_own_rows_and_nothing_else(name, tmp_path):
    make, rows, _ = CASES[name]
    found = check_dataset(make(tmp_path)).examination.problems
    assert [each.rule for each in found] == [name]
    assert list(found[0].rows) == rows


@pytest.mark.parametrize("name", CASES)
def test_a_check_is_silent_where_all_is_well(name, tmp_path):
    result = check_dataset(CASES[name][2](tmp_path))
    assert result.examination.problems == []
    assert name in result.examination.sound or name in (
        "rows-removed",
        "new-tokens",
    )  # nothing was filtered, nothing is frozen


def test_pixels_that_were_divided_by_255_twice_are_constant_images():
    [found] = check_dataset(images(lambda pixels: pixels.mul_(1 / 255 / 255))).findings
    assert (found.rule, found.rows) == ("constant-images", (3,))


def test_a_text_whose_tokens_are_masked_at_random_is_not_judged_by_them():
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "<unk>"
    config = BertConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    rows = [{"input_ids": row["input_ids"][:3]} for row in tokens(num_rows=40)]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    report = check_dataset(plain(rows, BertForMaskedLM(config), processing_class=tokenizer, data_collator=collator))
    assert report.examination.problems == []
    assert {"labels-masked", "stop-token"} <= set(report.examination.unchecked)


def test_few_bad_rows_are_a_note_and_most_of_them_an_error():
    def severity(num_bad):
        bad = tuple(range(num_bad))
        [found] = check_dataset(plain(tokens(set_field("labels", None, -100), bad, 200))).findings
        return found.severity

    assert [severity(num_bad) for num_bad in (1, 10, 150)] == ["note", "warning", "error"]


def test_a_sample_is_spread_over_the_rows():
    rows = tokens(set_field("labels", None, -100), tuple(range(100)), 200)
    report = check_dataset(plain(rows), sample=10)
    [found] = report.findings
    assert (report.num_rows, report.num_checked, list(found.rows)) == (200, 10, [0, 20, 40, 60, 80])
    assert report.bad_rows == list(found.rows)


def test_a_stream_is_read_from_its_beginning(tmp_path):
    stream = Dataset.from_list(tokens(set_field("labels", None, -100), (1, 50), 100)).to_iterable_dataset()
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], max_steps=2)
    report = check_dataset(Trainer(tiny_llama(), arguments, train_dataset=stream), sample=10)
    assert (report.num_rows, report.num_checked, [list(found.rows) for found in report.findings]) == (None, 10, [[1]])


def test_a_row_that_cannot_be_read_is_named():
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5:
                raise KeyError("no such\x1b[31m file")
            return tokens()[index]

    [found] = check_dataset(plain(Broken())).findings
    assert (found.rule, found.rows) == ("collation", (5,))
    assert "KeyError" in found.why
    assert "\x1b" not in found.why


class Counting:
    """A collator of the user's that draws random numbers, counts its calls and changes what it is given."""

    def __init__(self):
        self.calls = 0

    def __call__(self, examples):
        self.calls += 1
        torch.rand(3), random.random()
        batch = default_data_collator(examples)
        examples[0]["labels"] = None
        return batch


def test_nothing_of_the_trainer_changes():
    collator, rows = Counting(), tokens()
    trainer = plain(rows, data_collator=collator)
    before, attributes = RngState.capture(), dict(vars(trainer))
    assert check_dataset(trainer).is_sound
    assert RngState.capture() == before
    assert vars(trainer) == attributes
    assert collator.calls == 0
    assert rows == tokens()


def test_only_what_leaves_no_trace_is_repeatable(tmp_path):
    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return 8

    data = Dataset.from_list(tokens())
    assert is_repeatable(plain(data))
    assert is_repeatable(plain(tokens()))
    assert is_repeatable(build("sft", tmp_path, guard=True))
    assert is_repeatable(build("grpo", tmp_path, guard=True))
    assert not is_repeatable(plain(Own()))
    assert not is_repeatable(plain(data.with_transform(lambda batch: batch)))
    assert not is_repeatable(plain(data, data_collator=lambda examples: default_data_collator(examples)))
    assert not is_repeatable(plain(data, data_collator=Counting()))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(({}, 10), "dict"), ((None, 0), "sample"), ((None, True), "sample"), ((None, "all"), "sample")],
    ids=str,
)
def test_bad_arguments(arguments, told):
    trainer, sample = arguments
    with pytest.raises(ArgumentError, match=told):
        check_dataset(plain(tokens()) if trainer is None else trainer, sample)


def test_a_trainer_without_data():
    with pytest.raises(ArgumentError, match="train_dataset"):
        check_dataset(plain(None))


def test_texts_of_a_pair_that_differ_by_the_stop_token_only_are_not_the_same():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # then the padding of one is what the other ends with
    stop = tokenizer.eos_token_id
    config = tiny_llama().config
    config.num_labels, config.pad_token_id = 1, stop
    rows = Dataset.from_list([{"chosen_ids": [5, 6, 7 + i, stop], "rejected_ids": [5, 6, 7 + i]} for i in range(8)])
    args = trl.RewardConfig("unused", use_cpu=True, bf16=False, report_to=[])
    model = LlamaForSequenceClassification(config)
    trainer = trl.RewardTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
    assert "pairs" in check_dataset(trainer).examination.sound
