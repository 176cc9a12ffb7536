"""What the guard uses of a [`~transformers.Trainer`], as one list. Private members are used in this folder only."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler


class HostTrainer(Protocol):
    """A built trainer. Its model is a module, and its optimizer is there once `train()` has begun."""

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    accelerator: Accelerator
    model: nn.Module
    model_wrapped: nn.Module
    optimizer: AcceleratedOptimizer
    lr_scheduler: object
    processing_class: object
    callback_handler: CallbackHandler
    train_dataset: Any
    data_collator: Callable[[list[object]], object]
    compute_loss_func: Callable[..., object] | None
    current_gradient_accumulation_steps: float
    is_in_train: bool
    _tr_loss: Tensor
    _train_batch_size: int
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _initial_global_step: int
    _signature_columns: list[str] | None

    def training_step(self, model: nn.Module, inputs: object, num_items_in_batch: object = None) -> Tensor: ...
    def compute_loss(self, model: nn.Module, inputs: object) -> object: ...
    def compute_loss_context_manager(self) -> AbstractContextManager[object]: ...
    def is_world_process_zero(self) -> bool: ...
    def get_tp_size(self) -> int: ...
    def get_cp_size(self) -> int: ...
    def get_sp_size(self) -> int: ...
    def _remove_unused_columns(self, dataset: object) -> object: ...
    def _get_collator_with_removed_columns(self, data_collator: Callable[[list[object]], object]) -> Any: ...
    def _save_checkpoint(self, model: nn.Module, trial: object) -> None: ...
    def _get_num_items_in_batch(self, batches: list[object], device: torch.device) -> Tensor | int | None: ...
    def _prepare_inputs(self, inputs: object) -> object: ...
