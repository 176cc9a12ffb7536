"""A trainer lent out for trial runs: whatever they do to it, it is afterwards as it was before.

Weights, buffers, gradients, modes, hooks and attributes of its models, the state of its optimizer, its own attributes and
containers, arguments, accelerate's state and the random state are put back; files go to a temporary folder. The values of
all weights are held once more in main memory meanwhile.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor, nn
from transformers import PreTrainedConfig, Trainer, TrainerCallback
from transformers.utils import logging as host_log

from ...boundary import attempt
from ...core.rerun.kept_attributes import untouched
from ...core.rng import RngState
from ...hf.compat.accelerate import bare_optimizer
from ...hf.compat.trainer import replace_callbacks
from ...hf.trainer.arguments import GuardArguments
from ...hf.trainer.mixin import GuardedTrainerMixin
from ...own_fields import own_fields


class _KeptTensor:
    """A parameter or buffer as it was: its storage, its values, its gradient and whether it gets one."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.data, self.grad = tensor, tensor.data, tensor.grad
        self.requires_grad = tensor.requires_grad
        self.value = tensor.detach().to("cpu", copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        self.tensor.data = self.data
        value = self.value.to(self.data.device)
        if not torch.equal(self.data, value):
            self.data.copy_(value)
        self.tensor.grad, self.tensor.requires_grad = self.grad, self.requires_grad


def find_models(trainer: Any) -> dict[str, nn.Module]:
    """Returns the models of a trainer by the names of its attributes, each once: the trained one, a reference, rewards."""
    found: dict[int, tuple[str, nn.Module]] = {id(trainer.model): ("model", trainer.model)}
    for name, value in own_fields(trainer).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, nn.Module) and name != "model_wrapped":
                found.setdefault(id(each), (name, each))
    return dict(found.values())


def list_parts(model: nn.Module) -> list[object]:
    """Returns all modules of a model and the configs they hold, each once."""
    modules = list(model.modules())
    configs = [
        value for module in modules for value in own_fields(module).values() if isinstance(value, PreTrainedConfig)
    ]
    configs += [
        part for config in configs for part in own_fields(config).values() if isinstance(part, PreTrainedConfig)
    ]
    return list({id(part): part for part in (*modules, *configs)}.values())


def _find_tensors(models: list[nn.Module], optimizer: Any) -> list[Tensor]:
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    states = [] if optimizer is None else optimizer.state.values()
    tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _list_owners(trainer: Any, models: list[nn.Module], optimizer: object) -> list[object]:
    """Returns the objects whose attributes are put back, besides the trainer."""
    accelerator = trainer.accelerator
    owners = [part for model in models for part in list_parts(model)]
    owners += [*(getattr(model, "generation_config", None) for model in models), GradientState()]
    owners += [trainer.args, trainer.state, trainer.control, accelerator, accelerator.scaler, trainer.callback_handler]
    owners += [optimizer, trainer.lr_scheduler, trainer.processing_class, trainer.data_collator]
    return list({id(owner): owner for owner in owners if hasattr(owner, "__dict__")}.values())


@contextmanager
def _quiet_hosts() -> Iterator[None]:
    """Silences warnings, log lines and progress bars of the hosts, which speak of runs that nobody started."""
    level, bars = host_log.get_verbosity(), host_log.is_progress_bar_enabled()
    host_log.set_verbosity(host_log.CRITICAL)
    host_log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        host_log.set_verbosity(level)
        if bars:
            host_log.enable_progress_bar()


@contextmanager
def borrowed(trainer: Trainer) -> Iterator[None]:
    """Leaves a trainer as it was before the block, whatever the block did; files go to a folder that is removed."""
    models = list(find_models(trainer).values())
    optimizer = None if trainer.optimizer is None else bare_optimizer(trainer.optimizer)
    with ExitStack() as stack:
        stack.callback(RngState.capture(trainer.args.device.type).restore)
        stack.enter_context(_quiet_hosts())
        for tensor in _find_tensors(models, optimizer):
            stack.callback(_KeptTensor(tensor).restore)
        stack.enter_context(untouched(trainer))
        for owner in _list_owners(trainer, models, optimizer):
            stack.enter_context(untouched(owner, by_reference=()))
        folder = TemporaryDirectory(prefix="nanguard-laws-", ignore_cleanup_errors=True)
        trainer.args.output_dir = stack.enter_context(folder)
        yield


@contextmanager
def kept_buffers(trainer: Trainer) -> Iterator[None]:
    """Leaves the buffers of all models as they were before the block, such as statistics that a forward in training mode moves."""
    buffers = {id(b): b for model in find_models(trainer).values() for b in model.buffers()}
    with ExitStack() as stack:
        for buffer in buffers.values():
            stack.callback(_KeptTensor(buffer).restore)
        yield


class _Ready(Exception):  # noqa: N818 - ends a training run where its first step would begin
    pass


class _StopAtBegin(TrainerCallback):
    def on_train_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        raise _Ready


def _copy_collator(trainer: Trainer) -> object:
    """Returns a copy of the collator, which may count or draw; what is not its own is shared."""
    shared = [trainer, trainer.model, trainer.processing_class, *find_models(trainer).values()]
    known = {id(each): each for each in shared if each is not None}
    # The user's class may refuse a copy in any way; its attributes are put back anyway.
    return attempt(lambda: copy.deepcopy(trainer.data_collator, known), lambda error: trainer.data_collator)


def calm(trainer: Any) -> None:
    """Takes what has effects elsewhere from a borrowed trainer: callbacks, the hub, logs, evaluation, noise, the guard."""
    if isinstance(trainer, GuardedTrainerMixin):
        own_fields(trainer).pop("nanguard", None)
        trainer.begin_guarding(GuardArguments(nanguard_mode="off"))
    trainer.data_collator = _copy_collator(trainer)
    trainer.model_init = None
    trainer.neftune_noise_alpha = None
    quiet = {
        "max_steps": 2, "eval_on_start": False, "push_to_hub": False, "report_to": [], "disable_tqdm": True, "debug": [],
        "auto_find_batch_size": False, "load_best_model_at_end": False, "include_num_input_tokens_seen": "no",
    }  # fmt: skip
    for name, value in quiet.items():
        setattr(trainer.args, name, value)


def prepare(trainer: Trainer) -> None:
    """Takes a borrowed trainer through its own `train()` up to the first step: precision, checkpointing, optimizer and
    schedule are then as in a run."""
    replace_callbacks(trainer, [_StopAtBegin()])
    try:
        trainer.train()
    except _Ready:
        return
    raise RuntimeError("train() ended before its first step")
