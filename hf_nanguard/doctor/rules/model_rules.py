"""Rules about how model, adapter, tokenizer and collator fit together."""

from .finding import Finding, Rule, error, note, warning
from .run_facts import Facts

LEARNED_POSITIONS = (
    "gpt2",
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "opt",
    "gpt_neo",
    "bart",
    "mbart",
    "biogpt",
    "xglm",
)
HIGHEST_SCALE = 64  # a rank of 1 with the usual alpha of 32 is in use
FUSED_HEAD = ("sft", "dpo", "kto", "grpo", "rloo")  # TRL's trainers that use the weight of the head without calling it


def check_trainable(facts: Facts) -> Finding | None:
    """Something must be trainable."""
    if facts.trainable:
        return None
    what = f"None of the {facts.parameters or 0:,} parameters is trainable."
    why = "The loss has no gradient, so the run fails in its first backward pass or changes nothing."
    change = "Check target_modules of the adapter, is_trainable=True of a loaded adapter, and what was frozen with requires_grad_(False)."
    return error(what, why, change)


def check_head_adapter(facts: Facts) -> Finding | None:
    """TRL uses the head's weight without calling the module, so an adapter on it gets no gradient."""
    if not facts.has_output_head_adapter or facts.task not in FUSED_HEAD:
        return None
    why = "TRL multiplies by lm_head.weight and never calls the module, so an adapter on it gets no gradient."
    return error(
        "The adapter's target modules contain lm_head.",
        why,
        "Remove lm_head from target_modules, or train it whole with modules_to_save.",
    )


def check_quantized(facts: Facts) -> Finding | None:
    """Quantized weights cannot be trained; an adapter beside them can."""
    if not facts.quantization_bits or facts.is_adapter:
        return None
    what = f"The weights are quantized to {facts.quantization_bits} bits, and there is no adapter."
    why = "Quantized weights get no gradient: the Trainer refuses to start, or nothing is learned."
    return error(what, why, "Train an adapter (use_peft: true), or load the model without quantization.")


def check_adapter_targets(facts: Facts) -> Finding | None:
    """Every module that the adapter names must be in the model."""
    missing = facts.missing_targets
    if not missing:
        return None
    what = f"The adapter's config names {', '.join(missing)}, and nothing in the model is called that."
    why = "PEFT leaves such names out without a word as long as another one fits, so the layers that were meant stay frozen."
    change = (
        "Correct target_modules or modules_to_save. Experts that are kept in one tensor need target_parameters, "
        'e.g. ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].'
    )
    return warning(what, why, change)


def check_adapter_scale(facts: Facts) -> Finding | None:
    """The output of an adapter must count, and not drown the model's own."""
    scale = facts.adapter_scale
    if 0 < scale <= HIGHEST_SCALE:
        return None
    what = (
        f"The output of the adapter is multiplied by {scale:.4g} (lora_alpha / lora_r, or / sqrt(lora_r) with rslora)."
    )
    if scale <= 0:
        why = (
            "It then adds nothing and gets no gradient."
            if scale == 0
            else "The sign of everything it learns is turned around."
        )
        return error(what, why, "Set lora_alpha to lora_r or twice of it.")
    why = f"Usual are 1 to 4. A step of the adapter changes the model {scale / 2:.0f} times as much as with twice the rank."
    return warning(what, why, "Set lora_alpha to lora_r or twice of it, or lower learning_rate by as much.")


def check_label_names(facts: Facts) -> Finding | None:
    """Without label names the Trainer finds no labels of a PEFT model and computes no evaluation loss."""
    if not facts.is_adapter or facts.label_names or facts.task != "trainer":
        return None
    why = "The Trainer finds them by the arguments of forward, which a PEFT model hides: it evaluates without a loss."
    return warning("The Trainer knows no label_names for this PEFT model.", why, "Set label_names: [labels].")


def check_pad_is_eos(facts: Facts) -> Finding | None:
    """A collator that masks pads also masks the stop token if both are the same."""
    if facts.pad_id is None or facts.pad_id != facts.eos_id or not facts.masks_pads:
        return None
    why = "The collator masks every label that equals the pad token, so the stop token is never learned and answers do not end."
    what = f"The pad token is the stop token (id {facts.pad_id}), and the collator masks pads."
    return warning(
        what, why, "Set tokenizer.pad_token to a token of its own, e.g. the unknown token, or use TRL's collator."
    )


def check_vocabulary(facts: Facts) -> Finding | None:
    """Every id of the tokenizer needs a row."""
    rows = min(facts.embedding_rows, facts.head_rows or facts.embedding_rows)
    if facts.vocabulary <= rows:
        return None
    what = f"The tokenizer has {facts.vocabulary} tokens, but the model only {rows} rows for them."
    why = f"Ids from {rows} on are outside the embedding: an index error, on a GPU a device-side assert that names nothing."
    return error(
        what, why, f"Call model.resize_token_embeddings({facts.vocabulary}), or use the model's own tokenizer."
    )


def check_head_rows(facts: Facts) -> Finding | None:
    """Embedding and head must have grown together."""
    if facts.embedding_rows == facts.head_rows:
        return None
    what = f"The embedding has {facts.embedding_rows} rows, and the head has {facts.head_rows}."
    why = "One of them was resized without the other: some tokens can be read but never predicted."
    finding = warning if facts.head_rows < min(facts.embedding_rows, facts.vocabulary) else note
    return finding(what, why, "Resize both with model.resize_token_embeddings.")


def check_positions(facts: Facts) -> Finding | None:
    """Sequences must fit into the model."""
    if facts.max_length <= facts.max_positions:
        return None
    what = f"max_length is {facts.max_length}, and the model has {facts.max_positions} positions."
    change = f"Set max_length to at most {facts.max_positions}."
    if facts.model_type in LEARNED_POSITIONS:
        return error(what, "Its positions are a table: a longer sequence is an index error.", change)
    return warning(what, "Positions beyond those it was trained with give unreliable logits.", change)


def check_generation_marks(facts: Facts) -> Finding | None:
    """assistant_only_loss takes its mask from the chat template."""
    if not facts.assistant_only_loss or facts.has_generation_marks:
        return None
    what = "assistant_only_loss is true, but the chat template has no {% generation %} marks."
    why = "The mask of what the assistant says would be empty, so that every label is masked."
    return error(
        what,
        why,
        "Use a chat template with {% generation %} ... {% endgeneration %} around the answers of the assistant.",
    )


MODEL_RULES = (
    Rule("nothing-trainable", "hyperparameters", "trainable parameters", ("trainable",), check_trainable),
    Rule("head-adapter", "hyperparameters", "adapter on the head", ("has_output_head_adapter", "task"), check_head_adapter),
    Rule("quantized-weights", "hyperparameters", "quantized weights have an adapter", ("quantization_bits", "adapter"), check_quantized),
    Rule("adapter-targets", "hyperparameters", "modules that the adapter names", ("missing_targets",), check_adapter_targets,
         "https://github.com/unslothai/unsloth/pull/6936"),
    Rule("adapter-scale", "hyperparameters", "scale of the adapter", ("adapter_scale",), check_adapter_scale,
         "https://arxiv.org/abs/2312.03732"),
    Rule("label-names", "hyperparameters", "label names of a PEFT model", ("label_names", "adapter", "task"), check_label_names),
    Rule("pad-is-eos", "hyperparameters", "pad token and stop token", ("masks_pads", "eos_id"), check_pad_is_eos,
         "https://github.com/huggingface/trl/issues/1623"),
    Rule("vocabulary", "hyperparameters", "sizes of tokenizer and embedding", ("vocabulary", "embedding_rows"), check_vocabulary),
    Rule("head-rows", "hyperparameters", "sizes of embedding and head", ("embedding_rows", "head_rows", "vocabulary"), check_head_rows),
    Rule("positions", "hyperparameters", "length of sequences", ("max_length", "max_positions"), check_positions),
    Rule("generation-marks", "hyperparameters", "marks of the chat template", ("assistant_only_loss", "has_generation_marks"),
         check_generation_marks),
)  # fmt: skip
