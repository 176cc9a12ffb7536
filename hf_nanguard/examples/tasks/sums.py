"""The built-in task, sums, all in code: a small Llama, a byte tokenizer, data and a reward.

The answer to "3+4=" is "7". A model learns it within a minute on a CPU, from examples or from rewards alone, and answers
can be checked.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Trainer

from ...errors import ArgumentError
from .small_llama import build_llama, train_briefly

PAD, EOS = "<pad>", "<eos>"
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
VOCABULARY = (PAD, EOS, *ROLES, *sorted(pre_tokenizers.ByteLevel.alphabet()))
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORMS = ("plain", "conversational")
NEAR = 0.5
NUM_ASKED = 200

Text = str | list[dict[str, str]]  # plain, or messages of a conversation


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte tokenizer, which can encode any text, with a chat template."""
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])  # not special: decoding keeps them
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(seed: int = 0, dropout: float = 0.0) -> LlamaForCausalLM:
    """Returns an untrained Llama of about 40,000 parameters."""
    return build_llama(build_tokenizer(), seed, 32, dropout)


def build_beginner(seed: int = 0, form: str = "plain", num_steps: int = 20) -> LlamaForCausalLM:
    """Returns a model trained on a few examples, so that some of its answers are right: a start for training with rewards.

    An untrained model would have to sample a digit among all bytes, and then the end, by chance. `num_steps` counts batches
    of 32 examples; `form` is that of [`build_prompts`].
    """
    model, tokenizer = build_model(seed), build_tokenizer()
    rows = build_prompts(32 * num_steps, seed, form)
    texts = [f"{format_prompt(tokenizer, row['prompt'])}{row['answer']}{EOS}" for row in rows]
    train_briefly(model, tokenizer, texts, num_steps, num_learned=2)  # an answer is a digit and the end token
    return model


def build_prompts(num_rows: int, seed: int = 0, form: str = "plain") -> Dataset:
    """Returns questions, drawn with repetition, in the columns `prompt` and `answer`, for training with rewards.

    Sums are at most 9, a single digit. A prompt is a text if `form` is `"plain"`, and messages if it is `"conversational"`.
    """
    if form not in FORMS:
        raise ArgumentError(f"form must be one of {', '.join(FORMS)}, got {form!r}. Use 'plain' for texts.")
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(10) for b in range(10 - a)]
    drawn = [draw.choice(pairs) for _ in range(num_rows)]
    return Dataset.from_list([{"prompt": _write("user", f"{a}+{b}=", form), "answer": str(a + b)} for a, b in drawn])


def build_examples(num_rows: int, seed: int = 0, form: str = "plain") -> Dataset:
    """Returns questions and answers as `prompt` and `completion`, for supervised training; else as [`build_prompts`]."""
    rows = build_prompts(num_rows, seed, form)
    completions = [_write("assistant", answer, form) for answer in rows["answer"]]
    return rows.remove_columns("answer").add_column("completion", completions)


def _write(role: str, text: str, form: str) -> Text:
    return text if form == "plain" else [{"role": role, "content": text}]


def read_answer(completion: Text) -> str:
    """Returns the text of a completion in either form."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return text.strip()


def reward_sum(
    completions: list, completion_ids: list[list[int]], answer: list[str], **kwargs: object
) -> list[float | None]:
    """Reward 1 for the right answer followed by the end token, less for other numbers by their distance, 0 for no number.

    Near misses get a reward because an untrained model is rarely right, and a group of zeros has no gradient.
    """
    ended = [VOCABULARY.index(EOS) in ids for ids in completion_ids]
    return [grade(*graded) for graded in zip(map(read_answer, completions), answer, ended, strict=True)]


def grade(said: str, right: str, ended: bool) -> float:
    """Returns the reward of one answer."""
    if not said.isdecimal():
        return 0.0
    off = abs(int(said) - int(right))
    return 1.0 if said == right and ended else NEAR / (1 + off)


def find_form(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Returns the form of prompts: conversational if the tokenizer has a chat template."""
    return "conversational" if tokenizer is not None and tokenizer.chat_template else "plain"


def format_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Text) -> str:
    """Returns a prompt in either form as text."""
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


@torch.no_grad()
def ask(model: Any, tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> list[str]:
    """Returns a model's greedy answers to questions of [`build_prompts`]."""
    prompts = [format_prompt(tokenizer, prompt) for prompt in rows["prompt"]]
    inputs = tokenizer(
        prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    ).to(model.device)  # fmt: skip
    training = model.training
    model.eval()
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=4, pad_token_id=tokenizer.pad_token_id)
    model.train(training)
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def measure_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> float:
    """Returns the share of questions that a model answers correctly."""
    answers = ask(model, tokenizer, rows)
    return sum(answer == right for answer, right in zip(answers, rows["answer"], strict=True)) / len(answers)


def measure(trainer: Trainer) -> dict[str, float | str]:
    """Returns the share of new sums that a trainer's model answers correctly, and the share answered by a number at all."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return {"accuracy": "not measured because the model is sharded"}
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    rows = build_prompts(NUM_ASKED, trainer.args.seed + 1, form=find_form(tokenizer))
    answers = ask(model, tokenizer, rows)
    num_right = sum(answer == right for answer, right in zip(answers, rows["answer"], strict=True))
    num_numbers = sum(answer.isdecimal() for answer in answers)
    return {"accuracy": num_right / NUM_ASKED, "answer rate": num_numbers / NUM_ASKED}


def build_reward(tokenizer: PreTrainedTokenizerBase) -> Callable[..., list[float]]:
    """Returns the reward for a model that may answer in a sentence: its last number counts."""

    def reward_last_number(
        completions: list, completion_ids: list[list[int]], answer: list[str], **kwargs: object
    ) -> list[float]:
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        numbers = [(re.findall(r"\d+", read_answer(said)) or [""])[-1] for said in completions]
        return [grade(*graded) for graded in zip(numbers, answer, ended, strict=True)]

    return reward_last_number
