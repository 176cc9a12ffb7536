"""The plain facts about a training run that the rules judge. A fact that is not known is `None`, and no rule guesses it."""

from dataclasses import dataclass, field, fields
from typing import Any


def unknown() -> Any:
    """Returns a field whose value is not known by default. A rule names the facts it needs, so it never meets that default."""
    return field(default=None)


@dataclass
class Facts:
    """What is known about a training run, resolved from its trainer, its arguments or a file."""

    # ---- the kind of training ----
    task: str = unknown()  # sft, dpo, kto, reward, grpo, rloo, distill, ... or "trainer" for the plain Trainer
    model_name: str = unknown()  # a name or folder, for messages
    model_type: str = unknown()  # of its config: "llama", "t5"
    is_pretrained: bool = unknown()
    adapter: str = unknown()  # "none", or the kind of PEFT adapter in lower case: "lora"
    adapter_targets: tuple[str, ...] = unknown()  # modules that get an adapter
    missing_targets: tuple[str, ...] = unknown()  # names in the adapter's config that nothing in the model has
    has_output_head_adapter: bool = unknown()  # whether the head, which TRL uses without calling it, is among them
    adapter_scale: float = unknown()  # by which the output of a LoRA is multiplied: alpha / rank, or alpha / sqrt(rank)
    parameters: int = unknown()
    trainable: int = unknown()  # of them

    # ---- precision ----
    bf16: bool = unknown()  # of the training arguments
    fp16: bool = unknown()
    mixed_precision: str = unknown()  # "no", "bf16" or "fp16": what these two resolve to
    accelerate_precision: str = unknown()  # of its environment variable or file
    deepspeed_precision: str = unknown()  # "auto", "no", "bf16" or "fp16"
    fsdp_precision: str = unknown()
    model_dtype: str = unknown()  # of the weights that are trained, e.g. "float32"
    checkpoint_dtype: str = unknown()  # in which the weights were saved
    quantization_bits: int = unknown()  # 0 for none
    compute_dtype: str = unknown()  # of a 4-bit layer
    bf16_support: str = unknown()  # "native", "emulated" or "absent"
    device_type: str = unknown()  # "cpu", "cuda", ...

    # ---- optimizer ----
    optimizer: str = unknown()
    learning_rate: float = unknown()
    scheduler: str = unknown()
    warmup_steps: float = unknown()  # below 1: a share of all steps
    max_steps: int = unknown()  # -1 if it depends on the data
    max_grad_norm: float = unknown()
    adam_beta1: float = unknown()
    adam_beta2: float = unknown()
    adam_epsilon: float = unknown()
    weight_decay: float = unknown()
    batch_size: int = unknown()  # per device
    accumulation_steps: int = unknown()
    world_size: int = unknown()
    is_sharded: bool = unknown()  # whether weights, gradients or optimizer state are spread over devices
    label_names: tuple[str, ...] = unknown()  # that the Trainer knows; empty if it knows none
    resumed_rate: float = unknown()  # the highest learning rate that the checkpoint to resume from has logged
    resumed_step: int = unknown()

    # ---- reinforcement learning and preferences ----
    temperature: float = unknown()
    num_generations: int = unknown()
    generation_batch_size: int = unknown()
    beta: float = unknown()
    num_iterations: int = unknown()
    max_completion_length: int = unknown()

    # ---- model, tokenizer and data ----
    max_length: int = unknown()  # of training sequences
    max_positions: int = unknown()  # of the model, if it has learned positions
    vocabulary: int = unknown()  # ids of the tokenizer, added ones included
    embedding_rows: int = unknown()
    head_rows: int = unknown()
    pad_id: int = unknown()
    eos_id: int = unknown()
    masks_pads: bool = unknown()  # whether the collator masks labels that equal the pad token
    has_chat_template: bool = unknown()
    has_generation_marks: bool = unknown()  # whether that template marks what the assistant says
    assistant_only_loss: bool = unknown()

    # ---- resources ----
    hidden_size: int = unknown()  # of the model's layers
    intermediate_size: int = unknown()
    num_layers: int = unknown()
    is_causal: bool = unknown()  # whether the model predicts the next token
    gradient_checkpointing: bool = unknown()
    weight_bytes: int = unknown()
    trainable_bytes: int = unknown()
    optimizer_bytes: int = unknown()  # of its state, at its largest
    activation_bytes: int = unknown()  # a lower bound
    snapshot_bytes: int = unknown()  # what the guard keeps in main memory to rewind, if that was asked for
    device_memory: int = unknown()  # all of it
    checkpoint_bytes: int = unknown()
    num_checkpoints: int = unknown()  # that will be on disk at the same time
    disk_free: int = unknown()

    @classmethod
    def of(cls, **facts: Any) -> "Facts":
        """Returns facts some of which may not be known."""
        return cls(**facts)

    def known(self) -> dict[str, Any]:
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def update(self, other: "Facts") -> "Facts":
        """Returns these facts with those that another source knows in their place."""
        return Facts(**{**self.known(), **other.known()})

    @property
    def is_online(self) -> bool:
        """Whether it is reinforcement learning."""
        return self.task in ("grpo", "rloo", "ppo", "online_dpo")

    @property
    def is_preference(self) -> bool:
        """Whether it learns from pairs, or from liked and disliked answers."""
        return self.task in ("dpo", "kto", "orpo", "cpo", "simpo")

    @property
    def uses_adam(self) -> bool:
        """Whether the optimizer is one of Adam's family, whose steps are as long as the learning rate."""
        return self.optimizer is not None and "adam" in self.optimizer.lower() and "mini" not in self.optimizer.lower()

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is trained, not the model."""
        return self.adapter not in (None, "none")
