"""A step, a save, a resume and a step end where two steps end: same weights, same data."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import set_seed
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from ...boundary import attempt
from ...hf.compat.accelerate import replaced_method
from ...hf.compat.own_loss import is_hosts_resume
from ...hf.compat.trainer import replace_callbacks, set_batch_size
from ...plain_text import format_error
from ..rules.finding import Severity
from ..trial.borrowed_trainer import borrowed
from ..trial.law_result import ERROR, NOTE, LawResult, NotApplicable, broken, held
from ..trial.trial_bench import TrialBench
from ..trial.trial_rows import identify, repeatable

ROWS = 32  # so that another order of them is seen
CLOSE = 0.01  # of the second update


class _Rows(Dataset):
    """The trial rows as a dataset."""

    def __init__(self, rows: list[object]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> object:
        return copy.deepcopy(self.rows[index])  # a collator may change what it is given


def check_resume(bench: TrialBench) -> LawResult:
    """Runs `train()` for two steps with a checkpoint after the first, and once more from that checkpoint."""
    trainer = bench.trainer
    if bench.is_online:
        raise NotApplicable("it samples its data, which is not tried twice")
    if trainer.args.save_only_model:
        raise NotApplicable("save_only_model is set, so a run cannot be resumed")
    severity = NOTE if trainer.args.save_strategy == SaveStrategy.NO else ERROR  # this run cannot be resumed
    rows, collate = _Rows(bench.short_rows[:ROWS]), repeatable(bench.loader.collate_fn)
    start = {name: p.detach().clone() for name, p in bench.trainable().items()}
    folder = trainer.args.output_dir  # of the whole proof
    with borrowed(trainer):
        straight, seen = _train(trainer, rows, collate, folder, None)
    checkpoint = Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-1"
    if not checkpoint.is_dir():
        raise NotApplicable("the trainer wrote no checkpoint after its first step")
    with borrowed(trainer):
        _scramble(bench)
        # Whatever it raises, a resumed run would raise as well.
        again = attempt(lambda: _train(trainer, rows, collate, folder, str(checkpoint)), format_error)
    if isinstance(again, str):
        return broken(NOTE if is_hosts_resume(trainer) else severity, f"A resumed run fails: {again}.")
    resumed, seen_again = again
    if len(seen) != 2 or len(seen_again) != 1:
        return broken(severity, f"A run of 2 steps took {len(seen)}, and {len(seen_again)} after a resume from step 1.")
    if seen[1] != seen_again[0]:
        repeats = " It is the data of the first step again." if seen[0] == seen_again[0] else ""
        return broken(
            severity, f"The step after a resume sees other data than without one.{repeats}", repeated=bool(repeats)
        )
    if severity is ERROR and is_hosts_resume(trainer):
        severity = NOTE  # nothing of this run is wrong, and nothing of its configuration to blame, unless it is resumed
    return _compare(start, straight, resumed, severity, _find_renamed(trainer, checkpoint))


def _train(
    trainer: Any, rows: Dataset, collate: Callable, folder: str, checkpoint: str | None
) -> tuple[dict[str, Tensor], list]:
    """Returns the weights after `train()`, and the data of each step."""
    _make_short(trainer, rows, collate, folder)
    seen: list[object] = []

    def record(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(model: nn.Module, inputs: object, *args: object, **kwargs: object) -> Tensor:
            seen.append(identify(inputs))
            return step(model, inputs, *args, **kwargs)

        return call

    set_seed(trainer.args.seed)  # as the constructor of a trainer does, and so every new process
    with replaced_method(trainer, "training_step", record):
        trainer.train(resume_from_checkpoint=checkpoint)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}, seen


def _make_short(trainer: Any, rows: Dataset, collate: Callable, folder: str) -> None:
    """Makes a run of two steps of one row each, with a checkpoint after each and nothing else."""
    replace_callbacks(trainer, [DefaultFlowCallback()])
    trainer.train_dataset, trainer.data_collator = rows, collate
    args = trainer.args
    settings = {
        "output_dir": folder, "max_steps": 2, "gradient_accumulation_steps": 1,
        "save_strategy": SaveStrategy.STEPS, "save_steps": 1, "eval_strategy": IntervalStrategy.NO, "save_total_limit": None,
        "logging_strategy": IntervalStrategy.NO, "remove_unused_columns": False, "dataloader_num_workers": 0, "warmup_steps": 0,
    }  # fmt: skip
    for name, value in settings.items():
        setattr(args, name, value)
    set_batch_size(trainer, 1)
    trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler = trainer.model, None, None


@torch.no_grad()
def _scramble(bench: TrialBench) -> None:
    """Gives all trainable weights other values, so that those of the checkpoint must be loaded."""
    for parameter in bench.trainable().values():
        parameter.add_(0.1 * torch.randn_like(parameter))


def _find_renamed(trainer: Any, checkpoint: Path) -> list[str]:
    """Returns the trained weights that a checkpoint of the whole model has under another name or not at all."""
    files = sorted(checkpoint.glob("model*.safetensors"))
    saved: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as content:
            saved |= set(content.keys())
    tied = set(getattr(trainer.model, "all_tied_weights_keys", None) or ())
    return [n for n, p in trainer.model.named_parameters() if files and p.requires_grad and n not in saved | tied]


def _compare(
    start: dict[str, Tensor],
    straight: dict[str, Tensor],
    resumed: dict[str, Tensor],
    severity: Severity,
    renamed: list[str],
) -> LawResult:
    update = sum(float((straight[name].float() - start[name].float()).norm()) ** 2 for name in start) ** 0.5
    offs = {name: float((straight[name].float() - resumed[name].float()).norm()) for name in start}
    total, worst = sum(off**2 for off in offs.values()) ** 0.5, max(offs, key=lambda name: offs[name])
    if not update:
        raise NotApplicable("its weights do not move in two steps")
    share = total / update
    if share <= CLOSE:
        return held(
            f"the resumed run ends within {share:.1e} of an update of the one without a break", difference=share
        )
    lost = [name for name, off in offs.items() if off > CLOSE * update]
    message = f"The resumed run ends {share:.2g} updates away from the one without a break, in {len(lost)} of {len(offs)} parameters, most in {worst}"
    why = "weights, optimizer, schedule or random state are not restored."
    if renamed:
        why = (
            f"its checkpoints have {len(renamed)} weights under other names than the model, first {renamed[0]}, and a resume does not "
            "load those. Do not resume this run: give the newest checkpoint as the model of a new run, whose optimizer starts anew."
        )
    return broken(
        severity, f"{message}: {why}", difference=share, parameter=worst, parameters=lost[:20], renamed=renamed[:20]
    )
