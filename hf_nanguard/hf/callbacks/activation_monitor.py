"""A callback that measures the outputs of the model's modules in any trainer and forecasts the overflow of their dtype."""

from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.monitors.activations import ActivationMonitor
from ...core.torch_private import has_compiled_part
from ...errors import ArgumentError
from ...report.state_file import write_state
from ..monitors.attention_probe import find_head
from ..trainer.run_record import load_part
from .harmless_callback import HarmlessCallback, harmless, make_journal

STATE_FILE = "nanguard_activation.json"


@harmless
class ActivationMonitorCallback(HarmlessCallback):
    """Measures the outputs of the model's modules every N steps and forecasts the overflow of their dtype.

    It checks the first step, then every `check_every_n_steps`, and more often while a module may be in danger. Other steps cost
    nothing. It never changes a run. If a module is about to overflow (`activation_headroom`) or did (`activation_nonfinite`),
    it writes an event to `<output_dir>/nanguard/events.jsonl` and, the first time, a line to the log. It does not work under
    `torch.compile`, which ignores hooks, and says so; [`NanGuardCallback`] measures the same there.

    Args:
        check_every_n_steps (`int`, *optional*, defaults to `50`):
            The period. A check takes three reductions per output and one host read.
        modules (`str` or `Sequence[str]`, *optional*):
            `fnmatch` patterns of module names, separated by commas in a string; leading parts may be left out. By default
            the blocks of the model, and embeddings, projections and heads outside of them.
        full_metrics (`bool`, *optional*, defaults to `False`):
            Whether to log a metric for every module, as `nanguard/<noun>/<module>`, and not only the worst.

    It adds to the row of the log that follows a check:

    | metric | meaning |
    |---|---|
    | `nanguard/headroom_bits` | powers of two between the largest output and the limit of its dtype, of the module with the fewest |
    | `nanguard/activation_max` | largest magnitude of any output |
    | `nanguard/activation_rms` | largest RMS of any output |
    | `nanguard/activation_zeros` | largest share of exact zeros in any output |
    | `nanguard/activation_near_limit` | largest share within a factor of 16 of the dtype's limit |

    Each is the maximum over the micro-batches of the step and over ranks. Non-finite outputs are left out.

    Example:

    ```python
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[ActivationMonitorCallback()])
    ```
    """

    def __init__(
        self,
        check_every_n_steps: int = 50,
        modules: str | Sequence[str] | None = None,
        full_metrics: bool = False,
    ):
        if isinstance(check_every_n_steps, bool) or not isinstance(check_every_n_steps, int) or check_every_n_steps < 1:
            raise ArgumentError(f"check_every_n_steps must be an integer of at least 1, got {check_every_n_steps!r}.")
        listed = modules.split(",") if isinstance(modules, str) else modules
        if listed is not None and not (
            isinstance(listed, Sequence) and listed and all(isinstance(part, str) and part.strip() for part in listed)
        ):
            raise ArgumentError(f"modules must be one or more patterns of module names, got {modules!r}.")
        if not isinstance(full_metrics, bool):
            raise ArgumentError(f"full_metrics must be True or False, got {full_metrics!r}.")
        self.check_every_n_steps = check_every_n_steps
        self.modules = modules
        self.full_metrics = full_metrics
        self.monitor: ActivationMonitor | None = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_train_end(args, state, control)
        self.monitor = ActivationMonitor(
            model,
            make_journal(args),
            self.check_every_n_steps,
            self.full_metrics,
            early=(1,),
            patterns=self.modules,
            head=find_head(model),
            compiled=args.torch_compile or has_compiled_part(model),
        )
        if state.global_step:
            _load_state(self.monitor, args, state)

    def on_train_end(self, args, state, control, **kwargs):
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.monitor is not None:
            self.monitor.begin_step(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.monitor is not None:
            self.monitor.end_backward(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.monitor is None or logs is None or "loss" not in logs:
            return
        metrics = self.monitor.metrics()
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def on_save(self, args, state, control, **kwargs):
        folder = _find_checkpoint(args, state)
        if self.monitor is not None and args.should_save:
            write_state(folder / STATE_FILE, self.monitor.state_dict())


def _find_checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _load_state(monitor: ActivationMonitor, args: TrainingArguments, state: TrainerState) -> None:
    """Restores the samples if they are found: a callback is not told from which checkpoint a run resumes."""
    given = args.resume_from_checkpoint
    folders = [*([Path(given)] if isinstance(given, str) else []), _find_checkpoint(args, state)]
    file = next((folder / STATE_FILE for folder in folders if (folder / STATE_FILE).is_file()), None)
    if file is not None:
        load_part(monitor, file)
