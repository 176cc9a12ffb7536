"""Distillation: a float16 student with routed experts learns from a teacher with another tokenizer.

The loss has two terms: cross-entropy (ce) and the divergence from the teacher (kd). kd compares positions at which both
tokenizers predict the same characters, over the tokens they share (see `examples.token_alignment`). A
non-finite kd is dropped and reported as an event, and the step uses ce alone. The router has its own learning rate. The
validation perplexity is logged after every epoch, and the best model is kept. By default, models and texts are built in
code; nothing is downloaded. Planted failures:

    teacher_row  a word of one text has a NaN embedding in the teacher, as if its row had never been initialized
    eps          the optimizer has the usual eps of 1e-8, which is 0 in float16

With eps, an update with finite loss and gradients makes weights NaN. The guard names the cause, goes back to the state from
before and continues with a larger eps. The recipe's default is a fused AdamW, which computes in float32, with an eps of 1e-4.

    python recipes/distill.py
    python recipes/distill.py --plant eps
    python recipes/distill.py --plant none --compare false --model_dtype float32 --temperature 1.5
    python recipes/distill.py --compare false --plant none --preset balanced --model_name_or_path student \\
        --teacher_name_or_path teacher --train_file texts.txt
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_nanguard import (
    ArgumentError,
    GuardedTrainingArguments,
    bounded_loss,
    distillation_loss,
    examples,
    guarded,
    masked_cross_entropy,
    soft_cap,
    weigh_term,
)
from hf_nanguard.examples import calendar_words, token_alignment

DEFAULTS = {
    "compare": True, "output_dir": "runs/distill", "num_train_epochs": 4, "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 16, "optim": "adamw_torch_fused", "adam_epsilon": 1e-4, "max_grad_norm": 0.5,
    "logging_steps": 5, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1,
    "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "report_to": ["none"],
    "remove_unused_columns": False, "dataloader_pin_memory": False,
}  # fmt: skip
PLANTED = {
    "none": "No failure is planted.",
    "teacher_row": f"Planted: the teacher's embedding of {calendar_words.BAD_WORD!r}, a word of one text, is NaN (term kd).",
    "eps": "Planted: AdamW with an eps of 1e-8, which is 0 in float16.",
}


@dataclass
class ScriptArguments:
    """Arguments of this recipe besides the guarded training arguments."""

    plant: Literal["teacher_row", "eps", "none"] = examples.argument("teacher_row", "Failure to plant, or none.")
    student_lr: float | None = examples.argument(None, "Learning rate: by default 5e-3, or 1e-5 for a given student.")
    router_lr: float | None = examples.argument(None, "Learning rate of the router; same defaults as --student_lr.")
    temperature: float = examples.argument(2.0, "Temperature of the logits in kd.")
    alpha_kd: float = examples.argument(0.1, "Weight of the divergence from the teacher.")
    alpha_ce: float = examples.argument(0.9, "Weight of the cross-entropy.")
    model_dtype: Literal["float16", "bfloat16", "float32"] = examples.argument("float16", "Dtype of the student.")
    logits_cap: float | None = examples.argument(
        None, "Smooth cap of the student's logits, e.g. 30; also for sampling."
    )
    loss_bound: float | None = examples.argument(None, "Above it ce grows logarithmically, with a gradient; e.g. 6.")
    total_loss_bound: float | None = examples.argument(None, "The same for the weighted sum of both terms.")
    model_name_or_path: str | None = examples.argument(None, "The student. Built in code by default.")
    teacher_name_or_path: str | None = examples.argument(None, "The teacher. Built in code by default.")
    allow_pickle: bool = examples.argument(False, examples.PICKLE_HELP)
    train_file: str | None = examples.argument(None, "Texts, one per line; the last 10 % are for validation.")
    max_length: int = examples.argument(512, "Longer texts are truncated to this number of tokens.")
    num_rows: int = examples.argument(128, "Number of built-in training texts.")
    teacher_steps: int = examples.argument(120, "Training steps of the built-in teacher.")

    def __post_init__(self) -> None:
        names = [self.model_name_or_path, self.teacher_name_or_path, self.train_file]
        if any(names) and not all(names):
            raise ValueError("--model_name_or_path, --teacher_name_or_path and --train_file must be given together.")
        if all(names) and self.plant == "teacher_row":
            raise ValueError("--plant teacher_row needs the built-in models. Add --plant none or --plant eps.")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"--temperature must be positive and finite, got {self.temperature}.")
        usual = 1e-5 if all(names) else 5e-3
        self.student_lr = usual if self.student_lr is None else self.student_lr
        self.router_lr = usual if self.router_lr is None else self.router_lr


def make_parser() -> examples.RecipeParser:
    """Returns the parser of this recipe's arguments, those of the guard, `--config` and `--preset`."""
    types = (ScriptArguments, GuardedTrainingArguments)
    kept = ("student_lr", "router_lr", "nanguard_skip_grad_norm")
    return examples.RecipeParser(types, "distill", DEFAULTS, kept=kept, description=__doc__)


class DistillationTrainer(Trainer):
    """A plain `Trainer` with ce and kd. If guarded, they are checked by name, and a non-finite kd is dropped."""

    model: nn.Module

    def __init__(
        self, *args, script: ScriptArguments, teacher: nn.Module, shared: tuple[list[int], list[int]], **kwargs
    ):
        super().__init__(*args, **kwargs)
        self.script = script
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.shared = [torch.tensor(ids, device=self.args.device) for ids in shared]  # the student's, the teacher's
        self.model_accepts_loss_kwargs = False  # both terms are means over the micro-batch

    def get_teacher_logits(self, inputs: dict[str, Tensor]) -> Tensor:
        """Returns the teacher's logits of shared tokens at the student's positions; those without a pair have any values."""
        with torch.no_grad():
            ids, mask = inputs["teacher_input_ids"], inputs["teacher_attention_mask"]
            logits = self.teacher(input_ids=ids, attention_mask=mask).logits[..., self.shared[1]]
        places = inputs["teacher_positions"].clamp(min=0).unsqueeze(-1)
        return logits.gather(1, places.expand(*places.shape[:2], logits.shape[-1]))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        script = self.script
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.logits if script.logits_cap is None else soft_cap(outputs.logits, script.logits_cap)
        labels = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        ce = masked_cross_entropy(logits, labels)
        if not model.training:  # the perplexity is of ce alone
            return (ce, {"logits": logits}) if return_outputs else ce
        ce = ce if script.loss_bound is None else bounded_loss(ce, script.loss_bound)
        paired = inputs["teacher_positions"] >= 0
        kd = distillation_loss(logits[..., self.shared[0]], self.get_teacher_logits(inputs), script.temperature, paired)
        loss = weigh_term(self, "ce", ce, script.alpha_ce, "keep") + weigh_term(self, "kd", kd, script.alpha_kd, "drop")
        loss = loss if script.total_loss_bound is None else bounded_loss(loss, script.total_loss_bound)
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        routers = {p for name, p in self.model.named_parameters() if {"gate", "router"} & set(name.split("."))}
        if not routers:
            print("The student has no router, so --router_lr is ignored.")
        for group in list(optimizer.param_groups):
            if mine := [p for p in group["params"] if p in routers]:
                group["params"] = [p for p in group["params"] if p not in routers]
                optimizer.add_param_group({**group, "params": mine, "lr": self.script.router_lr})
        return optimizer

    def log(self, logs, *args, **kwargs):
        if "eval_loss" in logs:
            logs["eval_perplexity"] = math.exp(min(logs["eval_loss"], 700))
        super().log(logs, *args, **kwargs)


GuardedDistillationTrainer = guarded(DistillationTrainer)


def measure(trainer: Trainer) -> examples.Figures:
    """Returns averages over the logged rows, the best validation perplexity, and what the guard dropped."""
    history = trainer.state.log_history
    figures: examples.Figures = {}
    for name, key in {"loss": "loss", "kd": "nanguard/term/kd", "ce": "nanguard/term/ce"}.items():
        values = [row[key] for row in history if key in row]
        figures |= {f"average logged {name}": sum(values) / len(values)} if values else {}
    if isinstance(trainer, GuardedDistillationTrainer):
        last = {name: value for row in history for name, value in row.items()}
        figures["success rate"] = last.get("nanguard/success_rate", 1.0)
        figures["kd dropped"] = f"{last.get('nanguard/dropped_terms/kd', 0)} times"
    figures["best perplexity"] = min(
        (row["eval_perplexity"] for row in history if "eval_perplexity" in row), default=math.nan
    )
    figures["best model"] = trainer.state.best_model_checkpoint or "none"
    return figures


def load_task(student: str, teacher: str, train_file: str, allow_pickle: bool) -> calendar_words.Task:
    """Loads models, tokenizers and texts; the last 10 % of the texts are for validation."""
    if not Path(train_file).is_file():
        raise ArgumentError(f"--train_file must be a text file, got {train_file!r}. There is no such file.")
    texts = [line for line in Path(train_file).read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(texts) < 2:
        raise ArgumentError(f"--train_file must contain at least 2 texts, got {len(texts)} in {train_file!r}.")
    student_model, student_tokenizer = load_model(student, "--model_name_or_path", allow_pickle)
    teacher_model, teacher_tokenizer = load_model(teacher, "--teacher_name_or_path", allow_pickle)
    tokenizers = (student_tokenizer, teacher_tokenizer)
    num_train = len(texts) - max(1, len(texts) // 10)
    return calendar_words.Task(student_model, teacher_model, tokenizers, texts[:num_train], texts[num_train:])


def load_model(name: str, flag: str, allow_pickle: bool) -> tuple[nn.Module, Any]:
    """Loads a model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(name, **examples.require_safetensors(name, flag, allow_pickle))
    tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer.is_fast:
        raise ArgumentError(f"{flag} must have a fast tokenizer, which returns offsets, got {name!r}.")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


@examples.one_sentence
def build_trainer(
    script_args: ScriptArguments,
    training_args: GuardedTrainingArguments,
    trainer_class: type = GuardedDistillationTrainer,
) -> Any:
    """Returns a trainer of both models and the texts, stock or guarded."""
    if training_args.learning_rate not in (TrainingArguments.learning_rate, script_args.student_lr):
        raise ArgumentError(f"Use --student_lr instead of --learning_rate here, got {training_args.learning_rate}.")
    assert script_args.student_lr is not None  # __post_init__ has set it
    training_args.learning_rate = script_args.student_lr
    if script_args.plant == "eps":
        training_args.optim, training_args.adam_epsilon = "adamw_torch", 1e-8

    # Models and texts
    student, teacher, train_file = (
        script_args.model_name_or_path,
        script_args.teacher_name_or_path,
        script_args.train_file,
    )
    if student and teacher and train_file:
        task = load_task(student, teacher, train_file, script_args.allow_pickle)
    else:
        planted = script_args.plant == "teacher_row"
        task = calendar_words.build_task(script_args.num_rows, script_args.teacher_steps, training_args.seed, planted)
    shared = token_alignment.share_vocabulary(*task.tokenizers)
    if not shared[0]:
        raise ArgumentError("Student and teacher share no tokens, so they cannot be compared. Choose another teacher.")

    # Trainer
    return trainer_class(
        task.student.to(getattr(torch, script_args.model_dtype)),
        training_args,
        train_dataset=[{"text": text} for text in task.train],
        eval_dataset=[{"text": text} for text in task.validation],
        data_collator=token_alignment.AlignedCollator(*task.tokenizers, script_args.max_length),
        processing_class=task.tokenizers[0],
        script=script_args,
        teacher=task.teacher,
        shared=shared,
    )


def main(
    flags: examples.RecipeFlags, script_args: ScriptArguments, training_args: GuardedTrainingArguments
) -> list[examples.Outcome]:
    """Compares with a stock run, or trains and saves; returns the outcomes, the guarded one last."""
    build, planted = partial(build_trainer, script_args), PLANTED[script_args.plant]
    if flags.compare:
        classes = (DistillationTrainer, GuardedDistillationTrainer)
        return examples.compare_runs(build, classes, training_args, planted, measure)

    # Train and save
    trainer = build(training_args)
    with examples.guarded_run(trainer, measure, planted) as outcome:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model(training_args.output_dir)
    return [outcome]


if __name__ == "__main__":
    sys.exit(examples.run_script(make_parser, main))
