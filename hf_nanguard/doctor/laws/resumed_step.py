"""A step, a save, a resume and a step end where two steps end: same weights, same data."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from ...hf.compat.accelerate import replaced_method
from ...hf.compat.trainer import replace_callbacks, set_batch_size
from ..rules.finding import Severity
from ..trial.borrowed_trainer import borrowed
from ..trial.law_result import ERROR, NOTE, LawResult, NotApplicable, broken, held
from ..trial.trial_bench import TrialBench

ROWS = 4
CLOSE = 0.01  # of the second update


class _Rows(Dataset):
    """The trial rows as a dataset."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return copy.deepcopy(self.rows[index])  # a collator may change what it is given


def check_resume(bench: TrialBench) -> LawResult:
    """Runs `train()` for two steps with a checkpoint after the first, and once more from that checkpoint."""
    trainer = bench.trainer
    if bench.is_online:
        raise NotApplicable("it samples its data, which is not tried twice")
    if trainer.args.save_only_model:
        raise NotApplicable("save_only_model is set, so a run cannot be resumed")
    severity = NOTE if trainer.args.save_strategy == SaveStrategy.NO else ERROR  # this run cannot be resumed
    rows, collate = _Rows(bench.rows[:ROWS]), bench.loader.collate_fn
    start = {name: p.detach().clone() for name, p in bench.trainable().items()}
    folder = trainer.args.output_dir  # of the whole proof
    with borrowed(trainer):
        straight, seen = _train(trainer, rows, collate, folder, None)
    checkpoint = Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-1"
    if not checkpoint.is_dir():
        raise NotApplicable("the trainer wrote no checkpoint after its first step")
    with borrowed(trainer):
        _scramble(bench)
        resumed, seen_again = _train(trainer, rows, collate, folder, str(checkpoint))
    if len(seen) != 2 or len(seen_again) != 1:
        return broken(severity, f"A run of 2 steps took {len(seen)}, and {len(seen_again)} after a resume from step 1.")
    if seen[1] != seen_again[0]:
        repeats = " It is the data of the first step again." if seen[0] == seen_again[0] else ""
        return broken(
            severity, f"The step after a resume sees other data than without one.{repeats}", repeated=bool(repeats)
        )
    return _compare(start, straight, resumed, severity)


def _train(
    trainer: Any, rows: Dataset, collate: Callable, folder: str, checkpoint: str | None
) -> tuple[dict[str, Tensor], list]:
    """Returns the weights after `train()`, and the data of each step."""
    _make_short(trainer, rows, collate, folder)
    seen: list[Any] = []

    def record(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(_identify(inputs))
            return step(model, inputs, *args, **kwargs)

        return call

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


def _identify(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.double().sum().item(), batch.flatten()[:64].tolist()
    if isinstance(batch, Mapping):
        return {name: _identify(value) for name, value in batch.items()}
    return [_identify(each) for each in batch] if isinstance(batch, list | tuple) else repr(batch)


def _compare(
    start: dict[str, Tensor], straight: dict[str, Tensor], resumed: dict[str, Tensor], severity: Severity
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
    return broken(
        severity,
        f"The resumed run ends {share:.2g} updates away from the one without a break, in {len(lost)} of {len(offs)} parameters, "
        f"most in {worst}: weights, optimizer, schedule or random state are not restored.",
        difference=share, parameter=worst, parameters=lost[:20],
    )  # fmt: skip
