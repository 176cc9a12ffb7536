"""Sound set-ups of many kinds, all made in code: no law may be broken on them, beyond a note."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer, TrainingArguments

from ...architectures import BY_NAME
from ...models import VOCAB, tiny_tokenizer
from ...trainers import common_arguments

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
           "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "output_router_logits": True}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "mamba": ("Mamba", {"state_size": 4}),
    "mamba2": ("Mamba2", {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 4, "chunk_size": 8}),
    "qwen3_next": (
        "Qwen3Next",
        {"head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2,
         "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
}  # fmt: skip


def build_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    """Returns a tiny causal language model of a family."""
    torch.manual_seed(seed)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1,
                                         eos_token_id=2, **more)  # fmt: skip
        return transformers.GPT2LMHeadModel(config).to(dtype)
    name, settings = FAMILIES[family]
    text = "Gemma3TextConfig" if family == "gemma3" else f"{name}Config"
    config = getattr(transformers, text)(**{**DECODER, **settings, **more})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def add_adapter(model: Any, **more: Any) -> Any:
    """Returns the model with a LoRA."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.1}
    return get_peft_model(model, LoraConfig(**{**settings, **more}))


def text_rows(num_rows: int = 24, seed: int = 0) -> Dataset:
    """Texts of 3 to 10 words."""
    rng = random.Random(seed)
    return Dataset.from_list(
        [{"text": " ".join(f"w{rng.randrange(40)}" for _ in range(rng.randrange(3, 11)))} for _ in range(num_rows)]
    )


def answer_rows(num_rows: int = 24, conversational: bool = False) -> Dataset:
    """Prompts and completions."""
    rng = random.Random(1)
    rows = []
    for _ in range(num_rows):
        texts = [" ".join(f"w{rng.randrange(40)}" for _ in range(rng.randrange(3, 8))) for _ in range(2)]
        prompt, completion = f"{texts[0]} ", texts[1]
        rows.append(
            {
                "prompt": [{"role": "user", "content": texts[0]}],
                "completion": [{"role": "assistant", "content": texts[1]}],
            }
            if conversational
            else {"prompt": prompt, "completion": completion}
        )
    return Dataset.from_list(rows)


def build_sft(folder: Path, model: Any, dataset: Dataset | None = None, trainer_class: Any = None, collator: Any = None,
              tokenizer: Any = None, **arguments: Any) -> Any:  # fmt: skip
    """Returns an SFT trainer of TRL."""
    import trl

    args = trl.SFTConfig(**{"max_length": 32, **common_arguments(folder), **arguments})
    more = {} if collator is None else {"data_collator": collator}
    return (trainer_class or trl.SFTTrainer)(
        model, args=args, train_dataset=text_rows() if dataset is None else dataset,
        processing_class=tokenizer or tiny_tokenizer(), **more,
    )  # fmt: skip


def token_rows(num_rows: int = 24, seed: int = 0) -> list[dict]:
    """Rows of tokens of different lengths that end with the end token."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        ids = [rng.randrange(7, VOCAB) for _ in range(rng.randrange(4, 11))] + [2]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": list(ids)})
    return rows


def build_plain(folder: Path, model: Any, rows: Any = None, collator: Any = None, trainer_class: Any = Trainer,
                extra: dict | None = None, **arguments: Any) -> Any:  # fmt: skip
    """Returns a plain Trainer with a collator that pads."""
    tokenizer = tiny_tokenizer()
    collator = collator or DataCollatorForSeq2Seq(tokenizer, padding=True)
    rows = token_rows() if rows is None else rows
    rows = Dataset.from_list(rows) if isinstance(rows, list) else rows
    args = TrainingArguments(**{**common_arguments(folder), **arguments})
    return trainer_class(
        model, args, train_dataset=rows, data_collator=collator, processing_class=tokenizer, **(extra or {})
    )


def build_classifier(folder: Path, **arguments: Any) -> Any:
    """Returns a BERT that sorts texts into two classes."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SIZES, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0, num_labels=2
    )
    rows = [{**row, "labels": i % 2} for i, row in enumerate(token_rows())]
    return build_plain(folder, transformers.BertForSequenceClassification(config), rows,
                       DataCollatorWithPadding(tiny_tokenizer()), **arguments)  # fmt: skip


def build_encoder(folder: Path) -> Any:
    """Returns a BERT whose tokens see each other in both directions, with a loss of the user's."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0)
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in token_rows()]

    class Embedding(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).last_hidden_state[:, 0].square().mean()

    return build_plain(folder, transformers.BertModel(config), rows, DataCollatorWithPadding(tiny_tokenizer()), Embedding,
                       gradient_accumulation_steps=1)  # fmt: skip


def build_translator(folder: Path, **arguments: Any) -> Any:
    """Returns a T5 with inputs and outputs of different lengths."""
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                                   decoder_start_token_id=0)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    rows = [{**a, "labels": b["input_ids"]} for a, b in zip(token_rows(), token_rows(seed=9), strict=True)]
    return build_plain(folder, model, rows, DataCollatorForSeq2Seq(tiny_tokenizer(), model), **arguments)


def build_masked(folder: Path) -> Any:
    """Returns a BERT that learns masked tokens, which its collator draws anew for each batch."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0)
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "<unk>"
    rows = [{"input_ids": row["input_ids"]} for row in token_rows()]
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    return build_plain(
        folder, transformers.BertForMaskedLM(config), rows, collator, save_strategy="steps", save_steps=1
    )


def build_pictures(folder: Path, name: str) -> Any:
    """Returns a classifier of pictures whose checkpoints are saved and loaded."""
    torch.manual_seed(0)
    small = {"ResNet": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"},
             "ViT": {**SIZES, "image_size": 16, "patch_size": 8}}[name]  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**small, num_labels=2)
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 2} for i in range(12)]
    args = TrainingArguments(
        **common_arguments(folder, gradient_accumulation_steps=1, save_strategy="steps", save_steps=1)
    )
    return Trainer(getattr(transformers, f"{name}ForImageClassification")(config), args, train_dataset=rows)


def build_prompt_tuning(folder: Path) -> Any:
    """Returns a trainer of virtual tokens before the prompt."""
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(build_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    return build_plain(folder, model, label_names=["labels"])


def turns() -> Dataset:
    """Conversations of several turns, each as long as a packed row."""
    rng = random.Random(2)
    say = lambda: " ".join(f"w{rng.randrange(40)}" for _ in range(3))  # noqa: E731
    roles = ("user", "assistant") * 2
    return Dataset.from_list([{"messages": [{"role": role, "content": say()} for role in roles]} for _ in range(24)])


def build_resized(folder: Path) -> Any:
    """Returns a trainer of a model from a checkpoint, whose embedding has got rows."""
    build_model("llama").save_pretrained(folder / "base")
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "base")
    model.resize_token_embeddings(VOCAB + 3)
    return build_plain(folder, model)


def build_distillation(folder: Path) -> Any:
    """Returns TRL's trainer of a student that learns from a teacher on its own completions."""
    import trl

    args = trl.DistillationConfig(**{**common_arguments(folder), "max_completion_length": 4})
    prompts = Dataset.from_list([{"prompt": text} for text in text_rows()["text"]])
    return trl.DistillationTrainer(
        build_model("llama"), teacher_model=build_model("llama", seed=1), args=args, train_dataset=prompts, processing_class=tiny_tokenizer(),
    )  # fmt: skip


def build_stacked(folder: Path, name: str) -> Any:
    """Returns a Trainer of an architecture whose rows have one shape: pictures, sounds, pictures with text."""
    architecture = BY_NAME[name]
    inputs = architecture.inputs()
    rows = [{field: values[i % 3] for field, values in inputs.items()} for i in range(9)]
    args = TrainingArguments(**common_arguments(folder, gradient_accumulation_steps=1))
    return Trainer(architecture.build(), args, train_dataset=rows)


def build_rewarder(folder: Path, equal: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a trainer of a reward model, which gives one score to each text; the two texts of a pair may be equal."""
    import trl

    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**DECODER, num_labels=1)).to(dtype)
    texts = text_rows(48)["text"]
    rows = Dataset.from_list(
        [{"chosen": a, "rejected": a if equal else b} for a, b in zip(texts[::2], texts[1::2], strict=True)]
    )
    args = trl.RewardConfig(**{**common_arguments(folder), "max_length": 24})
    return trl.RewardTrainer(model, args=args, train_dataset=rows, processing_class=tiny_tokenizer())


VISION_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% for part in m['content'] %}{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} "
    "{% endif %}{% endfor %}{{ eos_token }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def build_vision_sft(folder: Path, **arguments: Any) -> Any:
    """Returns TRL's SFT trainer of a LLaVA with its real processor and pictures of Pillow."""
    import numpy as np
    import trl
    from PIL import Image
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer, square = tiny_tokenizer(), {"height": 16, "width": 16}
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = VISION_TEMPLATE
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(size=square, crop_size=square), tokenizer, patch_size=8, vision_feature_select_strategy="default",
        image_token="<image>", chat_template=VISION_TEMPLATE, num_additional_image_tokens=1,
    )  # fmt: skip
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8, projection_dim=16)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**{**DECODER, "vocab_size": VOCAB + 1}), vision_config=vision, image_token_id=VOCAB,
        vision_feature_layer=-1,
    )  # fmt: skip
    pixels, rows = np.random.default_rng(0), []
    for row in answer_rows(12, conversational=True):
        picture = Image.fromarray((pixels.random((16, 16, 3)) * 255).astype("uint8"))
        rows.append({"messages": [*row["prompt"], *row["completion"]], "images": [picture]})
    args = trl.SFTConfig(**{**common_arguments(folder), "max_length": None, **arguments})
    model = transformers.LlavaForConditionalGeneration(config)
    return trl.SFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=processor)


def build_choice(folder: Path) -> Any:
    """Returns a BERT that chooses one of two texts, whose rows have a list of tokens for each."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0)
    names = ("input_ids", "attention_mask")
    rows = [
        {**{n: [a[n], b[n]] for n in names}, "labels": i % 2}
        for i, (a, b) in enumerate(zip(token_rows(), token_rows(seed=3), strict=True))
    ]
    collator = transformers.DataCollatorForMultipleChoice(tiny_tokenizer())
    return build_plain(
        folder, transformers.BertForMultipleChoice(config), rows, collator, gradient_accumulation_steps=1
    )


def build_left_padded(folder: Path) -> Any:
    """Returns a GPT-2 padded on the left, whose positions are counted from its tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    pad = DataCollatorForSeq2Seq(tokenizer, padding=True)

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = pad(rows)
        return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}

    return build_plain(folder, build_model("gpt2"), collator=collate)
