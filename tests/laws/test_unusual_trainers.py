"""Unusual but legitimate trainers, optimizers, schedules, callbacks, adapters and ways to run: guarded, they train as stock."""

import copy
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    hyperparameter_search,
)
from transformers.trainer_utils import BestRun, HPSearchBackend

from tests.architectures import BY_NAME
from tests.models import VOCAB, tiny_llama, token_rows

from .unusual_run import Run, Table, check_as_stock, check_no_trace

TABLE = Table()


def trainer_with(**methods: Any) -> type[Trainer]:
    """A subclass of the Trainer with other methods."""
    return type("Own", (Trainer,), methods)


def callback_with(**methods: Callable[..., Any]) -> TrainerCallback:
    """A callback of these events, each called with `state` and the keyword arguments of the event."""

    def event(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self, args, state, control, **kwargs):
            method(state, control=control, args=args, **kwargs)

        return call

    return type("Own", (TrainerCallback,), {name: event(method) for name, method in methods.items()})()


def with_optimizer(make: Callable[[nn.Module], Any], schedule: Callable[[Any], Any] | None = None, **more: Any) -> Run:
    """A trainer with an optimizer, and perhaps a schedule, of the user's own."""
    model = tiny_llama()
    optimizer = make(model)
    scheduler = (schedule or (lambda given: torch.optim.lr_scheduler.ConstantLR(given, 0.5, 2)))(optimizer)
    return Run(model, extra={"optimizers": (optimizer, scheduler)}, **more)


# ---- methods that a subclass overrides ----


@TABLE.setup
def a_training_step_of_ones_own() -> Run:
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
        return loss.detach() / self.current_gradient_accumulation_steps

    return Run(trainer_class=trainer_with(training_step=training_step))


@TABLE.slow_setup
def a_training_step_that_calls_backward_itself() -> Run:
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    return Run(trainer_class=trainer_with(training_step=training_step))


@TABLE.slow_setup
def a_training_step_with_two_passes() -> Run:
    def training_step(self, model, inputs, num_items_in_batch=None):
        first = super(own, self).training_step(model, dict(inputs), num_items_in_batch)
        return first + super(own, self).training_step(model, dict(inputs), num_items_in_batch)

    own = trainer_with(training_step=training_step)
    return Run(trainer_class=own)


@TABLE.slow_setup
def adversarial_weights_in_a_training_step() -> Run:
    """Sharpness-aware: gradients at weights that were moved uphill and put back."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super(own, self).training_step(model, dict(inputs), num_items_in_batch)
        moves = [0.01 * p.grad.sign() for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        super(own, self).training_step(model, dict(inputs), num_items_in_batch)
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        return loss

    own = trainer_with(training_step=training_step)
    return Run(trainer_class=own)


@TABLE.slow_setup
def two_forwards_and_their_divergence() -> Run:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        first, second = model(**inputs), model(**inputs)
        logs = [functional.log_softmax(outputs.logits, -1) for outputs in (first, second)]
        return first.loss + second.loss + functional.kl_div(*logs, log_target=True, reduction="batchmean")

    return Run(trainer_class=trainer_with(compute_loss=compute_loss))


@TABLE.slow_setup
def a_gradient_penalty() -> Run:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
        loss = model(inputs_embeds=embedded, labels=inputs["labels"]).loss
        [gradient] = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + gradient.square().sum()

    return Run(trainer_class=trainer_with(compute_loss=compute_loss))


@TABLE.slow_setup
def a_frozen_teacher() -> Run:
    teacher = tiny_llama(seed=9).eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        target = teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
        loss = functional.cross_entropy(outputs.logits.flatten(0, 1), target.flatten(0, 1)) + outputs.loss
        return (loss, outputs) if return_outputs else loss

    return Run(trainer_class=trainer_with(compute_loss=compute_loss))


@TABLE.slow_setup
def losses_that_are_logged_by_name() -> Run:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.parts = {"ce": outputs.loss.item(), "z": outputs.logits.logsumexp(-1).square().mean().item()}
        return outputs.loss + 1e-4 * outputs.logits.logsumexp(-1).square().mean()

    def log(self, logs, *args, **kwargs):
        super(own, self).log({**logs, **self.parts}, *args, **kwargs)

    own = trainer_with(compute_loss=compute_loss, log=log)
    return Run(trainer_class=own)


@TABLE.slow_setup
def weights_of_losses_that_are_learned() -> Run:
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scales = tiny_llama(), nn.Parameter(torch.zeros(2))

        def forward(self, **inputs):
            outputs = self.inner(**inputs)
            losses = torch.stack([outputs.loss, outputs.logits.square().mean()])
            return {"loss": (losses * (-self.scales).exp() + self.scales).sum(), "logits": outputs.logits}

    return Run(Weighted())


@TABLE.slow_setup
def inputs_with_noise_when_they_are_prepared() -> Run:
    def _prepare_inputs(self, inputs):
        inputs = super(own, self)._prepare_inputs(inputs)
        flips = torch.rand(inputs["input_ids"].shape) < 0.2
        return {**inputs, "input_ids": torch.where(flips, 5, inputs["input_ids"])}

    own = trainer_with(_prepare_inputs=_prepare_inputs)
    return Run(trainer_class=own)


def overriding(name: str) -> Callable[[], Run]:
    """A subclass that overrides one method and counts its calls, with any signature."""

    def make() -> Run:
        def method(self, *args, **kwargs):
            self.calls = getattr(self, "calls", 0) + 1
            return getattr(super(own, self), name)(*args, **kwargs)

        own = trainer_with(**{name: method})
        arguments = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        return Run(trainer_class=own, extra={"eval_dataset": token_rows(4)}, arguments=arguments)

    make.__name__ = f"an_overridden_{name.strip('_')}"
    return make


for each in (
    "train", "get_batch_samples", "_inner_training_loop", "_run_epoch", "compute_loss", "training_step", "_prepare_inputs",
    "_clip_grad_norm", "_get_grad_norm", "_maybe_log_save_evaluate", "_save_checkpoint", "save_model", "log", "evaluate",
    "evaluation_loop", "prediction_step", "create_optimizer", "create_scheduler", "get_train_dataloader",
    "floating_point_ops", "_determine_best_metric", "_finalize_training", "autocast_smart_context_manager",
    "get_decay_parameter_names", "store_flos", "_wrap_model",
):  # fmt: skip
    if hasattr(Trainer, each):
        (TABLE.setup if each == "_clip_grad_norm" else TABLE.slow_setup)(overriding(each))


class Slow(Accelerator):
    """An Accelerator with a backward and a clip of its own."""

    def backward(self, loss, **kwargs):
        super().backward(loss * 0.5, **kwargs)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        parameters = list(parameters)
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        for parameter in parameters:
            parameter.grad.mul_(0.9)
        return norm


@TABLE.setup
def an_accelerator_of_ones_own() -> Run:
    def change(trainer: Any) -> None:
        trainer.accelerator.__class__ = Slow

    return Run(change=change)


@TABLE.slow_setup
def an_accelerator_that_is_created_by_the_trainer() -> Run:
    def create(self):
        super(own, self).create_accelerator_and_postprocess()
        self.accelerator.__class__ = Slow

    own = trainer_with(create_accelerator_and_postprocess=create)
    return Run(trainer_class=own, arguments={"max_grad_norm": 0.1})


# ---- optimizers and schedules ----


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow the fast ones of another optimizer every second step."""

    def __init__(self, base: torch.optim.Optimizer):
        self.base, self.count = base, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]
        super().__init__([p for group in base.param_groups for p in group["params"]], {"lr": base.defaults["lr"]})
        self.param_groups, self.state = base.param_groups, base.state

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for group, slow in zip(self.base.param_groups, self.slow, strict=True):
                    for parameter, kept in zip(group["params"], slow, strict=True):
                        kept.lerp_(parameter, 0.5)
                        parameter.copy_(kept)
        return loss


@TABLE.setup
def a_lookahead_optimizer() -> Run:
    return with_optimizer(lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2)))


class ScheduleFree(torch.optim.Optimizer):
    """Averages its iterates; the weights of training and of evaluation are not the same."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, 1 / group["k"])


@TABLE.slow_setup
def a_schedule_free_optimizer() -> Run:
    return with_optimizer(lambda model: ScheduleFree(model.parameters(), 0.05))


@TABLE.slow_setup
def an_optimizer_with_parameters_that_the_model_does_not_have() -> Run:
    extra = nn.Parameter(torch.ones(3))
    extra.grad = torch.ones(3)
    return with_optimizer(lambda model: torch.optim.SGD([*model.parameters(), extra], lr=0.1))


@TABLE.slow_setup
def groups_of_parameters_with_rates_of_their_own() -> Run:
    def make(model):
        head, rest = list(model.lm_head.parameters()), list(model.model.parameters())
        groups = [{"params": head, "lr": 1e-1}, {"params": rest, "weight_decay": 0.3}, {"params": []}]
        return torch.optim.AdamW(groups, lr=1e-3)

    return with_optimizer(make)


@TABLE.slow_setup
def an_optimizer_for_each_half() -> Run:
    class Both(torch.optim.Optimizer):
        def __init__(self, model):
            self.parts = (
                torch.optim.SGD(model.lm_head.parameters(), lr=0.1),
                torch.optim.Adam(model.model.parameters()),
            )
            super().__init__([p for part in self.parts for p in part.param_groups[0]["params"]], {"lr": 0.1})

        def step(self, closure=None):
            for part in self.parts:
                part.step()

    return with_optimizer(Both)


@TABLE.slow_setup
def an_optimizer_class_given_with_its_arguments() -> Run:
    return Run(extra={"optimizer_cls_and_kwargs": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True})})


@TABLE.slow_setup
def hooks_of_an_optimizer() -> Run:
    def make(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda given, *args: [p.grad.mul_(0.5) for p in model.parameters()] and None)
        optimizer.register_step_post_hook(
            lambda given, *args: [p.data.mul_(0.999) for p in model.parameters()] and None
        )
        return optimizer

    return with_optimizer(make)


def optimizer_named(name: str, **arguments: Any) -> Callable[[], Run]:
    def make() -> Run:
        return Run(arguments={"optim": name, **arguments})

    make.__name__ = f"the_optimizer_{name}"
    return make


for each in ("adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"):
    TABLE.slow_setup(optimizer_named(each))


def schedule_named(name: str, **arguments: Any) -> Callable[[], Run]:
    def make() -> Run:
        return Run(arguments={"lr_scheduler_type": name, "warmup_steps": 1, "max_steps": 6, **arguments})

    make.__name__ = f"the_schedule_{name}"
    return make


for each, settings in {
    "cosine_with_restarts": {"num_cycles": 3}, "polynomial": {}, "inverse_sqrt": {}, "warmup_stable_decay": {"num_decay_steps": 2},
    "cosine_with_min_lr": {"min_lr": 1e-5},
}.items():  # fmt: skip
    TABLE.slow_setup(schedule_named(each, lr_scheduler_kwargs=settings))


@TABLE.slow_setup
def a_rate_that_follows_the_evaluation() -> Run:
    arguments = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 5,
        "metric_for_best_model": "eval_loss", "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},
    }  # fmt: skip
    return Run(arguments=arguments, extra={"eval_dataset": token_rows(4)})


@TABLE.slow_setup
def a_schedule_that_moves_the_momentum_too() -> Run:
    return with_optimizer(
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10),
    )


@TABLE.slow_setup
def a_schedule_that_is_no_scheduler_of_torch() -> Run:
    class Steps:
        def __init__(self, optimizer):
            self.optimizer, self.count = optimizer, 0

        def step(self):
            self.count += 1
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / self.count

        def get_last_lr(self):
            return [group["lr"] for group in self.optimizer.param_groups]

        def state_dict(self):
            return {"count": self.count}

    return with_optimizer(lambda model: torch.optim.SGD(model.parameters(), lr=1e-2), Steps)


# ---- hooks, models and adapters ----


@TABLE.slow_setup
def gradients_that_hooks_change() -> Run:
    model = tiny_llama()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model.lm_head.weight.register_post_accumulate_grad_hook(
        lambda parameter: setattr(parameter, "grad", parameter.grad * 2)
    )
    model.model.layers[0].register_full_backward_hook(lambda module, before, after: None)
    return Run(model)


@TABLE.slow_setup
def weights_that_are_parametrized() -> Run:
    model = tiny_llama()
    parametrizations.spectral_norm(model.model.layers[0].mlp.up_proj)
    parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)
    return Run(model)


class Ensemble(nn.Module):
    """Models whose logits are averaged, with a queue and a counter that the forward writes."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(tiny_llama(seed) for seed in range(2))
        self.norm = nn.BatchNorm1d(VOCAB)
        self.register_buffer("queue", torch.zeros(4, VOCAB))
        self.generator, self.count = torch.Generator().manual_seed(3), 0

    def forward(self, input_ids, labels, **kwargs):
        logits = torch.stack([member(input_ids=input_ids).logits for member in self.members]).mean(0)
        logits = self.norm(logits.flatten(0, 1)) + torch.randn(VOCAB, generator=self.generator)
        self.count += 1
        self.queue = torch.cat([self.queue[1:], logits[:1].detach()])
        return functional.cross_entropy(logits, labels.flatten()) + 0.01 * (logits @ self.queue.T).mean(), logits


@TABLE.setup
def an_ensemble_with_state() -> Run:
    return Run(Ensemble())


@TABLE.slow_setup
def experts_with_a_loss_of_their_router() -> Run:
    return Run(BY_NAME["mixtral"].build())


@TABLE.slow_setup
def a_piece_that_is_compiled() -> Run:
    model = tiny_llama()
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")
    return Run(model)


@TABLE.slow_setup
def a_model_in_double_precision() -> Run:
    return Run(tiny_llama(dtype=torch.float64))


@TABLE.slow_setup
def layers_that_are_frozen_but_for_norms() -> Run:
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return Run(model)


def checkpointing(reentrant: bool) -> Callable[[], Run]:
    def make() -> Run:
        arguments = {
            "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
        }  # fmt: skip
        return Run(arguments=arguments)

    make.__name__ = f"checkpointing_{'reentrant' if reentrant else 'not_reentrant'}"
    return make


TABLE.slow_setup(checkpointing(False))
TABLE.slow_setup(checkpointing(True))


def adapted(kind: str, **settings: Any) -> Callable[[], Run]:
    def make() -> Run:
        import peft

        torch.manual_seed(2)
        return Run(peft.get_peft_model(tiny_llama(), getattr(peft, kind)(task_type="CAUSAL_LM", **settings)))

    make.__name__ = "_".join(["an_adapter_of", kind, *(name for name in settings if name.startswith("use_"))])
    return make


for each, settings in (
    ("LoraConfig", {"r": 2, "lora_dropout": 0.2}),
    ("LoraConfig", {"r": 2, "use_dora": True}),
    ("LoraConfig", {"r": 2, "use_rslora": True, "modules_to_save": ["lm_head"]}),
    ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("VeraConfig", {"r": 2, "target_modules": ["q_proj"]}),
    ("LoHaConfig", {"r": 2, "target_modules": ["q_proj"]}),
    ("OFTConfig", {"r": 0, "oft_block_size": 4, "target_modules": ["q_proj"]}),
    ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
):
    TABLE.slow_setup(adapted(each, **settings))


# ---- callbacks that write to things ----


@TABLE.setup
def averaged_weights_kept_by_a_callback() -> Run:
    averages: dict[str, torch.Tensor] = {}

    def on_step_end(state, model, **kwargs):
        for name, value in model.state_dict().items():
            averages[name] = value.clone() if name not in averages else averages[name].lerp(value, 0.5)

    def on_train_end(state, model, **kwargs):
        model.load_state_dict(averages)

    return Run(extra={"callbacks": [callback_with(on_step_end=on_step_end, on_train_end=on_train_end)]})


@TABLE.slow_setup
def layers_unfrozen_by_a_callback() -> Run:
    model = tiny_llama()
    model.model.layers[0].requires_grad_(False)

    def on_step_begin(state, model, **kwargs):
        model.model.layers[0].requires_grad_(state.global_step >= 1)

    return Run(model, extra={"callbacks": [callback_with(on_step_begin=on_step_begin)]})


@TABLE.slow_setup
def gradients_written_by_a_callback() -> Run:
    def on_pre_optimizer_step(state, model, **kwargs):
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3)

    return Run(extra={"callbacks": [callback_with(on_pre_optimizer_step=on_pre_optimizer_step)]})


@TABLE.slow_setup
def weights_clamped_by_a_callback() -> Run:
    def on_optimizer_step(state, model, **kwargs):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)

    return Run(extra={"callbacks": [callback_with(on_optimizer_step=on_optimizer_step)]})


@TABLE.slow_setup
def rates_and_arguments_changed_by_a_callback() -> Run:
    def on_step_end(state, optimizer, args, **kwargs):
        args.max_grad_norm = 0.01
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5

    return Run(extra={"callbacks": [callback_with(on_step_end=on_step_end)]})


@TABLE.slow_setup
def a_weight_added_to_the_optimizer_by_a_callback() -> Run:
    model = tiny_llama()
    model.lm_head.requires_grad_(False)

    def on_epoch_begin(state, model, optimizer, **kwargs):
        if not model.lm_head.weight.requires_grad:
            model.lm_head.requires_grad_()
            optimizer.add_param_group({"params": [model.lm_head.weight], "lr": 1e-3})

    schedule = torch.optim.lr_scheduler.ConstantLR
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    extra = {
        "callbacks": [callback_with(on_epoch_begin=on_epoch_begin)],
        "optimizers": (optimizer, schedule(optimizer)),
    }
    return Run(model, extra=extra)


@TABLE.slow_setup
def a_callback_that_generates_and_evaluates() -> Run:
    def on_step_end(state, model, **kwargs):
        model.eval()
        model.generate(torch.tensor([[4, 5]]), max_new_tokens=3, do_sample=True)
        model.train()

    return Run(extra={"callbacks": [callback_with(on_step_end=on_step_end)]})


@TABLE.slow_setup
def a_callback_that_copies_the_model() -> Run:
    copies: list[nn.Module] = []

    def on_step_end(state, model, **kwargs):
        copies.append(copy.deepcopy(model))

    return Run(extra={"callbacks": [callback_with(on_step_end=on_step_end)]})


@TABLE.slow_setup
def a_callback_that_trains_another_trainer() -> Run:
    def on_epoch_begin(state, args, **kwargs):
        inner = TrainingArguments(
            f"{args.output_dir}/inner", max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            per_device_train_batch_size=2, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(tiny_llama(4), inner, train_dataset=token_rows(8)).train()

    return Run(extra={"callbacks": [callback_with(on_epoch_begin=on_epoch_begin)]})


@TABLE.slow_setup
def a_run_that_stops_early_and_loads_its_best() -> Run:
    arguments = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 6,
        "load_best_model_at_end": True, "save_total_limit": 1, "metric_for_best_model": "eval_loss", "learning_rate": 0.3,
    }  # fmt: skip
    extra = {"eval_dataset": token_rows(4), "callbacks": [EarlyStoppingCallback(1)]}
    return Run(arguments=arguments, extra=extra)


# ---- training arguments ----


def argued(name: str, extra: dict[str, Any] | None = None, **arguments: Any) -> Callable[[], Run]:
    def make() -> Run:
        return Run(arguments=arguments, extra=dict(extra or {}))

    make.__name__ = name
    return make


ARGUED = (
    argued("batches_of_like_length", train_sampling_strategy="group_by_length"),
    argued("rows_in_their_order", train_sampling_strategy="sequential"),
    argued("tokens_that_are_counted", include_num_input_tokens_seen="all"),
    argued("a_batch_size_that_is_searched", auto_find_batch_size=True),
    argued("noise_in_embeddings", neftune_noise_alpha=5.0),
    argued("no_clipping", max_grad_norm=0.0),
    argued("logging_at_the_end_of_epochs", logging_strategy="epoch", max_steps=-1, num_train_epochs=1.5),
    argued("logging_of_the_first_step", logging_first_step=True, logging_steps=2),
    argued("autocast_in_bfloat16", bf16=True),
    argued("a_last_batch_that_is_dropped", dataloader_drop_last=True, per_device_train_batch_size=5, max_steps=6),
    argued("a_group_that_an_epoch_cuts_short", gradient_accumulation_steps=5, max_steps=7),
    argued("more_micro_batches_than_an_epoch", gradient_accumulation_steps=16),
    argued("an_evaluation_at_the_start", {"eval_dataset": token_rows(4)}, eval_on_start=True, eval_strategy="epoch"),
    argued(
        "several_evaluation_sets", {"eval_dataset": {"a": token_rows(4), "b": token_rows(2)}}, eval_strategy="epoch"
    ),
    argued("memory_that_is_measured", skip_memory_metrics=False),
    argued("a_filter_of_the_log_that_is_off", logging_nan_inf_filter=False),
    argued("a_cache_that_is_emptied", torch_empty_cache_steps=1),
    argued("deterministic_algorithms", full_determinism=False, data_seed=11),
)
for each in ARGUED:
    TABLE.slow_setup(each)


# ---- ways to run ----


def again(trainer: Any) -> None:
    trainer.train()
    trainer.train()


@TABLE.setup
def a_run_after_a_run() -> Run:
    return Run(train=again)


@TABLE.slow_setup
def a_run_that_is_interrupted_and_begun_again() -> Run:
    seen: list[int] = []

    def on_step_end(state, **kwargs):
        seen.append(state.global_step)
        if len(seen) == 2:
            raise KeyboardInterrupt

    def train(trainer: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()

    return Run(extra={"callbacks": [callback_with(on_step_end=on_step_end)]}, train=train)


@TABLE.slow_setup
def an_error_of_the_data_that_is_caught() -> Run:
    calls: list[int] = []

    def get_batch_samples(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError
        return super(own, self).get_batch_samples(*args, **kwargs)

    def train(trainer: Any) -> None:
        with pytest.raises(ConnectionError):
            trainer.train()
        trainer.train()

    own = trainer_with(get_batch_samples=get_batch_samples)
    return Run(trainer_class=own, train=train)


@TABLE.slow_setup
def cells_of_a_notebook() -> Run:
    """Each cell is executed in one namespace, the middle one twice, and the last changes the arguments."""
    cells = (
        "trainer.train()",
        "trainer.args.learning_rate = 1e-3; trainer.optimizer = trainer.lr_scheduler = None",
        "result = trainer.train(); _ = result",
        "trainer.evaluate(rows[:4]); predictions = trainer.predict(rows[:4])",
        "trainer.train_dataset = rows[4:]; trainer.train()",
    )

    def train(trainer: Any) -> None:
        space: dict[str, Any] = {"trainer": trainer, "rows": token_rows(24)}
        for cell in cells:
            exec(compile(cell, "<cell>", "exec"), space)

    return Run(train=train)


@TABLE.slow_setup
def a_run_in_a_thread() -> Run:
    def train(trainer: Any) -> None:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                trainer.train()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors

    return Run(train=train)


@TABLE.slow_setup
def a_resume_in_the_middle_of_an_epoch() -> Run:
    def train(trainer: Any) -> None:
        trainer.train()
        trainer.args.max_steps = 5
        trainer.train(resume_from_checkpoint=True)

    return Run(arguments={"save_strategy": "steps", "save_steps": 2}, train=train)


@TABLE.slow_setup
def a_resume_without_skipping_data() -> Run:
    def train(trainer: Any) -> None:
        trainer.train()
        trainer.args.max_steps = 5
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")

    return Run(arguments={"save_strategy": "steps", "save_steps": 2, "ignore_data_skip": True}, train=train)


@TABLE.slow_setup
def a_model_made_anew_for_each_run() -> Run:
    return Run(model=None, extra={"model_init": lambda: tiny_llama()}, train=again)


@dataclass
class Trial:
    """What the Trainer asks of a trial of optuna, which is not installed."""

    number: int

    @property
    def params(self) -> dict[str, float]:
        return {"learning_rate": 10.0 ** -(self.number + 1)}


class Trials:
    """A search over a few rates."""

    def ensure_available(self) -> None:
        pass

    def run(self, trainer: Any, n_trials: int, direction: str, **kwargs: Any) -> BestRun:
        found = []
        for number in range(n_trials):
            trainer.objective = None
            trainer.train(resume_from_checkpoint=None, trial=Trial(number))
            found.append(trainer.evaluate()["eval_loss"])
        best = min(range(n_trials), key=found.__getitem__)
        return BestRun(str(best), found[best], {})


def params_of(trial: Trial) -> dict[str, float]:
    return trial.params


def search(trainer: Any) -> None:
    backends = hyperparameter_search.ALL_HYPERPARAMETER_SEARCH_BACKENDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends, HPSearchBackend.OPTUNA, Trials)
        patch.setattr("transformers.integrations.hp_params", params_of)  # asks which backend is installed
        trainer.hyperparameter_search(backend="optuna", n_trials=3, direction="minimize", hp_space=params_of)


@TABLE.setup
def a_search_of_hyperparameters() -> Run:
    extra = {"model_init": lambda trial=None: tiny_llama(), "eval_dataset": token_rows(4)}
    return Run(model=None, extra=extra, train=search)


@TABLE.slow_setup
def a_termination_that_saves_a_checkpoint_in_time() -> Run:
    """The host's own callback for preemptible machines: SIGTERM in step 1, a checkpoint and the end of the run after it."""

    def on_step_begin(state, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def train(trainer: Any) -> None:
        before = signal.getsignal(signal.SIGTERM)
        try:
            trainer.train()
        finally:
            signal.signal(signal.SIGTERM, before)

    arguments = {"enable_jit_checkpoint": True, "max_steps": 4}
    extra = {"callbacks": [callback_with(on_step_begin=on_step_begin)]}
    return Run(arguments=arguments, extra=extra, train=train)


@TABLE.slow_setup
def a_termination_that_the_script_handles() -> Run:
    """SIGTERM ends the run after its step; the script saves and begins again from there."""
    asked: list[int] = []

    def on_step_begin(state, **kwargs):
        if state.global_step == 1 and not asked:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(state, control, **kwargs):
        control.should_training_stop = control.should_save = len(asked) == 1
        asked.extend(asked[:1])

    def train(trainer: Any) -> None:
        before = signal.signal(signal.SIGTERM, lambda *args: asked.append(1))
        try:
            trainer.train()
            trainer.train(resume_from_checkpoint=True)
        finally:
            signal.signal(signal.SIGTERM, before)

    callbacks = [callback_with(on_step_begin=on_step_begin, on_step_end=on_step_end)]
    return Run(extra={"callbacks": callbacks}, train=train, arguments={"max_steps": 4})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
@pytest.mark.parametrize("make", TABLE.cases)
def test_an_unusual_trainer_trains_as_stock_does(make, tmp_path):
    check_as_stock(make, tmp_path)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile.module.` when there are global hooks"
)  # by which it is spoiled
@pytest.mark.parametrize("make", TABLE.cases_of("a_run_after_a_run"))
def test_a_bad_step_of_an_unusual_trainer_leaves_no_trace(make, tmp_path):
    check_no_trace(make, tmp_path)


def test_the_tables_are_large_enough():
    from .test_unusual_setups import TABLE as OTHER

    names = [case.id for case in (*TABLE.cases, *OTHER.cases)]
    assert len(names) == len(set(names)) >= 120
