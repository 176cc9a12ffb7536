"""Distillation: a float16 student with routed experts learns from a teacher with another tokenizer.

The loss has two terms: cross-entropy (ce) and the divergence from the teacher (kd). kd compares positions at which both
tokenizers predict the same characters, over the tokens they share (see `examples.token_alignment`). A
non-finite kd is dropped and reported as an event, and the step uses ce alone. The router has its own learning rate. The
validation perplexity is measured after every epoch, and the best model is kept. By default, models and texts are built in
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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainingArguments

from hf_nanguard import (
    ArgumentError,
    GuardedTrainerMixin,
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

MASKED = -100
Tokenizers = Sequence[PreTrainedTokenizerBase]  # the student's and the teacher's
Parts = tuple[
    nn.Module, nn.Module, Tokenizers, list[str], list[str]
]  # student, teacher, texts, and texts for validation
NUM_VALIDATION = 48
DEFAULTS = {
    "compare": True,
    "output_dir": "runs/distill",
    "num_train_epochs": 4,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 16,
    "optim": "adamw_torch_fused",
    "adam_epsilon": 1e-4,
    "max_grad_norm": 0.5,
    "logging_steps": 5,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "report_to": ["none"],
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
}
PLANTED = {
    "none": "No failure is planted.",
    "teacher_row": f"Planted: the teacher's embedding of {calendar_words.BAD_WORD!r}, a word of one text, is NaN (term kd).",
    "eps": "Planted: AdamW with an eps of 1e-8, which is 0 in float16.",
}


@dataclass
class ScriptArguments:
    """Arguments of this recipe besides the guarded training arguments."""

    plant: Literal["teacher_row", "eps", "none"] = examples.argument("teacher_row", "Failure to plant, or none.")
    student_lr: float | None = examples.argument(
        None, "Learning rate. Defaults to 1e-5 for a given student, 5e-3 for the built-in one."
    )
    router_lr: float | None = examples.argument(None, "Learning rate of the router; same defaults as --student_lr.")
    temperature: float = examples.argument(2.0, "Temperature of the logits in kd.")
    alpha_kd: float = examples.argument(0.1, "Weight of the divergence from the teacher.")
    alpha_ce: float = examples.argument(0.9, "Weight of the cross-entropy.")
    model_dtype: Literal["float16", "bfloat16", "float32"] = examples.argument("float16", "Dtype of the student.")
    logits_cap: float | None = examples.argument(
        None, "Smooth cap of the student's logits, e.g. 30; use the same cap for sampling."
    )
    loss_bound: float | None = examples.argument(
        None, "Above this, ce grows logarithmically and keeps a gradient; e.g. 6."
    )
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
        self.named = [name for name in names if name is not None]
        if self.named and len(self.named) < len(names):
            raise ValueError("--model_name_or_path, --teacher_name_or_path and --train_file must be given together.")
        if self.named and self.plant == "teacher_row":
            raise ValueError("--plant teacher_row needs the built-in models. Add --plant none or --plant eps.")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"--temperature must be positive and finite, got {self.temperature}.")
        usual = 1e-5 if self.named else 5e-3
        self.student_lr = usual if self.student_lr is None else self.student_lr
        self.router_lr = usual if self.router_lr is None else self.router_lr


def make_parser() -> examples.RecipeParser:
    """Returns the parser of this recipe's arguments, those of the guard, `--config` and `--preset`."""
    types = (ScriptArguments, GuardedTrainingArguments)
    return examples.RecipeParser(
        types,
        "distill",
        DEFAULTS,
        kept=("student_lr", "router_lr", "nanguard_skip_grad_norm"),
        description=__doc__,
    )


def build_parts(script: ScriptArguments, seed: int) -> Parts:
    """Builds models, tokenizers and texts in code."""
    tokenizers = calendar_words.build_tokenizers()
    teacher = calendar_words.build_teacher(tokenizers[1], script.teacher_steps, seed)
    planted = script.plant == "teacher_row"
    if planted:
        calendar_words.spoil_word(teacher, tokenizers[1])
    texts = calendar_words.build_texts(script.num_rows, seed=1, bad_text=script.num_rows // 2 if planted else None)
    validation = calendar_words.build_texts(NUM_VALIDATION, seed=2)
    return calendar_words.build_student(len(tokenizers[0]), seed), teacher, tokenizers, texts, validation


def load_parts(student: str, teacher: str, train_file: str, *, allow_pickle: bool) -> Parts:
    """Loads the models and texts that the user named."""
    texts = [line for line in Path(train_file).read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(texts) < 2:
        raise ArgumentError(f"--train_file must contain at least 2 texts, got {len(texts)} in {train_file!r}.")
    named = {"--model_name_or_path": student, "--teacher_name_or_path": teacher}
    safe = {name: examples.require_safetensors(name, flag, allow_pickle) for flag, name in named.items()}
    tokenizers = [AutoTokenizer.from_pretrained(name) for name in (student, teacher)]
    for tokenizer in tokenizers:
        if not tokenizer.is_fast:
            raise ArgumentError(
                f"Tokenizers must be fast ones, which return offsets; {tokenizer.name_or_path!r} is not."
            )
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    models = [AutoModelForCausalLM.from_pretrained(name, **safe[name]) for name in (student, teacher)]
    num_train = len(texts) - max(1, len(texts) // 10)
    return models[0], models[1], tokenizers, texts[:num_train], texts[num_train:]


def collate(rows: list[dict[str, str]], tokenizers: Tokenizers, max_length: int) -> dict[str, Tensor]:
    """Tokenizes texts with both tokenizers, truncated to `max_length` tokens, and aligns the positions."""
    ours, theirs = (
        tokenizer(
            [row["text"] for row in rows], return_tensors="pt", padding=True, padding_side="right", truncation=True,
            max_length=max_length, return_offsets_mapping=True,
        )
        for tokenizer in tokenizers
    )  # fmt: skip
    spans = zip(ours["offset_mapping"].tolist(), theirs["offset_mapping"].tolist(), strict=True)
    return {
        "input_ids": ours["input_ids"],
        "attention_mask": ours["attention_mask"],
        "labels": ours["input_ids"].masked_fill(ours["attention_mask"] == 0, MASKED),
        "teacher_input_ids": theirs["input_ids"],
        "teacher_attention_mask": theirs["attention_mask"],
        "teacher_positions": torch.tensor([token_alignment.align_positions(*pair) for pair in spans]),
    }


def perplexity(loss: float) -> float:
    """Returns exp(loss), or inf if that overflows."""
    return torch.tensor(loss, dtype=torch.float64).exp().item()


class DistillationTrainer(Trainer):
    """A plain `Trainer` with ce and kd. If guarded, they are checked by name, and a non-finite kd is dropped."""

    def __init__(self, *args, script: ScriptArguments, teacher: nn.Module, shared: Sequence[list[int]], **kwargs):
        super().__init__(*args, **kwargs)
        self.script = script
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.shared = tuple(torch.tensor(ids, device=self.args.device) for ids in shared)
        self.model_accepts_loss_kwargs = False  # both terms are means over the micro-batch
        self.best_perplexity = math.inf

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
        labels = nn.functional.pad(inputs["labels"], (0, 1), value=MASKED)[:, 1:]
        ce = masked_cross_entropy(logits, labels)
        if not model.training:  # the perplexity is of ce alone
            return (ce, {"logits": logits}) if return_outputs else ce
        ce = ce if script.loss_bound is None else bounded_loss(ce, script.loss_bound)
        loss = weigh_term(self, "ce", ce, script.alpha_ce, "keep")
        paired = inputs["teacher_positions"] >= 0
        kd = distillation_loss(logits[..., self.shared[0]], self.get_teacher_logits(inputs), script.temperature, paired)
        loss = loss + weigh_term(self, "kd", kd, script.alpha_kd, "drop")
        loss = loss if script.total_loss_bound is None else bounded_loss(loss, script.total_loss_bound)
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        assert self.model is not None
        routers = {id(p) for name, p in self.model.named_parameters() if {"gate", "router"} & set(name.split("."))}
        if not routers:
            print("The student has no router, so --router_lr is ignored.")
        for group in list(optimizer.param_groups):
            mine = [p for p in group["params"] if id(p) in routers]
            group["params"] = [p for p in group["params"] if id(p) not in routers]
            if mine:
                optimizer.add_param_group({**group, "params": mine, "lr": self.script.router_lr})
        return optimizer

    def log(self, logs, *args, **kwargs):
        if "eval_loss" in logs:
            logs["eval_perplexity"] = perplexity(logs["eval_loss"])
            if self.is_world_process_zero():
                self.print_validation(logs["eval_perplexity"])
        super().log(logs, *args, **kwargs)

    def print_validation(self, score: float) -> None:
        """Prints the validation perplexity, with the last logged loss and its terms."""
        last: dict[str, float] = next((row for row in reversed(self.state.log_history) if "loss" in row), {})
        terms = [f"{name}={last[key]:.4f}" for name in ("kd", "ce") if (key := f"nanguard/term/{name}") in last]
        rate = f" ({', '.join(terms)}) success_rate={last.get('nanguard/success_rate', 1.0):.0%}" if terms else ""
        mark = ", best so far" if score < self.best_perplexity else ""
        self.best_perplexity = score if mark else self.best_perplexity
        loss = f"loss={last.get('loss', math.nan):.4f}{rate}"
        print(f"  step {self.state.global_step}: {loss}, validation perplexity {score:.2f}{mark}")


GuardedDistillationTrainer = guarded(DistillationTrainer)


def measure(trainer: Trainer) -> examples.Figures:
    """Returns averages of the run and its best validation perplexity; only the guard knows the terms."""
    names = {"loss": "loss", "kd": "nanguard/term/kd", "ce": "nanguard/term/ce"}
    logged = {name: [row[key] for row in trainer.state.log_history if key in row] for name, key in names.items()}
    rate = "unknown"
    if isinstance(trainer, GuardedTrainerMixin):
        counter = trainer.nanguard.guard.counter
        rate = f"{counter.success_rate:.0%}, kd dropped {counter.dropped_terms.get('kd', 0)} times on rank 0"
    best = trainer.state.best_metric
    return {
        **{f"average {name}": sum(v) / len(v) if v else "unknown" for name, v in logged.items()},
        "success rate": rate,
        "best perplexity": math.nan if best is None else perplexity(best),
        "best model": trainer.state.best_model_checkpoint or "none",
    }


@examples.one_sentence
def build_trainer(
    script_args: ScriptArguments,
    training_args: GuardedTrainingArguments,
    trainer_class: type = GuardedDistillationTrainer,
) -> Any:
    """Returns a trainer of both models and the texts, stock or guarded."""
    if training_args.learning_rate not in (TrainingArguments.learning_rate, script_args.student_lr):
        raise ArgumentError(f"Use --student_lr instead of --learning_rate here, got {training_args.learning_rate}.")
    assert script_args.student_lr is not None  # set by its dataclass
    training_args.learning_rate = script_args.student_lr
    if script_args.plant == "eps":
        training_args.optim, training_args.adam_epsilon = "adamw_torch", 1e-8

    # Models and data
    parts = (
        load_parts(*script_args.named, allow_pickle=script_args.allow_pickle)
        if script_args.named
        else build_parts(script_args, training_args.seed)
    )
    student, teacher, tokenizers, *texts = parts
    train, validation = ([{"text": text} for text in part] for part in texts)
    shared = token_alignment.share_vocabulary(*tokenizers)
    if not shared[0]:
        raise ArgumentError("Student and teacher share no tokens, so they cannot be compared. Choose another teacher.")

    # Trainer
    return trainer_class(
        student.to(getattr(torch, script_args.model_dtype)), training_args, train_dataset=train, eval_dataset=validation,
        data_collator=partial(collate, tokenizers=tokenizers, max_length=script_args.max_length),
        processing_class=tokenizers[0], script=script_args, teacher=teacher, shared=shared,
    )  # fmt: skip


def main(
    flags: examples.RecipeFlags, script_args: ScriptArguments, training_args: GuardedTrainingArguments
) -> list[examples.Outcome]:
    """Compares with a stock run, or trains and saves; returns the outcomes, the guarded one last."""
    build, planted = partial(build_trainer, script_args), PLANTED[script_args.plant]
    if flags.compare:
        return examples.compare_runs(
            build, (DistillationTrainer, GuardedDistillationTrainer), training_args, planted, measure
        )

    # Train and save
    trainer = build(training_args)
    with examples.guarded_run(trainer, measure, planted) as outcome:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model(training_args.output_dir)
    return [outcome]


if __name__ == "__main__":
    sys.exit(examples.run_script(make_parser, main))
