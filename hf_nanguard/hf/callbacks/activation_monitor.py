"""A callback that watches what the modules of any trainer's model put out, and says when their dtype will overflow."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.journal import Journal
from ...core.monitors.activations import ActivationMonitor
from ...core.ranks import Ranks
from ...errors import ArgumentError
from ...report.run_files import JsonlWriter, events_path
from ..trainer.run_record import FOLDER

logger = logging.getLogger("hf_nanguard")

STATE_FILE = "nanguard_activation.json"


class ActivationMonitorCallback(TrainerCallback):
    """Measures the outputs of the model's modules every so many steps and forecasts the overflow of their dtype.

    It looks at the first step, then every `check_every_n_steps`, and more often where a module may be in danger. A step
    that is not looked at costs nothing. It only watches, and is silent unless something is wrong: then there is an event
    `activation_headroom` (a module will overflow) or `activation_nonfinite` (it did) in
    `<output_dir>/nanguard/events.jsonl` and, the first time, a line in the log. It does not work under `torch.compile`,
    which ignores hooks, and says so.

    Args:
        check_every_n_steps (`int`, *optional*, defaults to `50`):
            How often it looks: three reductions an output and one host read each time.
        modules (`str` or `Sequence[str]`, *optional*):
            Which modules: patterns of their names as `fnmatch` has them, in one string separated by commas; leading parts
            may be left out. By default the blocks of the model, and embeddings, projections and heads outside of them.
        full_metrics (`bool`, *optional*, defaults to `False`):
            Whether the log gets a curve for every module, as `nanguard/<noun>/<module>`, and not only the worst.

    It adds to the row of the log that follows a look:

    | metric | meaning |
    |---|---|
    | `nanguard/headroom_bits` | powers of two between the largest output and the limit of its dtype, of the module with the fewest |
    | `nanguard/activation_max` | the largest magnitude of any output |
    | `nanguard/activation_rms` | the largest RMS of any output |
    | `nanguard/activation_zeros` | the largest share of exact zeros in any output |
    | `nanguard/activation_near_limit` | the largest share within a factor of 16 of the dtype's limit |

    Each is the largest over the micro-batches of the step and over ranks. Outputs that are not finite are left out.

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
        self._close()
        ranks = Ranks(args.device)
        writer = JsonlWriter(events_path(Path(args.output_dir) / FOLDER, args.process_index))
        self.monitor = ActivationMonitor(
            model, Journal(ranks, writer), ranks, self.check_every_n_steps, self.modules, self.full_metrics,
            early=(1,), compiled=args.torch_compile,
        )  # fmt: skip
        if state.global_step:
            self._load_state(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._close()

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
        folder = self._checkpoint(args, state)
        if self.monitor is not None and args.should_save and folder.is_dir():
            (folder / STATE_FILE).write_text(json.dumps(self.monitor.state_dict(), allow_nan=False), encoding="utf-8")

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None

    def _load_state(self, args: Any, state: Any) -> None:
        """Restores the samples where a callback can find them; it is not told which checkpoint a run goes on from."""
        assert self.monitor is not None
        given = args.resume_from_checkpoint
        folders = [Path(given)] if isinstance(given, str) else []
        file = next(
            (path for folder in [*folders, self._checkpoint(args, state)] if (path := folder / STATE_FILE).is_file()),
            None,
        )
        try:
            if file is not None:
                self.monitor.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("hf_nanguard: %s was not readable (%r), so the forecast starts anew.", file, error)

    def _checkpoint(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
