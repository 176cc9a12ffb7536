"""Silent bugs of public reports of this and the last year, replanted like those of `silent_bugs`."""

from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch.nn import functional
from transformers import DataCollatorWithPadding, Trainer
from transformers.modeling_outputs import SequenceClassifierOutput

from ...models import text_rows, tiny_tokenizer
from ...trainers import build as build_trainer
from ...trainers import common_arguments, reward_length
from .setups import DECODER, add_adapter, answer_rows, build_model, build_plain, build_sft, token_rows

SAVES = {"save_strategy": "steps", "save_steps": 1}


# ---- accumulation and schedule ----


class DroppedCount(transformers.LlamaForCausalLM):
    """Takes any argument, and with it the number of labels, which it does not use."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        logits, target = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        output.loss = self.reduce(
            functional.cross_entropy(logits, target, reduction="none"), target, num_items_in_batch
        )
        return output

    def reduce(self, losses, target, num_items):
        return losses.sum() / (target != -100).sum()


class UsedCount(DroppedCount):
    def reduce(self, losses, target, num_items):
        return losses.sum() / num_items


def head_that_drops_the_count(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, (DroppedCount if buggy else UsedCount)(build_model("llama").config))


class UncountedSmoother:
    """The mean of a micro-batch, however many labels the step has."""

    def __call__(self, output, labels, shift_labels=False, num_items_in_batch=None):
        logits = output["logits"][:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)


def smoother_without_the_count(folder: Path, buggy: bool) -> Any:
    trainer = build_plain(folder, build_model("llama"), label_smoothing_factor=0.1)
    if buggy:
        trainer.label_smoother = UncountedSmoother()
    return trainer


class FastSchedule(Trainer):
    """Moves the schedule with each micro-batch."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.lr_scheduler.step()
        return loss


def schedule_of_micro_batches(folder: Path, buggy: bool) -> Any:
    return build_plain(folder, build_model("llama"), trainer_class=FastSchedule if buggy else Trainer)


# ---- labels ----


def own_collator_learns_prompts(folder: Path, buggy: bool) -> Any:
    tokenizer = tiny_tokenizer()

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        texts = [tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False) for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, own in zip(rows, labels, strict=True):
            prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            own[: 0 if buggy else len(tokenizer(prompt)["input_ids"])] = -100
        return {**batch, "labels": labels}

    return build_sft(
        folder, build_model("llama"), answer_rows(conversational=True), collator=collate, completion_only_loss=True,
        dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
    )  # fmt: skip


def first_answer_token_left_out(folder: Path, buggy: bool) -> Any:
    """A mask that begins one token late, so that the model never learns how an answer begins."""
    rows = [{**row, "completion_mask": [0] * 3 + [1] * (len(row["input_ids"]) - 3)} for row in token_rows()]

    def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
        size = max(len(row["input_ids"]) for row in rows)
        first = 4 if buggy else 3
        labels = [[-100] * first + row["input_ids"][first:] for row in rows]
        parts = {"input_ids": ([row["input_ids"] for row in rows], 0), "labels": (labels, -100),
                 "attention_mask": ([row["attention_mask"] for row in rows], 0)}  # fmt: skip
        return {n: torch.tensor([v + [pad] * (size - len(v)) for v in values]) for n, (values, pad) in parts.items()}

    return build_plain(folder, build_model("llama"), rows, collate, remove_unused_columns=False)


# ---- gradients ----


class ExchangedWeights(torch.autograd.Function):
    """A product whose weights are others in the backward pass, as where layers share a buffer on the device."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(weight)
        return inputs @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient @ weight.roll(1, 0), None


def weights_exchanged_before_backward(folder: Path, buggy: bool) -> Any:
    model = add_adapter(build_model("llama"))
    if buggy:
        for layer in model.base_model.model.model.layers:
            product = layer.mlp.down_proj
            product.forward = lambda inputs, product=product: ExchangedWeights.apply(inputs, product.weight)
    return build_sft(folder, model)


def checkpointing_of_frozen_inputs(folder: Path, buggy: bool) -> Any:
    """Reentrant checkpointing gives no gradient to layers whose input needs none."""
    model = add_adapter(build_model("llama"), modules_to_save=["lm_head"])
    kinds = {"use_reentrant": buggy}
    trainer = build_plain(folder, model, gradient_checkpointing=True, gradient_checkpointing_kwargs=kinds)
    if buggy:
        model.base_model.model.enable_input_require_grads = lambda: None
    return trainer


# ---- outputs ----


class LastByCount(transformers.LlamaForSequenceClassification):
    """Takes the output at the number of real tokens, which is not the last of them if padding is on the left."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        scores = self.score(self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        logits = scores[torch.arange(len(scores)), self.find_last(attention_mask)]
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def find_last(self, mask):
        return mask.sum(1) - 1


class LastByPlace(LastByCount):
    def find_last(self, mask):
        return (torch.arange(mask.shape[1]) * mask).argmax(1)


def padding_is_classified(folder: Path, buggy: bool) -> Any:
    torch.manual_seed(0)
    model = (LastByCount if buggy else LastByPlace)(transformers.LlamaConfig(**DECODER, num_labels=2))
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    rows = [{**row, "labels": i % 2} for i, row in enumerate(token_rows())]
    return build_plain(folder, model, rows, DataCollatorWithPadding(tokenizer), gradient_accumulation_steps=1)


class NeedsCache(transformers.LlamaForCausalLM):
    """Its second layer sees something else without a cache, which gradient checkpointing takes away."""

    factor = 0.5

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].self_attn.register_forward_pre_hook(self.shrink, with_kwargs=True)

    def shrink(self, module, args, kwargs):
        if kwargs.get("past_key_values") is None:
            kwargs = {**kwargs, "hidden_states": kwargs["hidden_states"] * self.factor}
        return args, kwargs


class NeedsNoCache(NeedsCache):
    factor = 1.0


def layers_that_need_the_cache(folder: Path, buggy: bool) -> Any:
    model = (NeedsCache if buggy else NeedsNoCache)(build_model("llama").config)
    return build_plain(folder, model, gradient_checkpointing=True)


# ---- saved and loaded ----


class ForgottenAdapter(Trainer):
    def _load_from_checkpoint(self, *args, **kwargs):
        pass


def adapter_not_resumed(folder: Path, buggy: bool) -> Any:
    cls = ForgottenAdapter if buggy else Trainer
    return build_plain(folder, add_adapter(build_model("llama")), trainer_class=cls, **SAVES)


def merged_at_another_scale(folder: Path, buggy: bool) -> Any:
    model = add_adapter(build_model("llama"), use_rslora=True, r=4, lora_alpha=4)
    for module in model.modules():
        if buggy and hasattr(module, "get_delta_weight"):
            module.get_delta_weight = lambda name, own=module.get_delta_weight: own(name) / 2
    return build_plain(folder, model)


def experts_not_merged(folder: Path, buggy: bool) -> Any:
    from peft.tuners.lora.layer import ParamWrapper

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = add_adapter(build_model("mixtral", output_router_logits=False), target_parameters=targets, lora_dropout=0.0)
    for module in model.modules():
        if buggy and isinstance(module, ParamWrapper):
            module.merge = lambda *args, **kwargs: None
    return build_plain(folder, model, gradient_accumulation_steps=1)


# ---- preferences and reinforcement learning ----


def reference_log_probs_of_zero(folder: Path, buggy: bool) -> Any:
    trainer = build_trainer("dpo", folder, guard=False, lora=True, precompute_ref_log_probs=True)
    if buggy:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: collate([{**row, "ref_chosen_logps": 0.0} for row in rows])
    return trainer


def _build_grpo(folder: Path, trainer_class: Any, **arguments: Any) -> Any:
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4}
    return build_trainer("grpo", folder, trainer_class, guard=False, dropout=0.0, **sizes, **arguments)


def masked_completions_are_counted(folder: Path, buggy: bool) -> Any:
    import trl

    class Masking(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            mask = batch["completion_mask"].clone()
            mask[::2] = 0
            return {**batch, "completion_mask": mask, **({} if buggy else {"num_items_in_batch": mask.sum()})}

    return _build_grpo(folder, Masking, loss_type="dapo")


def tool_results_are_learned(folder: Path, buggy: bool) -> Any:
    import trl

    class Tools(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            mask = torch.ones_like(batch["completion_mask"])
            mask[:, 1] = 0
            return {**batch, "tool_mask": mask, "num_items_in_batch": (mask * batch["completion_mask"]).sum()}

        def _compute_loss(self, model, inputs):
            kept = {name: value for name, value in inputs.items() if name != "tool_mask" or not buggy}
            return super()._compute_loss(model, kept)

    return _build_grpo(folder, Tools)


def only_the_kl_term_is_learned(folder: Path, buggy: bool) -> Any:
    import trl

    class Constant(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * (0 if buggy else 1)})

    return _build_grpo(folder, Constant, lora=True, beta=0.04)


def good_completions_are_unlearned(folder: Path, buggy: bool) -> Any:
    import trl

    class Reversed(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * (-1 if buggy else 1)

    return _build_grpo(folder, Reversed)


def stale_log_probs(folder: Path, buggy: bool) -> Any:
    import trl

    class Stale(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "old_per_token_logps": batch["old_per_token_logps"] - (0.3 if buggy else 0.0)}

    return _build_grpo(folder, Stale, num_iterations=2, steps_per_generation=6)


def baseline_of_its_own(folder: Path, buggy: bool) -> Any:
    """An RLOO whose baseline contains the completion itself."""
    import trl

    class Own(trl.RLOOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, "advantages": batch["advantages"] * (3 / 4 if buggy else 1)}

    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 4, "beta": 0.0}
    args = trl.RLOOConfig(**{**common_arguments(folder), **sizes})
    rows = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(48)])
    return Own(
        build_model("llama"),
        args=args,
        reward_funcs=reward_length,
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
    )


REPORTED = (
    ("head that drops the count", "huggingface/transformers#47688", "accumulation", head_that_drops_the_count),
    ("smoother without the count", "huggingface/transformers#46731", "accumulation", smoother_without_the_count),
    ("schedule of micro-batches", "starVLA/starVLA#210", "schedule", schedule_of_micro_batches),
    ("collator that learns prompts", "axolotl-ai-cloud/axolotl#3617", "prompt_tokens", own_collator_learns_prompts),
    ("first answer token left out", "verl-project/verl#3287", "prompt_tokens", first_answer_token_left_out),
    ("weights exchanged before backward", "WalkingMeatAxolotl/AnimaLoraStudio#466", "backward", weights_exchanged_before_backward),
    ("checkpointing of frozen inputs", "ostris/ai-toolkit#1054", "gradients", checkpointing_of_frozen_inputs),
    ("padding that is classified", "huggingface/peft#3620, huggingface/transformers#46782", "padding", padding_is_classified),
    ("layers that need the cache", "huggingface/transformers#45242, unslothai/unsloth-zoo#813", "generation", layers_that_need_the_cache),
    ("adapter that is not resumed", "huggingface/lerobot#3459, huggingface/diffusers#12689", "resume", adapter_not_resumed),
    ("merged at another scale", "huggingface/peft#2733", "merged_adapter", merged_at_another_scale),
    ("experts that are not merged", "unslothai/unsloth-zoo#779", "merged_adapter", experts_not_merged),
    ("reference log-probs of zero", "huggingface/trl#5563", "frozen_models", reference_log_probs_of_zero),
    ("masked completions are counted", "huggingface/trl#6369", "policy_loss", masked_completions_are_counted),
    ("tool results are learned", "huggingface/trl#6439", "policy_loss", tool_results_are_learned),
    ("only the KL term is learned", "Goekdeniz-Guelmez/mlx-lm-lora#50", "policy_loss", only_the_kl_term_is_learned),
    ("good completions are unlearned", "", "policy_loss", good_completions_are_unlearned),
    ("baseline of its own", "", "advantages", baseline_of_its_own),
    ("stale log-probs", "", "sampler", stale_log_probs),
)  # fmt: skip
