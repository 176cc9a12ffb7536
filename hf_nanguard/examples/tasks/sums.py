"""Sums to be learned, with everything made in code: a small Llama, a tokenizer of bytes, data, a reward.

"3+4=" is to be answered by "7". A minute on a CPU is enough to see it learned, from examples or from rewards alone, and
whether an answer is right can be checked, so it stands in for the tasks that people train on.
"""

import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ...errors import ArgumentError

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
MASKED = -100
FORMS = ("plain", "conversational")
NEAR = 0.5


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes, which knows any text, with a chat template."""
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES])  # not special, so an answer shows them
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(seed: int = 0, hidden_size: int = 32, num_layers: int = 2) -> LlamaForCausalLM:
    """Returns a Llama of about 40,000 parameters that knows nothing yet.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Of its weights.
        hidden_size (`int`, *optional*, defaults to `32`), num_layers (`int`, *optional*, defaults to `2`):
            Its size.
    """
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        pad_token_id=VOCABULARY.index(PAD), bos_token_id=None, eos_token_id=VOCABULARY.index(EOS),
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def build_beginner(seed: int = 0, form: str = "plain", num_steps: int = 20) -> LlamaForCausalLM:
    """Returns a model that has seen a few examples, so that it is right now and then: what learning from rewards begins with.

    One that knows nothing would have to hit a digit among all bytes, and then the end, by chance.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Of its weights and its examples.
        form (`str`, *optional*, defaults to `"plain"`):
            How it is asked, as in [`build_prompts`].
        num_steps (`int`, *optional*, defaults to `20`):
            How many batches of 32 examples it has seen.
    """
    model, tokenizer = build_model(seed), build_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for batch in build_prompts(32 * num_steps, seed, form=form).iter(32):
        questions = [show_prompt(tokenizer, prompt) for prompt in batch["prompt"]]
        texts = [f"{question}{answer}{EOS}" for question, answer in zip(questions, batch["answer"], strict=True)]
        ids = tokenizer(texts, return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, :-2] = MASKED  # an answer is a digit and the end
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def draw_sums(num_rows: int, seed: int = 0, largest: int = 9) -> list[tuple[int, int]]:
    """Returns pairs of numbers from 0 that sum up to at most `largest`, drawn with repetition."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1 - a)]
    return [draw.choice(pairs) for _ in range(num_rows)]


def build_prompts(num_rows: int, seed: int = 0, largest: int = 9, form: str = "plain") -> Dataset:
    """Returns questions with their `answer`, for a trainer that rewards what a model says.

    Args:
        num_rows (`int`):
            How many.
        seed (`int`, *optional*, defaults to `0`):
            Of the draw.
        largest (`int`, *optional*, defaults to `9`):
            The largest sum.
        form (`str`, *optional*, defaults to `"plain"`):
            `"plain"` texts, or `"conversational"` messages.

    Returns:
        `Dataset`: with the columns `prompt` and `answer`.
    """
    return _build(num_rows, seed, largest, form, lambda answer: {"answer": answer})


def build_examples(num_rows: int, seed: int = 0, largest: int = 9, form: str = "plain") -> Dataset:
    """Returns questions with their answers as `prompt` and `completion`, for supervised training; else as
    [`build_prompts`]."""

    def add(answer: str) -> dict[str, Any]:
        return {"completion": answer if form == "plain" else [{"role": "assistant", "content": answer}]}

    return _build(num_rows, seed, largest, form, add)


def _build(num_rows: int, seed: int, largest: int, form: str, add: Any) -> Dataset:
    if form not in FORMS:
        raise ArgumentError(f"form must be one of {', '.join(FORMS)}, got {form!r}. Use 'plain' for texts.")
    rows = []
    for a, b in draw_sums(num_rows, seed, largest):
        text = f"{a}+{b}="
        rows.append({"prompt": text if form == "plain" else [{"role": "user", "content": text}], **add(str(a + b))})
    return Dataset.from_list(rows)


def read_answer(completion: Any) -> str:
    """Returns what a completion says, in either form."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return text.strip()


def reward_sum(completions: list, completion_ids: list[list[int]], answer: list[str], **kwargs: Any) -> list[float]:
    """1 for the right answer and nothing after it; less for another number, the further it is off; 0 for what is none.

    Near misses are told apart because a model that knows nothing is hardly ever right, and a group of zeros teaches nothing.
    """
    ended = [VOCABULARY.index(EOS) in ids for ids in completion_ids]
    told = map(read_answer, completions)
    return [grade(said, right, end) for said, right, end in zip(told, answer, ended, strict=True)]


def grade(said: str, right: str, ended: bool) -> float:
    """Returns the reward of one answer."""
    if not said.isdecimal():
        return 0.0
    off = abs(int(said) - int(right))
    return 1.0 if said == right and ended else NEAR / (1 + off)


def show_prompt(tokenizer: PreTrainedTokenizerFast, prompt: Any) -> str:
    """Returns a question in either form as the text that a model goes on from."""
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


@torch.no_grad()
def ask(model: Any, tokenizer: PreTrainedTokenizerFast, rows: Dataset) -> list[str]:
    """Returns what a model answers, by itself and greedily, to questions as [`build_prompts`] gives them."""
    prompts = [show_prompt(tokenizer, prompt) for prompt in rows["prompt"]]
    inputs = tokenizer(
        prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False
    ).to(model.device)  # fmt: skip
    training = model.training
    model.eval()
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=4, pad_token_id=tokenizer.pad_token_id)
    model.train(training)
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def measure_accuracy(model: Any, tokenizer: PreTrainedTokenizerFast, rows: Dataset) -> float:
    """Returns the share of questions that a model answers rightly by itself."""
    said = ask(model, tokenizer, rows)
    return sum(text == right for text, right in zip(said, rows["answer"], strict=True)) / len(said)
