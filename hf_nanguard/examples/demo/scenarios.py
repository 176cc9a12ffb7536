"""The scenarios of `nanguard demo`: each plants one failure and runs a stock and a guarded trainer on sums."""

from pathlib import Path

import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig

from ...hf.guarded_trainer import guarded
from ...hf.trainer.arguments import GuardArguments
from ..compare import Figures, Options, Outcome, find_weights, measure_rewards
from ..planted_failures import AnswerTrainer, CutOffAnswer, blank_scores
from ..tasks import sums
from .scenario_runner import Scenario, ScenarioRunner

BATCH_SIZE = 4
SAMPLING_STEPS, GROUP = 45, 16
SILENT_STEPS, SAVE_STEPS, UNUSED = 40, 10, "z"
GROWING_STEPS, DOUBLING_STEPS = 90, 6
COMMON: Options = {
    "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False,
}  # fmt: skip


def build_trainer(
    rows: Dataset,
    seed: int,
    guard: GuardArguments | None,
    folder: Path,
    trainer_class: type = AnswerTrainer,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Trainer:
    """Returns a trainer, stock if `guard` is `None`, for one epoch over `rows` in their order."""
    own: Options = {"num_train_epochs": 1, "learning_rate": 2e-3, "train_sampling_strategy": "sequential", "seed": seed}
    args = SFTConfig(str(folder), per_device_train_batch_size=BATCH_SIZE, max_length=32, **{**COMMON, **own, **options})
    model: nn.Module = sums.build_model(seed, dropout=0.1)
    parts = {
        "model": model.to(dtype), "args": args, "train_dataset": rows, "eval_dataset": sums.build_examples(64, seed + 1),
        "processing_class": sums.build_tokenizer(),
    }  # fmt: skip
    return trainer_class(**parts) if guard is None else guarded(trainer_class)(guard=guard, **parts)


def run_bad_row(runner: ScenarioRunner) -> Scenario:
    """One row without an answer makes a mean of 0 / 0. A run without that batch shows what the guarded run should equal."""
    steps, seed = runner.steps, runner.seed
    bad_step = steps // 3
    bad_row = bad_step * BATCH_SIZE
    rows = sums.build_examples(steps * BATCH_SIZE, seed)
    without = concatenate_datasets([rows.select(range(bad_row)), rows.select(range(bad_row + BATCH_SIZE, len(rows)))])
    runner.announce(
        f"One bad row. Row {bad_row} of {len(rows)} was cut off before its answer. All its labels are masked, so its "
        f"mean loss is 0/0. It is in the batch of step {bad_step} of {steps}."
    )

    weights: dict[str, list[Tensor]] = {}

    def run(title: str, name: str, rows: Dataset, plant: bool, guard: GuardArguments | None = None) -> Outcome:
        def build(folder: Path) -> Trainer:
            trainer = build_trainer(rows, seed, guard, folder)
            if plant:
                trainer.data_collator = CutOffAnswer(trainer.data_collator, bad_step)
            return trainer

        def measure(trainer: Trainer) -> Figures:
            weights[name] = list(find_weights(trainer).values())
            return {"held-out loss": trainer.evaluate()["eval_loss"]}

        return runner.run(title, name, len(rows) // BATCH_SIZE, build, measure)

    fine = run("stock, healthy data", "healthy", rows, False)
    stock = run("stock, one bad row", "poisoned", rows, True)
    guarded_run = run("guarded, one bad row", "guarded", rows, True, GuardArguments())
    run("stock, without that batch", "without", without, False)
    same = [torch.equal(*pair) for pair in zip(weights["guarded"], weights["without"], strict=True)]
    compared: Figures = {
        "held-out loss on healthy data": fine.figures["held-out loss"],
        "bit-identical to a run without that batch": f"{sum(same)} of {len(same)} weight tensors",
    }
    return f"one bad row in {len(rows)}", stock, guarded_run.with_figures(compared)


def run_bad_sampling(runner: ScenarioRunner) -> Scenario:
    """Scores that are NaN when a token is sampled end stock GRPO; the guarded run drops that completion."""
    bad_step = SAMPLING_STEPS // 3
    runner.announce(
        f"GRPO that samples from NaN. A small model learns sums from rewards. At step {bad_step} of {SAMPLING_STEPS} the "
        "scores of one completion are NaN when its tokens are sampled."
    )

    def build(guard: bool, folder: Path) -> Trainer:
        trainer_class: type = guarded(GRPOTrainer) if guard else GRPOTrainer
        args = GRPOConfig(
            str(folder), max_steps=SAMPLING_STEPS, per_device_train_batch_size=8 * GROUP, num_generations=GROUP,
            gradient_accumulation_steps=1, max_completion_length=3, learning_rate=3e-3, seed=runner.seed, **COMMON,
        )  # fmt: skip
        trainer = trainer_class(
            sums.build_beginner(runner.seed), reward_funcs=sums.reward_sum, args=args,
            train_dataset=sums.build_prompts(512, runner.seed), processing_class=sums.build_tokenizer(),
        )  # fmt: skip
        blank_scores(trainer.model, bad_step)
        return trainer

    stock, guarded_run = runner.run_both(" GRPO", "grpo", SAMPLING_STEPS, build, measure_rewards, "reward")
    return "GRPO that samples from NaN", stock, guarded_run


class SpoilMoment(TrainerCallback):
    """Writes a NaN into Adam's exp_avg of one token after a step, as a damaged optimizer file would."""

    def __init__(self, token: int, step: int):
        self.token, self.step = token, step

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == self.step:
            optimizer.optimizer.state[model.get_input_embeddings().weight]["exp_avg"][self.token, 0] = torch.nan


def run_silent_nan(runner: ScenarioRunner) -> Scenario:
    """A NaN that never shows in loss or gradients: the stock run saves it, the guarded run does not."""
    token, bad_step = sums.VOCABULARY.index(UNUSED), SILENT_STEPS // 2 + SAVE_STEPS // 2
    runner.announce(
        f'A silent NaN. After step {bad_step} of {SILENT_STEPS}, Adam\'s exp_avg of the token "{UNUSED}" contains a NaN. No '
        f"batch uses that token, so loss and gradients stay finite. A checkpoint is saved every {SAVE_STEPS} steps."
    )
    rows = sums.build_examples(SILENT_STEPS * BATCH_SIZE, runner.seed)

    def build(guard: bool, folder: Path) -> Trainer:
        saving: Options = {"save_strategy": "steps", "save_steps": SAVE_STEPS, "save_only_model": True}
        trainer = build_trainer(rows, runner.seed, GuardArguments() if guard else None, folder, **saving)
        trainer.add_callback(SpoilMoment(token, bad_step))
        return trainer

    stock, guarded_run = runner.run_both("", "silent", SILENT_STEPS, build)
    return "a silent NaN in Adam", stock, guarded_run


class GrowingTrainer(AnswerTrainer):
    """A trainer whose last MLP doubles its output every few steps."""

    def training_step(self, *args, **kwargs):
        model = self.model
        assert isinstance(model, LlamaForCausalLM)
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
    rows = sums.build_examples(GROWING_STEPS * BATCH_SIZE, runner.seed)

    settings = GuardArguments(nanguard_activation_steps=2, nanguard_max_bad_steps=3)

    def build(guard: bool, folder: Path) -> Trainer:
        options: Options = {
            "trainer_class": GrowingTrainer,
            "dtype": torch.float16,
            "optim": "sgd",
            "learning_rate": 1e-2,
        }
        return build_trainer(rows, runner.seed, settings if guard else None, folder, **options)

    stock, guarded_run = runner.run_both(" float16", "overflow", GROWING_STEPS, build)
    forecast = guarded_run.find_event("activation_headroom")
    broken = guarded_run.find_event("loss_nonfinite", "grad_nonfinite")
    if forecast is not None and broken is not None:
        module, step = forecast["culprit"]["module"], forecast["values"]["overflow_step"]
        text = f"at step {forecast['step']} for step {step}, in {module}; it happened at step {broken['step']}"
        guarded_run = guarded_run.with_figures({"predicted": text})
    return "a float16 overflow", stock, guarded_run


SCENARIOS = (run_bad_row, run_bad_sampling, run_silent_nan, run_overflow)
