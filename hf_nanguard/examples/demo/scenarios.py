"""The acts of `nanguard demo`: each plants one failure and runs stock and guarded on it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ...hf.guarded_trainer import guarded
from ...hf.trainer.arguments import GuardArguments
from ..planted_failures import blank_scores
from ..tasks import sums as arithmetic
from .scenario_runner import Run, Scenario, ScenarioRunner
from .small_sft import (
    BATCH_SIZE,
    HIGHEST,
    WORDS,
    AnswerTrainer,
    Watch,
    build_rows,
    build_tokenizer,
    build_trainer,
    cut_off,
    measure_loss,
    show,
)

SAMPLING_STEPS, GROUP = 45, 16
SILENT_STEPS, SAVE_STEPS = 40, 10
GROWING_STEPS, DOUBLING_STEPS = 90, 6


def _blame(event: dict[str, Any] | None, *fields: str) -> list[str]:
    """Returns a line of what was found to blame; none if nothing was."""
    if event is None:
        return []
    known = {
        **event["values"],
        **{name: value for name, value in {**event, **event["culprit"]}.items() if value is not None},
    }
    parts = [
        f"row {', '.join(map(str, known[name]))}" if name == "rows" else known[name] for name in fields if name in known
    ]
    return [f"blamed: {', '.join(parts)}"]


def play_bad_row(stage: ScenarioRunner) -> Scenario:
    """One row without an answer makes a mean of 0 / 0. A fourth run shows what the guarded one should have come to."""
    steps, seed = stage.steps, stage.seed
    bad_step = steps // 3
    bad_row = bad_step * BATCH_SIZE + 2
    healthy = build_rows(build_tokenizer(), steps * BATCH_SIZE, seed)
    poisoned = [cut_off(row) if i == bad_row else row for i, row in enumerate(healthy)]
    without = healthy[: bad_step * BATCH_SIZE] + healthy[(bad_step + 1) * BATCH_SIZE :]
    stage.tell(
        f"One bad row. Of {len(poisoned)} rows, row {bad_row} was cut off before its answer: all its labels are masked, so "
        f"its mean loss is 0/0. It comes at step {bad_step} of {steps}."
    )

    def run(title: str, name: str, rows: list, guard: GuardArguments | None = None) -> Run:
        build = partial(build_trainer, rows, seed=seed, guard=guard)
        return stage.run(title, name, len(rows) // BATCH_SIZE, lambda folder, watch: build(folder, watch=watch))

    fine = run("stock, healthy data", "healthy", healthy)
    stock = run("stock, one bad row", "poisoned", poisoned)
    guarded_run = run("guarded, one bad row", "guarded", poisoned, GuardArguments())
    control = run("stock, without that batch", "without", without)
    expected = dict(control.trainer.model.named_parameters())
    same = [torch.equal(p, expected[name]) for name, p in guarded_run.trainer.model.named_parameters()]
    losses, blamed = stock.outcome.losses, guarded_run.find_event("loss_nonfinite")
    return Scenario(
        f"one bad row in {len(poisoned)}",
        [
            stock.weights,
            f"steps lost: {stock.num_lost} of {steps}",
            f"logged loss: {' '.join([show(losses[0]), '...', *map(show, losses[-2:])])}",
            f"held-out loss: {show(measure_loss(stock.trainer, seed))}",
        ],
        [
            guarded_run.weights,
            f"steps lost: {guarded_run.num_lost} of {steps}",
            f"held-out loss: {show(measure_loss(guarded_run.trainer, seed))} (on healthy data: "
            f"{show(measure_loss(fine.trainer, seed))})",
            f"bit-identical to a run that never saw that batch: {sum(same)} of {len(same)} weight tensors",
            *_blame(blamed, "cause", "source", "rows"),
        ],
        guarded_run.evidence,
    )


def play_bad_sampling(stage: ScenarioRunner) -> Scenario:
    """Scores that are NaN when a token is drawn end stock GRPO; the guarded one leaves that completion out."""
    bad_step = SAMPLING_STEPS // 3
    stage.tell(
        f"GRPO that samples from NaN. A model that has seen a few sums learns them by rewards; at step {bad_step} of {SAMPLING_STEPS} the scores of "
        "one completion are NaN when its tokens are drawn."
    )

    def build(guard: bool, folder: Path, watch: Watch) -> Any:
        args = GRPOConfig(
            output_dir=str(folder), max_steps=SAMPLING_STEPS, per_device_train_batch_size=8 * GROUP, num_generations=GROUP,
            gradient_accumulation_steps=1, max_completion_length=3, learning_rate=3e-3, lr_scheduler_type="constant",
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
            gradient_checkpointing=False, dataloader_pin_memory=False, seed=stage.seed,
        )  # fmt: skip
        trainer = (guarded(GRPOTrainer) if guard else GRPOTrainer)(
            arithmetic.build_beginner(stage.seed), reward_funcs=arithmetic.reward_sum, args=args, callbacks=[watch],
            train_dataset=arithmetic.build_prompts(512, stage.seed), processing_class=arithmetic.build_tokenizer(),
        )  # fmt: skip
        blank_scores(trainer.model, bad_step)
        return trainer

    stock = stage.run("stock GRPO", "grpo-stock", SAMPLING_STEPS, partial(build, False), "reward")
    guarded_run = stage.run("guarded GRPO", "grpo-guarded", SAMPLING_STEPS, partial(build, True), "reward")
    rewards = [row["reward"] for row in guarded_run.trainer.state.log_history if row.get("reward") is not None]
    told = guarded_run.find_event("logits_nonfinite")
    return Scenario(
        "GRPO that samples from NaN",
        [stock.end],
        [
            f"{guarded_run.end}, mean reward {sum(rewards[:5]) / 5:.2f} -> {sum(rewards[-5:]) / 5:.2f}",
            *([] if told is None else [f"told: {told['signal']}, {told['action']}; that completion teaches nothing"]),
        ],
        guarded_run.evidence,
    )


class SpoilMoment(TrainerCallback):
    """Writes a NaN into Adam's memory of one word after a step, as a damaged optimizer file would bring it along."""

    def __init__(self, word: int, step: int):
        self.word, self.step = word, step

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == self.step:
            optimizer.optimizer.state[model.get_input_embeddings().weight]["exp_avg"][self.word, 0] = torch.nan


def play_silence(stage: ScenarioRunner) -> Scenario:
    """A NaN that neither loss nor gradient ever shows: the stock run saves it, the guarded one does not."""
    word, bad_step = WORDS.index(str(HIGHEST - 1)), SILENT_STEPS // 2 + SAVE_STEPS // 2
    stage.tell(
        f'A silent NaN. After step {bad_step} of {SILENT_STEPS}, Adam\'s memory of the word "{WORDS[word]}" holds a NaN. No batch '
        f"uses that word, so loss and gradients stay finite. A checkpoint is saved every {SAVE_STEPS} steps."
    )
    rows = build_rows(build_tokenizer(), SILENT_STEPS * BATCH_SIZE, stage.seed)

    def build(guard: GuardArguments | None, folder: Path, watch: Watch) -> Any:
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": SAVE_STEPS, "save_only_model": True}
        trainer = build_trainer(rows, folder, stage.seed, guard, watch, **options)
        trainer.add_callback(SpoilMoment(word, bad_step))
        return trainer

    stock = stage.run("stock", "silent-stock", SILENT_STEPS, partial(build, None))
    guarded_run = stage.run("guarded", "silent-guarded", SILENT_STEPS, partial(build, GuardArguments()))
    return Scenario(
        "a silent NaN in Adam",
        [
            f"{stock.end}, last logged loss {show(stock.outcome.losses[-1])}, as if nothing were wrong",
            stock.weights,
            stock.saved,
        ],
        [
            guarded_run.end,
            *_blame(guarded_run.find_event("param_nonfinite", "optimizer_nonfinite"), "cause", "parameter", "rows"),
            guarded_run.saved,
        ],
        guarded_run.evidence,
    )


class GrowingTrainer(AnswerTrainer):
    """A trainer whose last MLP puts out twice as much every few steps."""

    def training_step(self, *args, **kwargs):
        model: Any = self.model
        mlp = model.model.layers[-1].mlp
        with torch.no_grad():
            if self.state.global_step == 0:
                mlp.up_proj.weight.mul_(2000)
            mlp.down_proj.weight.mul_(2 ** (1 / DOUBLING_STEPS))
        return super().training_step(*args, **kwargs)


def play_overflow(stage: ScenarioRunner) -> Scenario:
    """A float16 layer that grows until it overflows: announced before, contained when it comes."""
    stage.tell(
        f"An overflow to come. In a float16 model the last MLP puts out twice as much every {DOUBLING_STEPS} steps; float16 ends at "
        "65,504."
    )
    rows = build_rows(build_tokenizer(), GROWING_STEPS * BATCH_SIZE, stage.seed)
    guard = GuardArguments(nanguard_activation_steps=2, nanguard_max_bad_steps=3)

    def build(settings: GuardArguments | None, folder: Path, watch: Watch) -> Any:
        options: dict[str, Any] = {
            "trainer_class": GrowingTrainer,
            "dtype": torch.float16,
            "optim": "sgd",
            "learning_rate": 1e-2,
        }
        return build_trainer(rows, folder, stage.seed, settings, watch, **options)

    stock = stage.run("stock float16", "overflow-stock", GROWING_STEPS, partial(build, None))
    guarded_run = stage.run("guarded float16", "overflow-guarded", GROWING_STEPS, partial(build, guard))
    forecast = guarded_run.find_event("activation_headroom")
    broken = guarded_run.find_event("loss_nonfinite", "grad_nonfinite")
    told = []
    if forecast is not None and broken is not None:
        module, foretold = forecast["culprit"]["module"], forecast["values"]["overflow_step"]
        told = [
            f"announced at step {forecast['step']} for step {foretold}, in {module}; it came at step {broken['step']}"
        ]
    return Scenario(
        "a float16 overflow",
        [stock.weights, f"logged loss: {' '.join(['...', *map(show, stock.outcome.losses[-2:])])}"],
        [
            guarded_run.weights,
            *told,
            *_blame(broken, "cause", "module"),
            f"{guarded_run.end}; {guarded_run.saved}",
        ],
        guarded_run.evidence,
    )


ACTS = (play_bad_row, play_bad_sampling, play_silence, play_overflow)
