"""A task with pictures, all in code: a small LLaVA, its processor, data and a reward.

The question is whether a picture is bright or dark. A picture is a nested list of 3 x 16 x 16 numbers, so no image library
is needed.
"""

import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BatchFeature,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

SIZE, PATCH = 16, 8
NUM_PATCHES = (SIZE // PATCH) ** 2
PAD, EOS, UNKNOWN, IMAGE = "<pad>", "<eos>", "<unk>", "<image>"
ANSWERS = ("dark", "bright")
WORDS = (PAD, EOS, UNKNOWN, "system", "user", "assistant", "is", "it", "or", "?", *ANSWERS, IMAGE)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{{ image_token if part['type'] == 'image' else part['text'] }} {% endfor %}{{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


class PictureProcessor(ProcessorMixin):
    """Converts texts with pictures to model inputs: the placeholder of a picture is repeated for each of its patches."""

    def __init__(self, tokenizer=None, chat_template: str | None = None, image_token: str = IMAGE):
        super().__init__(tokenizer, chat_template=chat_template)
        self.image_token = image_token

    def __call__(self, images=None, text=None, padding=False, return_tensors=None, **kwargs: object) -> BatchFeature:
        texts = [one.replace(self.image_token, " ".join([self.image_token] * NUM_PATCHES)) for one in text]
        data = dict(self.tokenizer(texts, padding=padding, padding_side="left", return_token_type_ids=False))
        flat = [image for group in images or () for image in group or ()]
        if flat:
            data["pixel_values"] = torch.tensor(flat)
        return BatchFeature(data, tensor_type=return_tensors)

    def apply_chat_template(  # type: ignore[override] # only what an online trainer uses
        self, conversation, chat_template=None, tokenize=False, return_dict=False, **kwargs
    ):
        """Returns conversations as texts, or as model inputs with their pictures."""
        texts = self.tokenizer.apply_chat_template(
            conversation, chat_template=chat_template or CHAT_TEMPLATE, tokenize=False, image_token=self.image_token, **kwargs
        )  # fmt: skip
        if not tokenize:
            return texts
        images = [
            [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
            for messages in conversation
        ]
        return self(images=images, text=texts)


def build_processor() -> PictureProcessor:
    """Returns the processor of the small LLaVA."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
    fast.chat_template = CHAT_TEMPLATE
    return PictureProcessor(fast, chat_template=CHAT_TEMPLATE)


def build_model(seed: int = 0) -> LlavaForConditionalGeneration:
    """Returns an untrained LLaVA with some ten thousand parameters."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = LlamaConfig(
        **sizes, vocab_size=len(WORDS), num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=WORDS.index(PAD), bos_token_id=None, eos_token_id=WORDS.index(EOS),
    )  # fmt: skip
    config = LlavaConfig(
        image_token_index=WORDS.index(IMAGE), vision_config=CLIPVisionConfig(**sizes, image_size=SIZE, patch_size=PATCH), text_config=text,
        vision_feature_select_strategy="default", vision_feature_layer=-1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(config)


def build_rows(num_rows: int, seed: int = 0) -> Dataset:
    """Returns questions about one picture each, with their `answer`."""
    draw = random.Random(seed)
    question = [{"role": "user", "content": "is it bright or dark ?"}]
    rows = []
    for _ in range(num_rows):
        bright = draw.randrange(2)
        mean = 1.0 if bright else -1.0
        picture = [[[draw.gauss(mean, 0.5) for _ in range(SIZE)] for _ in range(SIZE)] for _ in range(3)]
        rows.append({"prompt": question, "images": [picture], "answer": ANSWERS[bright]})
    return Dataset.from_list(rows)


def reward_answer(completions: list, answer: list[str], **kwargs: object) -> list[float | None]:
    """Reward 1 for the right word alone, 0.5 for the right word first, 0.1 for the other of the two words, else 0."""
    answers = [completion[-1]["content"].split() for completion in completions]
    return [_grade(words, right) for words, right in zip(answers, answer, strict=True)]


def _grade(words: list[str], right: str) -> float:
    if words == [right]:
        return 1.0
    return 0.5 if words[:1] == [right] else 0.1 if words[:1] and words[0] in ANSWERS else 0.0
