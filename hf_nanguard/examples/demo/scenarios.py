"""The scenarios of `nanguard demo`: each plants one failure and runs a stock and a guarded trainer."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ...hf.guarded_trainer import guarded
from ...hf.trainer.arguments import GuardArguments
from ..compare import EventRow, format_number
from ..planted_failures import AnswerTrainer, blank_scores
from ..tasks import sums as arithmetic
from .scenario_runner import Run, Scenario, ScenarioRunner
from .small_sft import (
    BATCH_SIZE,
    HIGHEST,
    WORDS,
    StepReporter,
    build_rows,
    build_tokenizer,
    build_trainer,
    cut_off,
    measure_loss,
)

SAMPLING_STEPS, GROUP = 45, 16
SILENT_STEPS, SAVE_STEPS = 40, 10
GROWING_STEPS, DOUBLING_STEPS = 90, 6


def _format_culprit(event: EventRow | None, *names: str) -> list[str]:
    """Returns a line with these fields of an event, its values and its culprit; no line without an event."""
    if event is None:
        return []
    known = {**event["values"], **{name: value for name, value in {**event, **event["culprit"]}.items() if value}}
    rows = {"rows": f"row {', '.join(map(str, known.get('rows', [])))}"}
    return [f"culprit: {', '.join({**known, **rows}[name] for name in names if name in known)}"]


def run_bad_row(runner: ScenarioRunner) -> Scenario:
    """One row without an answer makes a mean of 0 / 0. A run without that batch shows what the guarded run should equal."""
    steps, seed = runner.steps, runner.seed
    bad_step = steps // 3
    bad_row = bad_step * BATCH_SIZE + 2
    healthy = build_rows(build_tokenizer(), steps * BATCH_SIZE, seed)
    poisoned = [cut_off(row) if i == bad_row else row for i, row in enumerate(healthy)]
    without = healthy[: bad_step * BATCH_SIZE] + healthy[(bad_step + 1) * BATCH_SIZE :]
    runner.announce(
        f"One bad row. Row {bad_row} of {len(poisoned)} was cut off before its answer. All its labels are masked, so its "
        f"mean loss is 0/0. It is in the batch of step {bad_step} of {steps}."
    )

    def run(title: str, name: str, rows: list, guard: GuardArguments | None = None) -> Run:
        return runner.run(title, name, len(rows) // BATCH_SIZE, partial(build_trainer, rows, seed, guard))

    fine = run("stock, healthy data", "healthy", healthy)
    stock = run("stock, one bad row", "poisoned", poisoned)
    guarded_run = run("guarded, one bad row", "guarded", poisoned, GuardArguments())
    control = run("stock, without that batch", "without", without)
    expected = dict(control.trainer.model.named_parameters())
    same = [torch.equal(p, expected[name]) for name, p in guarded_run.trainer.model.named_parameters()]
    losses, event = stock.outcome.losses, guarded_run.find_event("loss_nonfinite")
    return Scenario(
        f"one bad row in {len(poisoned)}",
        [
            stock.weights,
            stock.lost,
            f"logged loss: {' '.join([format_number(losses[0]), '...', *map(format_number, losses[-2:])])}",
            f"held-out loss: {format_number(measure_loss(stock.trainer, seed))}",
        ],
        [
            guarded_run.weights,
            guarded_run.lost,
            f"held-out loss: {format_number(measure_loss(guarded_run.trainer, seed))} (on healthy data: "
            f"{format_number(measure_loss(fine.trainer, seed))})",
            f"bit-identical to a run without that batch: {sum(same)} of {len(same)} weight tensors",
            *_format_culprit(event, "cause", "source", "rows"),
        ],
        guarded_run.evidence,
    )


def run_bad_sampling(runner: ScenarioRunner) -> Scenario:
    """Scores that are NaN when a token is sampled end stock GRPO; the guarded run drops that completion."""
    bad_step = SAMPLING_STEPS // 3
    runner.announce(
        f"GRPO that samples from NaN. A small model learns sums from rewards. At step {bad_step} of {SAMPLING_STEPS} the "
        "scores of one completion are NaN when its tokens are sampled."
    )

    def build(guard: bool, folder: Path, reporter: StepReporter) -> Any:
        args = GRPOConfig(
            output_dir=str(folder), max_steps=SAMPLING_STEPS, per_device_train_batch_size=8 * GROUP, num_generations=GROUP,
            gradient_accumulation_steps=1, max_completion_length=3, learning_rate=3e-3, lr_scheduler_type="constant",
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
            gradient_checkpointing=False, dataloader_pin_memory=False, seed=runner.seed,
        )  # fmt: skip
        trainer = (guarded(GRPOTrainer) if guard else GRPOTrainer)(
            arithmetic.build_beginner(runner.seed), reward_funcs=arithmetic.reward_sum, args=args, callbacks=[reporter],
            train_dataset=arithmetic.build_prompts(512, runner.seed), processing_class=arithmetic.build_tokenizer(),
        )  # fmt: skip
        blank_scores(trainer.model, bad_step)
        return trainer

    stock = runner.run("stock GRPO", "grpo-stock", SAMPLING_STEPS, partial(build, False), "reward")
    guarded_run = runner.run("guarded GRPO", "grpo-guarded", SAMPLING_STEPS, partial(build, True), "reward")
    rewards = [row["reward"] for row in guarded_run.trainer.state.log_history if row.get("reward") is not None]
    events = [event for event in guarded_run.outcome.events if event["signal"] == "logits_nonfinite"][:1]
    return Scenario(
        "GRPO that samples from NaN",
        [stock.end],
        [
            f"{guarded_run.end}, mean reward {sum(rewards[:5]) / 5:.2f} -> {sum(rewards[-5:]) / 5:.2f}",
            *(f"event: {event['signal']}, {event['action']}; that completion is not trained on" for event in events),
        ],
        guarded_run.evidence,
    )


class SpoilMoment(TrainerCallback):
    """Writes a NaN into Adam's exp_avg of one word after a step, as a damaged optimizer file would."""

    def __init__(self, word: int, step: int):
        self.word, self.step = word, step

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == self.step:
            optimizer.optimizer.state[model.get_input_embeddings().weight]["exp_avg"][self.word, 0] = torch.nan


def run_silent_nan(runner: ScenarioRunner) -> Scenario:
    """A NaN that never shows in loss or gradients: the stock run saves it, the guarded run does not."""
    word, bad_step = WORDS.index(str(HIGHEST - 1)), SILENT_STEPS // 2 + SAVE_STEPS // 2
    runner.announce(
        f'A silent NaN. After step {bad_step} of {SILENT_STEPS}, Adam\'s exp_avg of the word "{WORDS[word]}" contains a NaN. No '
        f"batch uses that word, so loss and gradients stay finite. A checkpoint is saved every {SAVE_STEPS} steps."
    )
    rows = build_rows(build_tokenizer(), SILENT_STEPS * BATCH_SIZE, runner.seed)

    def build(guard: GuardArguments | None, folder: Path, reporter: StepReporter) -> Any:
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": SAVE_STEPS, "save_only_model": True}
        trainer = build_trainer(rows, runner.seed, guard, folder, reporter, **options)
        trainer.add_callback(SpoilMoment(word, bad_step))
        return trainer

    stock = runner.run("stock", "silent-stock", SILENT_STEPS, partial(build, None))
    guarded_run = runner.run("guarded", "silent-guarded", SILENT_STEPS, partial(build, GuardArguments()))
    event = guarded_run.find_event("param_nonfinite", "optimizer_nonfinite")
    return Scenario(
        "a silent NaN in Adam",
        [
            f"{stock.end}, last logged loss {format_number(stock.outcome.losses[-1])}, which looks healthy",
            stock.weights,
            stock.saved,
        ],
        [
            guarded_run.end,
            *_format_culprit(event, "cause", "parameter", "rows"),
            guarded_run.saved,
        ],
        guarded_run.evidence,
    )


class GrowingTrainer(AnswerTrainer):
    """A trainer whose last MLP doubles its output every few steps."""

    def training_step(self, *args, **kwargs):
        model: Any = self.model
        mlp = model.model.layers[-1].mlp
        with torch.no_grad():
            if self.state.global_step == 0:
                mlp.up_proj.weight.mul_(2000)
            mlp.down_proj.weight.mul_(2 ** (1 / DOUBLING_STEPS))
        return super().training_step(*args, **kwargs)


def run_overflow(runner: ScenarioRunner) -> Scenario:
    """A float16 layer that grows until it overflows: predicted in advance, contained when it happens."""
    runner.announce(
        f"A float16 overflow. The last MLP of a float16 model doubles its output every {DOUBLING_STEPS} steps; the largest "
        "float16 number is 65,504."
    )
    rows = build_rows(build_tokenizer(), GROWING_STEPS * BATCH_SIZE, runner.seed)

    def run(name: str, guard: GuardArguments | None) -> Run:
        options: dict[str, Any] = {"dtype": torch.float16, "optim": "sgd", "learning_rate": 1e-2}
        build = partial(build_trainer, rows, runner.seed, guard, trainer_class=GrowingTrainer, **options)
        return runner.run(f"{name} float16", f"overflow-{name}", GROWING_STEPS, build)

    stock = run("stock", None)
    guarded_run = run("guarded", GuardArguments(nanguard_activation_steps=2, nanguard_max_bad_steps=3))
    forecast = guarded_run.find_event("activation_headroom")
    broken = guarded_run.find_event("loss_nonfinite", "grad_nonfinite")
    prediction = []
    if forecast is not None and broken is not None:
        module, step = forecast["culprit"]["module"], forecast["values"]["overflow_step"]
        prediction = [
            f"predicted at step {forecast['step']} for step {step}, in {module}; it happened at step {broken['step']}"
        ]
    return Scenario(
        "a float16 overflow",
        [stock.weights, f"logged loss: {' '.join(['...', *map(format_number, stock.outcome.losses[-2:])])}"],
        [
            guarded_run.weights,
            *prediction,
            *_format_culprit(broken, "cause", "module"),
            f"{guarded_run.end}; {guarded_run.saved}",
        ],
        guarded_run.evidence,
    )


SCENARIOS = (run_bad_row, run_bad_sampling, run_silent_nan, run_overflow)
