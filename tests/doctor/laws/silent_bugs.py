"""Silent bugs, replanted: in each the loss is finite and falls, and something else is trained than was meant.

Each has the public report it is modelled on, if there is one, the law that must catch it, and a builder for both arms.
"""

import contextlib
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch.nn import functional
from transformers import AttentionInterface, DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer

from ...models import tiny_tokenizer
from ...trainers import build as build_trainer
from ...trainers import common_arguments, reward_length
from .reported_bugs import REPORTED
from .setups import (
    add_adapter,
    answer_rows,
    build_classifier,
    build_model,
    build_plain,
    build_sft,
    token_rows,
)

PACKED = {"packing": True}


@dataclass(frozen=True)
class SilentBug:
    """A bug: name, public report, law, and a function of folder and arm that builds the trainer."""

    name: str
    report: str
    law: str
    build: Callable[[Path, bool], Any]


# ---- documents that see each other ----


class Flattening:
    """A collator that puts all rows into one, with positions or without."""

    def __init__(self, positions: str, mask_first: bool = True):
        self.positions = positions
        self.mask_first = mask_first

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        ids = [token for row in rows for token in row["input_ids"]]
        labels = [
            t for row in rows for t in ([-100] if self.mask_first else row["input_ids"][:1]) + row["input_ids"][1:]
        ]
        starts = {"reset": [i for row in rows for i in range(len(row["input_ids"]))], "running": list(range(len(ids)))}
        batch = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        if self.positions in starts:
            batch["position_ids"] = torch.tensor([starts[self.positions]])
        return batch


class LeakyLlama(transformers.LlamaForCausalLM):
    """Has a running mean over the inputs of its first layer, as a linear attention has, which runs over whole rows."""

    resets = False

    def __init__(self, config):
        super().__init__(config)
        self.positions = self.outputs = None
        self.continues = False
        self.model.register_forward_pre_hook(self.note, with_kwargs=True)
        self.model.layers[0].mlp.register_forward_hook(self.mix)

    def note(self, module, args, kwargs):
        self.positions, cache = kwargs.get("position_ids"), kwargs.get("past_key_values")
        self.continues = cache is not None and cache.get_seq_length() > 0

    def mix(self, module, args, output):
        self.outputs = torch.cat([self.outputs, output], 1) if self.continues else output
        if self.continues:  # generation, one token at a time
            return output + self.outputs.mean(1, keepdim=True)
        seen = torch.ones(output.shape[1], output.shape[1]).tril()
        if self.resets and self.positions is not None:
            number = (self.positions[0] == 0).cumsum(0)
            seen = seen * (number[:, None] == number[None, :])
        return output + (seen / seen.sum(1, keepdim=True)).to(output.dtype) @ output


class ResettingLlama(LeakyLlama):
    """Begins anew at the first token of each document."""

    resets = True


def packed_recurrence(folder: Path, buggy: bool) -> Any:
    model = (LeakyLlama if buggy else ResettingLlama)(build_model("llama").config)
    return build_sft(folder, model, **PACKED)


def packed_state_space(folder: Path, buggy: bool) -> Any:
    return build_sft(folder, build_model("mamba" if buggy else "llama"), **PACKED)


def flattened_without_positions(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), collator=Flattening("none" if buggy else "reset"))


def positions_not_reset(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("qwen3"), collator=Flattening("running" if buggy else "reset"))


def first_tokens_as_targets(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), collator=Flattening("reset", mask_first=not buggy))


def packed_mask_of_ones(folder: Path, buggy: bool) -> Any:
    """Positions begin anew in each document, but a mask of ones keeps the model from looking at them."""
    collate = Flattening("reset")

    def with_mask(rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = collate(rows)
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])} if buggy else batch

    return build_plain(folder, build_model("llama"), collator=with_mask)


def lengths_for_another_kernel(folder: Path, buggy: bool) -> Any:
    """The lengths of the documents, which only flash attention takes."""
    collate = transformers.DataCollatorWithFlattening(return_position_ids=not buggy, return_flash_attn_kwargs=buggy)
    return build_plain(folder, build_model("llama"), collator=collate)


def learned_positions_run_on(folder: Path, buggy: bool) -> Any:
    """Documents are apart by a mask, but the table of positions is read where they are in the row."""

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        ids = [token for row in rows for token in row["input_ids"]]
        number = torch.tensor([i for i, row in enumerate(rows) for _ in row["input_ids"]])
        sees = (number[:, None] == number[None]) & torch.ones(len(ids), len(ids)).tril().bool()
        starts = [i for row in rows for i in range(len(row["input_ids"]))]
        return {
            "input_ids": torch.tensor([ids]),
            "labels": torch.tensor([[t for row in rows for t in [-100, *row["input_ids"][1:]]]]),
            "attention_mask": torch.zeros(1, 1, len(ids), len(ids)).masked_fill(~sees, torch.finfo(torch.float32).min),
            "position_ids": torch.tensor([list(range(len(ids))) if buggy else starts]),
        }

    return build_plain(folder, build_model("gpt2"), collator=collate)


# ---- accumulation ----


class UncountedLoss(Trainer):
    """Forgets num_items_in_batch, so that every micro-batch has the weight of a whole step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss


class CountedLoss(Trainer):
    """Passes num_items_in_batch on."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs, num_items_in_batch=num_items_in_batch).loss


class LossAveragedTwice(Trainer):
    """Divides a loss by the number of micro-batches that was divided by all their tokens."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) / self.current_gradient_accumulation_steps


def uncounted_loss(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=UncountedLoss if buggy else CountedLoss)


def classifier_loss(folder: Path, buggy: bool) -> Any:
    trainer = build_classifier(folder)
    trainer.loss_is_scaled_for_ga = None if buggy else False
    return trainer


def loss_averaged_twice(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=LossAveragedTwice if buggy else Trainer)


def mean_of_means(folder: Path, buggy: bool) -> Any:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = functional.cross_entropy(logits, target, reduction="sum")
        return total / ((target != -100).sum() * 3 if buggy else num_items_in_batch)

    return build_plain(folder, build_model("llama"), extra={"compute_loss_func": loss})


# ---- labels ----


class UnmaskedPadding(DataCollatorForSeq2Seq):
    """Labels of padding are padding tokens."""

    def __call__(self, rows, return_tensors=None):
        batch = super().__call__(rows, return_tensors)
        batch["labels"] = batch["input_ids"].clone()
        return batch


class ShiftedLabels(DataCollatorForSeq2Seq):
    """Labels are the next tokens already, and the model shifts them once more."""

    def __call__(self, rows, return_tensors=None):
        batch = super().__call__(rows, return_tensors)
        batch["labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        return batch


def _pick_collator(cls: type, buggy: bool) -> Any:
    return (cls if buggy else DataCollatorForSeq2Seq)(tiny_tokenizer(), padding=True)


class OwnSmoothing(Trainer):
    """Smooths labels itself, with the shift that a causal model needs or without."""

    shift = 1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        logits, labels = logits[:, : logits.shape[1] - self.shift], labels[:, self.shift :]
        known = labels != -100
        loss = functional.cross_entropy(logits[known], labels[known], label_smoothing=0.1, reduction="sum")
        return loss / num_items_in_batch


class UnshiftedSmoothing(OwnSmoothing):
    shift = 0


def smoothing_without_shift(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=UnshiftedSmoothing if buggy else OwnSmoothing)


def padding_as_labels(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), collator=_pick_collator(UnmaskedPadding, buggy))


def labels_shifted_twice(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), collator=_pick_collator(ShiftedLabels, buggy))


def own_loss_without_shift(folder: Path, buggy: bool) -> Any:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, target = (outputs.logits, labels) if buggy else (outputs.logits[:, :-1], labels[:, 1:])
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / num_items_in_batch

    return build_plain(folder, build_model("llama"), extra={"compute_loss_func": loss})


def stop_token_as_padding(folder: Path, buggy: bool) -> Any:
    tokenizer = tiny_tokenizer()
    if buggy:
        tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]} for row in token_rows()]
    return build_plain(folder, build_model("llama"), rows, DataCollatorForLanguageModeling(tokenizer, mlm=False))


def stop_token_outside_answer(folder: Path, buggy: bool) -> Any:
    tokenizer = tiny_tokenizer()
    answer = "{{ m['content'] }}{% endgeneration %} {{ eos_token }}"
    answer = answer if buggy else "{{ m['content'] }} {{ eos_token }}{% endgeneration %}"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}assistant {% generation %}" + answer
        + " {% else %}user {{ m['content'] }} {{ eos_token }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )  # fmt: skip
    rows = [{"messages": [*row["prompt"], *row["completion"]]} for row in answer_rows(conversational=True)]
    return build_sft(
        folder, build_model("llama"), Dataset.from_list(rows), tokenizer=tokenizer, assistant_only_loss=True
    )


class ForgottenMask(DataCollatorForSeq2Seq):
    """Labels are made anew from the tokens, prompt included."""

    def __call__(self, rows, return_tensors=None):
        batch = super().__call__(rows, return_tensors)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch


def prompt_learned(folder: Path, buggy: bool) -> Any:
    rows = [{**row, "labels": [-100] * 3 + row["labels"][3:]} for row in token_rows()]
    return build_plain(folder, build_model("llama"), rows, _pick_collator(ForgottenMask, buggy))


# ---- gradients ----


def adapter_behind_detach(folder: Path, buggy: bool) -> Any:
    model = add_adapter(build_model("llama"))
    if buggy:
        layer = model.base_model.model.model.layers[1].self_attn
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"].detach()}),
            with_kwargs=True,
        )
        layer.v_proj.lora_A["default"].register_forward_hook(lambda module, args, output: output.detach())
    return build_sft(folder, model)


def adapter_of_unused_head(folder: Path, buggy: bool) -> Any:
    model = add_adapter(build_model("llama"), target_modules=["q_proj", "lm_head"] if buggy else ["q_proj", "o_proj"])
    trainer = build_plain(folder, model)
    if buggy:  # the loss takes the weight of the head, as fused losses do, and never calls its module
        base, hidden = model.base_model.model, []
        base.model.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state))

        def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            logits = functional.linear(hidden.pop(), base.lm_head.base_layer.weight)[:, :-1].flatten(0, 1)
            return functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

        trainer.compute_loss_func = loss
    return trainer


class ForgetfulTrainer(Trainer):
    """Its optimizer knows only weights that decay."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.ndim > 1], lr=1e-2)
        return self.optimizer


def parameters_without_optimizer(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=ForgetfulTrainer if buggy else Trainer)


class DecayOfAll(torch.optim.AdamW):
    """Decays the weights of a whole model, frozen ones included."""

    model: Any = None

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.model.parameters():
            parameter.mul_(0.99)
        return super().step(closure)


class DecayingTrainer(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = DecayOfAll([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.optimizer.model = self.model
        return self.optimizer


def frozen_weights_decay(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, add_adapter(build_model("llama")), trainer_class=DecayingTrainer if buggy else Trainer)


def statistics_of_frozen_norms(folder: Path, buggy: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=2
    )
    model = transformers.ResNetForImageClassification(config)
    model.resnet.requires_grad_(False)
    for module in model.resnet.modules():
        if isinstance(module, torch.nn.BatchNorm2d) and not buggy:
            module.eval()
            module.train = lambda mode=True, module=module: module
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": i % 2} for i in range(12)]
    args = transformers.TrainingArguments(**common_arguments(folder, gradient_accumulation_steps=1))
    return Trainer(model, args, train_dataset=rows)


def checkpointing_drops_gradient(folder: Path, buggy: bool) -> Any:
    model = build_model("llama")
    if buggy:
        layer = model.model.layers[1]
        layer.mlp.register_forward_hook(
            lambda module, args, output: output.detach() if layer.gradient_checkpointing and layer.training else output
        )
    return build_plain(folder, model, gradient_checkpointing=True)


# ---- kernels ----


def _blind_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kwargs: Any
) -> Any:
    """Causal attention that ignores the mask, and so padding on the left."""
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def _wrong_scale(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **kwargs: Any
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query * 2, key, value, attention_mask, scaling=scaling, **kwargs)


def _without_window(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **kwargs: Any
) -> Any:
    """Attention to all earlier tokens, however far they are."""
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def window_ignored(folder: Path, buggy: bool) -> Any:
    """A window that is longer than any row of the trial."""
    AttentionInterface.register("windowless", _without_window)
    model = build_model("mistral", sliding_window=4096, attn_implementation="windowless" if buggy else "sdpa")
    return build_plain(
        folder, model, rows=[row for row in token_rows() if len(row["input_ids"]) > 8], per_device_train_batch_size=1
    )


def attention_sees_padding(folder: Path, buggy: bool) -> Any:
    AttentionInterface.register("blind", _blind_attention)
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    model = build_model("llama", attn_implementation="blind" if buggy else "sdpa")
    return build_plain(folder, model, collator=DataCollatorForSeq2Seq(tokenizer, padding=True))


def attention_scaled_twice(folder: Path, buggy: bool) -> Any:
    AttentionInterface.register("scaled_twice", _wrong_scale)
    return build_plain(folder, build_model("llama", attn_implementation="scaled_twice" if buggy else "sdpa"))


def patched_norm(folder: Path, buggy: bool) -> Any:
    """A kernel that takes the place of the model's own, as Liger and others do, with another epsilon."""
    model = build_model("llama")
    if buggy:
        for layer in model.model.layers:
            norm = layer.input_layernorm
            norm.forward = lambda x, weight=norm.weight: functional.rms_norm(x, x.shape[-1:], weight, 0.1)
    return build_plain(folder, model)


def head_with_hidden_scale(folder: Path, buggy: bool) -> Any:
    model = build_model("llama")
    if buggy:
        model.lm_head.register_forward_hook(lambda module, args, output: output * 3)
    return build_sft(folder, model)


# ---- modes and precision ----


def scaled_in_training(folder: Path, buggy: bool) -> Any:
    model = build_model("llama")
    if buggy:
        model.model.norm.register_forward_hook(lambda module, args, output: output * (1.1 if module.training else 1.0))
    return build_plain(folder, model)


def reference_with_dropout(folder: Path, buggy: bool) -> Any:
    import trl

    class Careless(trl.DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            self.ref_model.train()
            return super().compute_loss(*args, **kwargs)

    trainer = build_trainer("dpo", folder, Careless if buggy else trl.DPOTrainer, guard=False, dropout=0.5)
    trainer.ref_model.eval()
    return trainer


def cancelled_digits(folder: Path, buggy: bool) -> Any:
    model = build_model("llama", torch.bfloat16)
    if buggy:
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        model.model.norm.register_forward_hook(lambda module, args, output: (output + 3e3) - 3e3)
    return build_plain(folder, model)


def dropout_in_evaluation(folder: Path, buggy: bool) -> Any:
    model = build_model("llama")
    if buggy:  # the functional form, whose flag was forgotten
        model.model.norm.register_forward_hook(
            lambda module, args, output: functional.dropout(output, 0.3, training=True)
        )
    return build_plain(folder, model)


class EvaluationMode(Trainer):
    """Leaves the model in evaluation mode after its own measurement of the loss."""

    def compute_loss(self, model, *args, **kwargs):
        model.eval()
        return super().compute_loss(model, *args, **kwargs)


def training_without_dropout(folder: Path, buggy: bool) -> Any:
    model = build_model("llama", attention_dropout=0.1)
    return build_plain(folder, model, trainer_class=EvaluationMode if buggy else Trainer)


def reference_is_the_policy(folder: Path, buggy: bool) -> Any:
    trainer = build_trainer("dpo", folder, guard=False, dropout=0.0)
    if buggy:
        trainer.ref_model = trainer.model
    return trainer


def reference_with_the_adapter(folder: Path, buggy: bool) -> Any:
    trainer = build_trainer("dpo", folder, guard=False, lora=True)
    if buggy:
        trainer.model.set_adapter = lambda *args, **kwargs: None
        trainer.model.disable_adapter = contextlib.nullcontext
    return trainer


def sampled_reference_is_the_policy(folder: Path, buggy: bool) -> Any:
    import trl

    class Careless(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            parts = [torch.cat([batch[f"prompt_{n}"], batch[f"completion_{n}"]], 1) for n in ("ids", "mask")]
            with torch.no_grad():
                found = self._get_per_token_logps_and_entropies(self.model, *parts, batch["completion_ids"].shape[1])
            return {**batch, "ref_per_token_logps": found[0]}

    return build_trainer("grpo", folder, Careless if buggy else trl.GRPOTrainer, guard=False, lora=True, beta=0.04)


class ForgottenRouter(Trainer):
    """Computes the loss itself, with the auxiliary loss of the experts or without."""

    weight = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        output = model(**inputs)
        logits, target = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = functional.cross_entropy(logits, target, reduction="sum") / num_items_in_batch
        return loss + self.weight * model.config.router_aux_loss_coef * output.aux_loss


class RememberedRouter(ForgottenRouter):
    weight = 1.0


def router_loss_forgotten(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("mixtral"), trainer_class=ForgottenRouter if buggy else RememberedRouter)


# ---- what a token sees ----


def tokens_see_the_next(folder: Path, buggy: bool) -> Any:
    model = build_model("llama")
    if buggy:
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + output.roll(-1, 1))
    return build_plain(folder, model)


# ---- rows ----


class FewRows(Trainer):
    """Its sampler takes the first rows again and again."""

    def _get_train_sampler(self, train_dataset=None):
        return [i % 4 for i in range(len(self.train_dataset))]


def sampler_repeats_rows(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=FewRows if buggy else Trainer)


class ForgottenGroup(Trainer):
    """One group of its optimizer has a learning rate of 0."""

    def create_optimizer(self, model=None):
        weights = list(self.model.parameters())
        groups = [{"params": weights[:3], "lr": 0.0}, {"params": weights[3:]}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return self.optimizer


def group_that_never_learns(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=ForgottenGroup if buggy else Trainer)


# ---- saved and loaded ----


class LossyLlama(transformers.LlamaForCausalLM):
    """Leaves a trained weight out of its checkpoints."""

    _keys_to_ignore_on_save = ("model.norm.weight",)


def weight_not_saved(folder: Path, buggy: bool) -> Any:
    model = build_model("llama")
    return build_plain(folder, LossyLlama(model.config) if buggy else model)


def head_initialised_anew(folder: Path, buggy: bool) -> Any:
    saved = folder / "base"
    build_model("llama").save_pretrained(saved)
    model = transformers.LlamaForCausalLM.from_pretrained(saved)
    if buggy:
        torch.nn.init.normal_(model.lm_head.weight, std=0.02)
    return build_plain(folder, model)


def layers_under_other_names(folder: Path, buggy: bool) -> Any:
    from safetensors.torch import load_file, save_file

    saved = folder / "base"
    build_model("llama").save_pretrained(saved)
    weights = load_file(saved / "model.safetensors")
    name = "model.blocks." if buggy else "model.layers."
    save_file(
        {n.replace("model.layers.", name): w for n, w in weights.items()}, saved / "model.safetensors", {"format": "pt"}
    )
    return build_plain(folder, transformers.LlamaForCausalLM.from_pretrained(saved))


def embedding_outside_the_adapter(folder: Path, buggy: bool) -> Any:
    model = add_adapter(build_model("llama"), modules_to_save=None if buggy else ["embed_tokens"])
    if buggy:
        model.get_input_embeddings().weight.requires_grad = True
    return build_plain(folder, model)


class OnlyLora(Trainer):
    """Keeps only the matrices of the adapter in its checkpoints."""

    def _save(self, output_dir=None, state_dict=None):
        from safetensors.torch import load_file, save_file

        super()._save(output_dir, state_dict)
        file = Path(output_dir) / "adapter_model.safetensors"
        save_file({name: weight for name, weight in load_file(file).items() if "lora_" in name}, file)


def trained_head_left_out(folder: Path, buggy: bool) -> Any:
    model = add_adapter(build_model("llama"), modules_to_save=["lm_head"])
    return build_plain(folder, model, trainer_class=OnlyLora if buggy else Trainer)


class RetyingLlama(transformers.LlamaForCausalLM):
    """Ties its head again when it is saved, whatever became of it."""

    def save_pretrained(self, *args, **kwargs):
        self.lm_head.weight = self.model.embed_tokens.weight
        super().save_pretrained(*args, **kwargs)


def tied_head_trained_apart(folder: Path, buggy: bool) -> Any:
    model = RetyingLlama(build_model("llama", tie_word_embeddings=True).config)
    modules = {"modules_to_save": ["lm_head"]} if buggy else {}
    with warnings.catch_warnings():  # PEFT's own, of this very report
        warnings.simplefilter("ignore", UserWarning)
        return build_plain(folder, add_adapter(model, **modules))


def untied_head(folder: Path, buggy: bool) -> Any:
    model = build_model("llama", tie_word_embeddings=True)
    if buggy:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return build_plain(folder, model)


SAVES = {"save_strategy": "steps", "save_steps": 1}


def resume_repeats_data(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), ignore_data_skip=buggy, **SAVES)


def experts_not_resumed(folder: Path, buggy: bool) -> Any:
    asked = {"resume_from_checkpoint": str(folder / "checkpoint-1")}
    return build_plain(folder, build_model("mixtral" if buggy else "llama"), **SAVES, **asked)


class OwnOrder(torch.utils.data.Sampler):
    """Another order each time it is asked, whatever the seed."""

    def __init__(self, size: int):
        self.size, self.seed = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        OwnOrder.asked += 1
        return iter(random.Random(OwnOrder.asked).sample(range(self.size), self.size))

    asked = 0


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return OwnOrder(len(self.train_dataset))


def order_of_its_own(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=OwnSampler if buggy else Trainer, **SAVES)


class ForgottenMoments(Trainer):
    """Loads the weights of a checkpoint, and begins with a new optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint):
        pass


def moments_not_resumed(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=ForgottenMoments if buggy else Trainer, **SAVES)


# ---- online training ----


def loss_at_other_temperature(folder: Path, buggy: bool) -> Any:
    import trl

    class Untempered(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
            ids = input_ids[:, -logits_to_keep:]
            logps = logits.float().log_softmax(-1)
            return logps.gather(2, ids.unsqueeze(2)).squeeze(2), -(logps.exp() * logps).sum(-1), None

    return build_trainer("grpo", folder, Untempered if buggy else trl.GRPOTrainer, guard=False, temperature=0.5)


def sampler_at_other_temperature(folder: Path, buggy: bool) -> Any:
    import trl

    class Reporting(trl.GRPOTrainer):
        """Gets log-probabilities with its completions, as from an engine of its own."""

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            parts = [torch.cat([batch[f"prompt_{n}"], batch[f"completion_{n}"]], 1) for n in ("ids", "mask")]
            size = batch["completion_ids"].shape[1]
            with torch.no_grad():
                logits = self.model(input_ids=parts[0], attention_mask=parts[1]).logits[:, -size - 1 : -1]
            logps = (logits.float() / (1.0 if buggy else self.temperature)).log_softmax(-1)
            batch["sampling_per_token_logps"] = logps.gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)
            return batch

    return build_trainer("grpo", folder, Reporting, guard=False, temperature=0.5)


def advantages_not_scaled(folder: Path, buggy: bool) -> Any:
    import trl

    class Unscaled(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            batch["advantages"] = batch["advantages"] * 2 + 0.5
            return batch

    return build_trainer(
        "grpo", folder, Unscaled if buggy else trl.GRPOTrainer, guard=False, num_generations=4, per_device_train_batch_size=4,
        extra={"reward_funcs": reward_length},
    )  # fmt: skip


def _build_grpo(folder: Path, trainer_class: Any) -> Any:
    return build_trainer("grpo", folder, trainer_class, guard=False, num_generations=4, per_device_train_batch_size=4)


def policy_loss_not_divided(folder: Path, buggy: bool) -> Any:
    import trl

    class Undivided(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * self.current_gradient_accumulation_steps

    return _build_grpo(folder, Undivided if buggy else trl.GRPOTrainer)


def policy_sees_padding(folder: Path, buggy: bool) -> Any:
    import trl

    class Blind(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, ids, mask, *args, **kwargs):
            return super()._get_per_token_logps_and_entropies(model, ids, torch.ones_like(mask), *args, **kwargs)

    return _build_grpo(folder, Blind if buggy else trl.GRPOTrainer)


def stop_token_outside_policy_loss(folder: Path, buggy: bool) -> Any:
    import trl

    class Ended(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            ids, mask = batch["completion_ids"].clone(), batch["completion_mask"].clone()
            ids[:, 1], mask[:, 2:] = 2, 0  # each ends with its second token
            mask[:, 1] = 0 if buggy else 1
            return {**batch, "completion_ids": ids, "completion_mask": mask, "num_items_in_batch": mask.sum()}

    return _build_grpo(folder, Ended)


def completion_mask_one_off(folder: Path, buggy: bool) -> Any:
    import trl

    class Shifted(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "completion_mask": functional.pad(batch["completion_mask"][:, 1:], (0, 1))}

    return _build_grpo(folder, Shifted if buggy else trl.GRPOTrainer)


BUGS = (
    SilentBug("recurrence without resets in packed rows", "modelscope/ms-swift#9565", "isolation", packed_recurrence),
    SilentBug("state-space model with packing", "huggingface/transformers#46093", "isolation", packed_state_space),
    SilentBug("flattened rows without positions", "modelscope/ms-swift#4736", "isolation", flattened_without_positions),
    SilentBug("positions run on in a packed row", "modelscope/ms-swift#4736", "isolation", positions_not_reset),
    SilentBug("first tokens of documents as targets", "", "isolation", first_tokens_as_targets),
    SilentBug("mask of ones beside positions", "huggingface/transformers#46634", "isolation", packed_mask_of_ones),
    SilentBug("lengths for another kernel", "", "isolation", lengths_for_another_kernel),
    SilentBug("learned positions that run on", "hiyouga/LlamaFactory#7318", "isolation", learned_positions_run_on),
    SilentBug("loss times accumulation steps", "axolotl-ai-cloud/axolotl#2262", "accumulation", uncounted_loss),
    SilentBug("classifier that is not divided", "huggingface/transformers#46204", "accumulation", classifier_loss),
    SilentBug("loss averaged twice", "huggingface/transformers#35207", "accumulation", loss_averaged_twice),
    SilentBug("mean of means", "huggingface/transformers#37766", "accumulation", mean_of_means),
    SilentBug("padding as labels", "", "next_token", padding_as_labels),
    SilentBug("labels shifted twice", "", "next_token", labels_shifted_twice),
    SilentBug("own loss that does not shift", "", "next_token", own_loss_without_shift),
    SilentBug("smoothing without shift", "", "next_token", smoothing_without_shift),
    SilentBug("stop token masked as padding", "huggingface/trl#1623", "stop_token", stop_token_as_padding),
    SilentBug("stop token outside the answer", "huggingface/trl#5988", "stop_token", stop_token_outside_answer),
    SilentBug("prompt that is learned", "", "prompt_tokens", prompt_learned),
    SilentBug("adapter that is cut off", "huggingface/peft#2826, unslothai/unsloth#3089", "gradients", adapter_behind_detach),
    SilentBug("adapter of a head that is not called", "unslothai/unsloth#9326", "gradients", adapter_of_unused_head),
    SilentBug("parameters that no optimizer knows", "", "gradients", parameters_without_optimizer),
    SilentBug("frozen weights that decay", "", "gradients", frozen_weights_decay),
    SilentBug("statistics of frozen norms", "", "gradients", statistics_of_frozen_norms),
    SilentBug("checkpointing that drops a gradient", "locuslab/open-unlearning#178", "checkpointing", checkpointing_drops_gradient),
    SilentBug("attention that sees padding", "", "padding", attention_sees_padding),
    SilentBug("attention that sees padding, against eager", "", "attention", attention_sees_padding),
    SilentBug("window that is ignored", "unslothai/unsloth#8253", "attention", window_ignored),
    SilentBug("attention scaled twice", "", "attention", attention_scaled_twice),
    SilentBug("norm patched with another epsilon", "", "installed_code", patched_norm),
    SilentBug("fused head without the model's scale", "", "fused_loss", head_with_hidden_scale),
    SilentBug("other outputs in training", "", "train_and_eval", scaled_in_training),
    SilentBug("reference with dropout", "", "frozen_models", reference_with_dropout),
    SilentBug("reference with the adapter on", "", "frozen_models", reference_with_the_adapter),
    SilentBug("sampled reference that is the policy", "", "frozen_models", sampled_reference_is_the_policy),
    SilentBug("auxiliary loss forgotten", "", "router_loss", router_loss_forgotten),
    SilentBug("digits lost in bfloat16", "", "precision", cancelled_digits),
    SilentBug("weight that is not saved", "vec2text/vec2text#94", "saved_weights", weight_not_saved),
    SilentBug("head and embeddings trained apart", "huggingface/peft#2777", "saved_weights", untied_head),
    SilentBug("tied head lost at merge", "huggingface/peft#2777, unslothai/unsloth#9331", "merged_adapter", tied_head_trained_apart),
    SilentBug("head initialised anew after loading", "huggingface/transformers#46620", "loaded_weights", head_initialised_anew),
    SilentBug("layers under other names", "", "loaded_weights", layers_under_other_names),
    SilentBug("embedding outside the adapter", "", "saved_weights", embedding_outside_the_adapter),
    SilentBug("trained head left out", "", "saved_weights", trained_head_left_out),
    SilentBug("order that no seed fixes", "", "resume", order_of_its_own),
    SilentBug("resume that repeats data", "", "resume", resume_repeats_data),
    SilentBug("experts that are not resumed", "huggingface/transformers#48805", "resume", experts_not_resumed),
    SilentBug("moments that are not resumed", "", "resume", moments_not_resumed),
    SilentBug("tokens that see the next one", "", "causality", tokens_see_the_next),
    SilentBug("dropout in evaluation", "", "train_and_eval", dropout_in_evaluation),
    SilentBug("training without dropout", "", "dropout", training_without_dropout),
    SilentBug("reference that is the policy", "", "frozen_models", reference_is_the_policy),
    SilentBug("sampler that repeats rows", "", "epoch", sampler_repeats_rows),
    SilentBug("group that never learns", "", "gradients", group_that_never_learns),
    SilentBug("policy loss that is not divided", "", "accumulation", policy_loss_not_divided),
    SilentBug("policy that sees padding", "", "padding", policy_sees_padding),
    SilentBug("stop token outside the policy loss", "", "stop_token", stop_token_outside_policy_loss),
    SilentBug("completion mask one off", "modelscope/ms-swift#8427", "stop_token", completion_mask_one_off),
    SilentBug("loss at temperature 1", "huggingface/trl#3029", "sampler", loss_at_other_temperature),
    SilentBug("sampler that reports temperature 1", "huggingface/trl#4159", "sampler", sampler_at_other_temperature),
    SilentBug("advantages not as configured", "", "advantages", advantages_not_scaled),
    *(SilentBug(*each) for each in REPORTED),
)  # fmt: skip
