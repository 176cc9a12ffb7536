"""A short guarded run of any trainer, which measures whether its configuration works."""

import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..core.finite import read_host
from ..core.monitors.weights import find_bad_weights
from ..core.rerun.runner import same_on_all_ranks
from ..errors import ArgumentError
from ..hf.attach_guard import attach
from ..hf.trainer.arguments import find_guard_arguments
from ..hf.trainer.mixin import GuardedTrainerMixin
from ..hf.trainer.trainer_guard import TrainerGuard
from ..plain_text import format_error
from ..report.run_files import Tail, events_path
from .grade import Verification
from .held_out_rows import hold_out

HELD_OUT = 32
HELD_OUT_PROMPTS = 8

# Called with the number of steps done and the newest logged loss.
Report = Callable[[int, float], None]
Fields = dict[str, Any]  # of a [`Verification`], by name


def verify(
    trainer: Trainer,
    steps: int = 20,
    output_dir: str | Path | None = None,
    report: Report | None = None,
    memory_limit: int | None = None,
) -> Verification:
    """Trains for a few steps with the guard and measures whether the configuration works.

    Afterwards the trainer has other weights and other arguments, so build a new one for the real run. If it has no
    evaluation data, a part of the training data is held out.

    Args:
        trainer (`Trainer`):
            Any trainer, stock or guarded, built and not yet trained.
        steps (`int`, *optional*, defaults to `20`):
            Optimizer steps; the learning rate schedule has the same length.
        output_dir (`str` or `Path`, *optional*):
            Folder for events and autopsies; the trainer's own folder by default. No checkpoint is written.
        report (`Callable`, *optional*):
            Called after every step with the number of steps and the logged loss.
        memory_limit (`int`, *optional*):
            In bytes; a higher peak is a failure.

    Returns:
        `Verification`: `.verdict` is `"best"`, `"acceptable"` or `"failed"`, `.reasons` says why.

    Example:

    ```python
    found = verify(SFTTrainer(model, args=args, train_dataset=dataset), steps=20, output_dir="runs/trial")
    print(found.verdict, found.reasons)
    ```
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise ArgumentError(f"steps must be an integer of at least 2, got {steps!r}.")
    _set_arguments(trainer, steps, output_dir)
    settings = trainer.nanguard.arguments if isinstance(trainer, GuardedTrainerMixin) else None
    settings = copy.copy(find_guard_arguments(settings, trainer.args))
    settings.nanguard_mode = "act"  # the question is whether the run works with the guard
    settings.nanguard_max_rewinds = 0  # and not whether it can be rescued
    if isinstance(trainer, GuardedTrainerMixin):
        trainer.begin_guarding(settings)
    else:
        attach(trainer, settings)
    assert isinstance(trainer, GuardedTrainerMixin)
    assert trainer.model is not None
    guard = trainer.nanguard
    guard.halting.save_nothing()
    tail = Tail(events_path(guard.record.directory, trainer.args.process_index))
    watch = Watch(guard, trainer.model, report)
    trainer.add_callback(watch)
    device, error = trainer.args.device, None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        trainer.train()
    except ArgumentError:
        raise
    except Exception as raised:  # user code may raise anything, and an early end is a result of the verification
        error = format_error(raised)
    finally:
        watch.handle.remove()
    counter, (memory, memory_kind) = guard.guard.counter, measure_memory(device)
    return Verification(
        num_steps=steps, num_done=trainer.state.global_step, error=error, num_nan_gradients=counter.num_nan,
        num_inf_gradients=counter.num_inf, max_grad_norm=trainer.args.max_grad_norm or 0.0, num_seen=counter.seen,
        num_used=counter.seen - counter.dropped, bad_weights=find_bad_weights(trainer.model, guard.guard.monitor_set.find_accepted()),
        memory=memory, memory_kind=memory_kind, memory_limit=memory_limit, events=tail.read(),
        output_dir=str(trainer.args.output_dir), **watch.read(), **_read_held_out(trainer.state.log_history, steps),
    )  # fmt: skip


def _set_arguments(trainer: Trainer, steps: int, output_dir: str | Path | None) -> None:
    """Makes the run short and silent, without checkpoints, with an evaluation at the start and at the end."""
    args = copy.copy(trainer.args)
    hosts = (PrinterCallback, ProgressCallback, EarlyStoppingCallback)  # the last needs a best model
    for callback in (*hosts, *get_reporting_integration_callbacks(args.report_to)):
        trainer.remove_callback(callback)
    args.output_dir = str(args.output_dir if output_dir is None else output_dir)
    args.max_steps = steps
    args.logging_strategy, args.logging_steps, args.logging_first_step = IntervalStrategy.STEPS, 1, False
    args.save_strategy, args.load_best_model_at_end, args.push_to_hub = SaveStrategy.NO, False, False
    args.prediction_loss_only, args.metric_for_best_model = True, None
    args.eval_strategy, args.eval_on_start = IntervalStrategy.NO, False
    trainer.args = args
    num_generations = getattr(args, "num_generations_eval", None) or getattr(args, "num_generations", None)
    if hold_out(trainer, HELD_OUT_PROMPTS if num_generations else HELD_OUT):
        args.eval_strategy, args.eval_steps, args.eval_delay = IntervalStrategy.STEPS, steps, 0
        args.eval_on_start = True
        if num_generations:  # all completions of a prompt must be in one batch
            args.per_device_eval_batch_size = num_generations


class Watch(TrainerCallback):
    """Measures logits, and gradients after clipping; results stay on the device until the end."""

    def __init__(self, guard: TrainerGuard, model: nn.Module, report: Report | None):
        self.guard, self.core_guard = guard, guard.guard
        self.report = report
        self.bad: list[Tensor] = []
        self.norms: dict[int, float] = {}
        self.after: dict[int, Tensor] = {}
        self.num_bad_steps = 0
        self.handle = model.register_forward_hook(self._on_forward)

    @torch.no_grad()
    def _on_forward(self, module: nn.Module, args: tuple, output: object) -> None:
        if self.guard.replaying or not isinstance(output, Mapping):
            return
        logits = output.get("logits")
        seen = output.get("log_probs") if logits is None else logits
        if isinstance(seen, Tensor) and seen.is_floating_point():
            highest = seen.detach().amax() if seen.numel() else seen.new_zeros(())
            bad = ~torch.isfinite(highest)
            # An -inf is a mask among logits, and an impossible token among log-probabilities.
            self.bad.append(bad if logits is not None else bad | ~torch.isfinite(seen.detach()).all())

    @torch.no_grad()
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        norm = self.core_guard.last_norm
        self.num_bad_steps += norm is not None and not math.isfinite(norm)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if gradients:
            self.after[state.global_step + 1] = same_on_all_ranks(torch.nn.utils.get_total_norm(gradients))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            if isinstance(logs.get("grad_norm"), float):
                self.norms[state.global_step] = logs["grad_norm"]
            if self.report is not None:
                self.report(state.global_step, logs["loss"])

    def read(self) -> Fields:
        """Returns the results, as fields of [`Verification`]."""
        taken = [step for step, norm in self.norms.items() if step in self.after and math.isfinite(norm)]
        return {
            "num_forwards": len(self.bad),
            "num_bad_forwards": int(sum(read_host([bad.float() for bad in self.bad]))),
            "num_bad_steps": self.num_bad_steps,
            "norms": [self.norms[step] for step in taken],
            "norms_after": read_host([self.after[step] for step in taken]),
        }


def _read_held_out(log_history: list[Fields], num_steps: int) -> Fields:
    """Returns the loss or reward on held-out data before and after, as fields of [`Verification`]."""
    rows = [row for row in log_history if "eval_loss" in row]
    measure = "reward" if any("eval_reward" in row for row in rows) else "loss"
    values = {row["step"]: row.get(f"eval_{measure}") for row in rows}
    return {"measure": measure, "before": values.get(0), "after": values.get(num_steps)}


def measure_memory(device: torch.device) -> tuple[int | None, str]:
    """Returns the peak in bytes and its kind: memory of the device, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), f"{device} memory"
    if importlib.util.find_spec("resource") is None:
        return None, ""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process memory (RSS; no accelerator)"
