"""The embedded task: its parts are what they say, and it is learned in little time."""

import pytest
import torch
import trl

from hf_nanguard import ArgumentError, guarded
from hf_nanguard.examples.tasks import sums as arithmetic

from ...trainers import common_arguments


@pytest.mark.parametrize("text", ["3+4=", "12+30=42", "<user>1+2=<eos><assistant>", "wie heißt 七\n\t 😀?"])
def test_the_tokenizer_gives_back_what_it_was_given(text):
    tokenizer = arithmetic.build_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(arithmetic.VOCABULARY) == len(tokenizer) == arithmetic.build_model().config.vocab_size


def test_the_chat_template_opens_the_answer_and_marks_it():
    tokenizer = arithmetic.build_tokenizer()
    question = [{"role": "user", "content": "1+2="}]
    opened = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*question, {"role": "assistant", "content": "3"}], tokenize=False)
    assert opened == "<user>1+2=<eos><assistant>"
    assert whole == opened + "3<eos>"


def test_the_same_seed_is_the_same_task():
    assert arithmetic.build_prompts(20, seed=3).to_list() == arithmetic.build_prompts(20, seed=3).to_list()
    assert arithmetic.build_prompts(20, seed=3).to_list() != arithmetic.build_prompts(20, seed=4).to_list()
    state = torch.get_rng_state()
    one, other = arithmetic.build_model(1), arithmetic.build_model(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_answers_are_right():
    for row in arithmetic.build_prompts(200):
        a, b = map(int, row["prompt"].removesuffix("=").split("+"))
        assert a + b == int(row["answer"]) <= 9


def test_both_forms_ask_the_same():
    plain = arithmetic.build_examples(10)
    talk = arithmetic.build_examples(10, form="conversational")
    assert [row["prompt"][0]["content"] for row in talk] == plain["prompt"]
    assert [row["completion"][0]["content"] for row in talk] == plain["completion"]
    assert plain["completion"] == arithmetic.build_prompts(10)["answer"]
    with pytest.raises(ArgumentError, match="form"):
        arithmetic.build_prompts(1, form="chat")


def test_the_reward_ranks_answers():
    tokenizer = arithmetic.build_tokenizer()
    said = ["7<eos>", "7", "8<eos>", "2<eos>", "7=<eos>", "<eos>"]
    ids = [tokenizer(text)["input_ids"] for text in said]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = arithmetic.reward_sum(texts, ids, ["7"] * len(said))
    assert rewards[0] == 1.0
    assert rewards[4:] == [0.0, 0.0]
    assert rewards[0] > rewards[1] > rewards[2] > rewards[3] > 0.0
    talk = [[{"role": "assistant", "content": text}] for text in texts]
    assert arithmetic.reward_sum(talk, ids, ["7"] * len(said)) == rewards


@pytest.mark.parametrize("form", ["plain", pytest.param("conversational", marks=pytest.mark.slow)])
def test_supervised_training_learns_it(form, tmp_path):
    arguments = common_arguments(
        tmp_path, max_steps=120, learning_rate=5e-3, per_device_train_batch_size=32, gradient_accumulation_steps=1,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0,
    )  # fmt: skip
    trainer = guarded(trl.SFTTrainer)(
        arithmetic.build_model(), args=trl.SFTConfig(**arguments, max_length=32),
        train_dataset=arithmetic.build_examples(1024, form=form), processing_class=arithmetic.build_tokenizer(),
    )  # fmt: skip
    asked = arithmetic.build_prompts(100, seed=1, form=form)
    assert arithmetic.measure_accuracy(trainer.model, trainer.processing_class, asked) < 0.1
    trainer.train()
    assert arithmetic.measure_accuracy(trainer.model, trainer.processing_class, asked) > 0.5


@pytest.mark.parametrize("form", ["plain", "conversational"])
def test_a_beginner_answers_and_ends_and_is_seldom_right(form):
    tokenizer, asked = arithmetic.build_tokenizer(), arithmetic.build_prompts(100, seed=1, form=form)
    state = torch.get_rng_state()
    beginner = arithmetic.build_beginner(3, form)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(said.isdecimal() for said in arithmetic.ask(beginner, tokenizer, asked)) > 90
    assert arithmetic.measure_accuracy(beginner, tokenizer, asked) < 0.4
    assert not any(said.isdecimal() for said in arithmetic.ask(arithmetic.build_model(3), tokenizer, asked))
