"""A tiny vision-language model, its processor and its data, all made in code and without an image library."""

import random
from typing import Any

import torch
from datasets import Dataset
from transformers import BatchFeature, ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .architectures import VOCAB
from .models import tiny_tokenizer

IMAGE = "w56"  # the last word, which is the image token of the tiny LLaVA
NUM_PATCHES = 4  # of 8 x 8 in an image of 16 x 16
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% for part in m['content'] %}"
    "{{ 'w56' if part['type'] == 'image' else part['text'] }} {% endfor %}{{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


class TinyProcessor(ProcessorMixin):
    """Texts with images to model inputs. An image is a nested list of 3 x 16 x 16 numbers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None, chat_template: str | None = None):
        super().__init__(tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, padding=False, return_tensors=None, **kwargs: Any) -> BatchFeature:
        texts = [one.replace(IMAGE, " ".join([IMAGE] * NUM_PATCHES)) for one in text]
        data = dict(self.tokenizer(texts, padding=padding, padding_side="left", return_token_type_ids=False))
        flat = [image for group in images or () for image in group or ()]
        if flat:
            data["pixel_values"] = torch.tensor(flat)
        return BatchFeature(data, tensor_type=return_tensors)

    def apply_chat_template(self, conversation, chat_template=None, tokenize=False, return_dict=False, **kwargs: Any):
        texts = self.tokenizer.apply_chat_template(
            conversation, chat_template=chat_template or TEMPLATE, tokenize=False, **kwargs
        )
        if not tokenize:
            return texts
        images = [
            [part["image"] for message in talk for part in message["content"] if part["type"] == "image"]
            for talk in conversation
        ]
        return self(images=images, text=texts)


def tiny_processor() -> TinyProcessor:
    """The processor of the tiny LLaVA."""
    tokenizer = tiny_tokenizer()
    assert tokenizer.convert_tokens_to_ids(IMAGE) == VOCAB - 1
    return TinyProcessor(tokenizer, chat_template=TEMPLATE)


def image_rows(num_rows: int, seed: int = 0) -> Dataset:
    """Questions about an image each; the first pixel tells the row."""
    rng = random.Random(seed)
    rows = []
    for row in range(num_rows):
        image = [[[rng.gauss(0, 1) for _ in range(16)] for _ in range(16)] for _ in range(3)]
        image[0][0][0] = float(row)
        question = [{"role": "user", "content": f"w{rng.randrange(40)} w{rng.randrange(40)}"}]
        rows.append({"prompt": question, "images": [image]})
    return Dataset.from_list(rows)
