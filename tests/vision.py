"""The processor of the tiny LLaVA and its data, all made in code and without an image library."""

import random

from datasets import Dataset

from hf_nanguard.examples.tasks.pictures import CHAT_TEMPLATE, PictureProcessor

from .architectures import VOCAB
from .models import tiny_tokenizer

IMAGE = "w56"  # the last word, which is the image token of the tiny LLaVA


def tiny_processor() -> PictureProcessor:
    """The processor of the tiny LLaVA."""
    tokenizer = tiny_tokenizer()
    assert tokenizer.convert_tokens_to_ids(IMAGE) == VOCAB - 1
    return PictureProcessor(tokenizer, chat_template=CHAT_TEMPLATE, image_token=IMAGE)


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
