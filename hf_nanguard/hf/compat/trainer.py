"""Every private name of the transformers Trainer that we touch, each with the condition under which it can go."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from packaging.version import Version
from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from .accelerate import local_collectives, replaced_method
from .trainer_protocol import HostTrainer

ITEMS = "num_items_in_batch"
KNOWS_FIRST_STEP = Version(transformers.__version__).release >= (5, 19)  # `_initial_global_step`, for the mean loss
ONE_NORM = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU,
            DistributedType.MULTI_NPU, DistributedType.MULTI_MLU, DistributedType.MULTI_HPU)  # fmt: skip


def clips_in_one_piece(trainer: HostTrainer, model: torch.nn.Module) -> bool:
    """Returns whether the host clips by torch's own `get_total_norm` and `clip_grads_with_norm_`, so that we can look
    between the two; a subclass may clip in its own way, and so may whoever has put a clip of theirs on the accelerator.

    Can go when the Trainer measures and clips in two calls.
    """
    accelerator = trainer.accelerator
    own = [
        cls
        for cls in type(trainer).__mro__
        if "_clip_grad_norm" in vars(cls) and cls.__module__.split(".")[0] != "hf_nanguard"
    ]
    sharded = accelerator.distributed_type == DistributedType.FSDP and accelerator.is_fsdp2
    one_norm = sharded or accelerator.distributed_type in ONE_NORM
    replaced = "_clip_grad_norm" in vars(trainer) or "clip_grad_norm_" in vars(accelerator)
    clips: list[Any] = [type(accelerator).clip_grad_norm_, torch.nn.utils.clip_grad_norm_]
    files = {clip.__code__.co_filename for clip in clips}  # a patch may borrow a name, but not the file of its code
    hosts = {sys.modules["accelerate.accelerator"].__file__, sys.modules["torch.nn.utils.clip_grad"].__file__}
    is_hosts = own[0] is Trainer and not replaced and files == hosts
    mixes_meshes = getattr(trainer, "_has_mixed_mesh_grads", None)  # since transformers 5.17
    return is_hosts and one_norm and not (mixes_meshes is not None and mixes_meshes(model))


METRICS = ("_metrics", "_stored_metrics")


def metric_store(trainer: HostTrainer) -> dict[str, Any]:
    """Returns where a TRL trainer collects training metrics between two log rows, `{}` for other trainers.

    Can go when TRL's trainers have a public metric store.
    """
    metrics = next((vars(trainer)[name] for name in METRICS if name in vars(trainer)), None)
    store = metrics["train"] if isinstance(metrics, dict) and "train" in metrics else None
    return store if isinstance(store, dict) else {}


def metric_lists(trainer: HostTrainer) -> dict[str, list]:
    """Returns the lists among those metrics; a user's may be anything.

    Can go together with [`metric_store`].
    """
    return {name: values for name, values in metric_store(trainer).items() if type(values) is list}


def num_tokens(trainer: HostTrainer) -> int | None:
    """Returns how many tokens a TRL trainer's losses have counted on all ranks, `None` if they do not count them.

    Can go together with [`metric_store`].
    """
    return vars(trainer).get("_total_train_tokens")


def set_num_tokens(trainer: HostTrainer, number: int) -> None:
    """Sets that count, also where the next row of the log takes it from.

    Can go together with [`metric_store`].
    """
    trainer._total_train_tokens = number  # type: ignore[attr-defined]
    if "num_tokens" in metric_lists(trainer):
        metric_store(trainer)["num_tokens"] = [number]


def logged_advantages(trainer: HostTrainer) -> list[float] | None:
    """Returns the advantages of the newest generation that a TRL trainer has brought to the host for its own log, `None` if
    it keeps no such log.

    Can go when TRL checks its advantages itself.
    """
    logs = vars(trainer).get("_logs")
    return list(logs["advantages"]) if isinstance(logs, dict) and "advantages" in logs else None


def running_loss(trainer: HostTrainer) -> torch.Tensor:
    """Returns the loss the Trainer sums up between two log rows, on its device.

    Can go when the Trainer lets a subclass say what is logged.
    """
    return trainer._tr_loss


def begin_mean(trainer: HostTrainer) -> None:
    """Sets the first step of the run where the host does not know it: its mean loss is that of all steps.

    Can go when transformers 5.19 is the lowest version.
    """
    if not KNOWS_FIRST_STEP:
        trainer._initial_global_step = 0


def forget_step(trainer: HostTrainer) -> None:
    """Takes a skipped step out of the means that the Trainer logs, which would else show part of a 0.0.

    Can go together with `running_loss`.
    """
    trainer._globalstep_last_logged += 1
    trainer._initial_global_step += 1


def counts_no_step(trainer: HostTrainer) -> bool:
    """Returns whether no step is left in the mean loss of the run, which the Trainer then calls 0.

    Can go together with `forget_step`.
    """
    return trainer.state.global_step <= trainer._initial_global_step


def end_mean(trainer: HostTrainer) -> None:
    """Takes the steps that were left out from the mean loss of a run that ends, which older Trainers divide by `global_step`.

    Can go together with `begin_mean`.
    """
    num_steps = trainer.state.global_step
    if not KNOWS_FIRST_STEP and 0 < trainer._initial_global_step < num_steps:
        trainer._total_loss_scalar *= num_steps / (num_steps - trainer._initial_global_step)
        trainer._tr_loss *= num_steps / (num_steps - trainer._initial_global_step)


def loss_shifts_labels(trainer: HostTrainer) -> bool:
    """Returns whether position 0 of the labels is never a target.

    Can go when the Trainer makes `_loss_shifts_labels` public.
    """
    return bool(vars(trainer).get("_loss_shifts_labels", False))


def count_items(trainer: HostTrainer, batches: list[object], device: torch.device) -> torch.Tensor | int | None:
    """Returns the host's own count of loss items in these batches on this rank alone, `None` if it does not count.

    Can go when `get_batch_samples` is split in fetching and counting.
    """
    with local_collectives(trainer.args.world_size > 1):
        return trainer._get_num_items_in_batch(batches, device)


def counts_per_generation(trainer: HostTrainer) -> bool:
    """Returns whether a TRL trainer divides by the mean count of a generation times the current group size, so that a
    smaller group needs no new count.

    Can go when TRL's online trainers normalise by what `get_batch_samples` counts.
    """
    return hasattr(trainer.args, "steps_per_generation")


def completion_mask(batch: dict[str, Any]) -> torch.Tensor:
    """Returns which completion tokens of a TRL online trainer's batch count in its loss.

    Can go together with `counts_per_generation`.
    """
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def lost_loss(error: Exception) -> bool:
    """Returns whether the host raised because the model returned no loss.

    Can go when the Trainer raises an error of its own for this.
    """
    return isinstance(error, ValueError) and "did not return a loss" in str(error)


def surrounded_own_method(
    trainer: HostTrainer, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., object]]
) -> AbstractContextManager[None]:
    """Returns a context in which a method that was put on the trainer itself, where it hides that of its class, is replaced by
    `wrap(method)`; one that does nothing if there is none.

    Can go when the Trainer refuses that.
    """
    return replaced_method(trainer, name, wrap) if name in vars(trainer) else nullcontext()


@contextmanager
def log_filter(trainer: HostTrainer, active: bool) -> Iterator[None]:
    """Turns `logging_nan_inf_filter` on or off inside the block.

    Can go when the Trainer reads the losses of a step once, and filters what it logs.
    """
    before = trainer.args.logging_nan_inf_filter
    trainer.args.logging_nan_inf_filter = active
    try:
        yield
    finally:
        trainer.args.logging_nan_inf_filter = before


def filters_evaluation(trainer: HostTrainer) -> bool:
    """Returns whether the host leaves non-finite losses out of the mean of an evaluation, as transformers does since 5.23.

    Can go when the Trainer says which evaluation batches it left out.
    """
    return trainer.args.logging_nan_inf_filter and Version(transformers.__version__).release >= (5, 23)


def set_accumulation_steps(trainer: HostTrainer, steps: float) -> None:
    """Sets what the Trainer divides the loss of a micro-batch by: a fraction where ranks run different numbers of them.

    Can go when `training_step` takes it as an argument.
    """
    trainer.current_gradient_accumulation_steps = steps


def find_trainer() -> Trainer | None:
    """Returns the trainer that has called a callback, for use inside that callback: the nearest frame whose `self` is one.

    Can go when transformers passes the trainer to its callbacks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames and isinstance(owner := frame.f_locals.get("self"), Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def base_rates(trainer: HostTrainer) -> set[float]:
    """Returns the learning rates that the schedule scales, as they are after a resume; none if it has no such rates.

    Can go when a resumed Trainer keeps the learning rate of its arguments, or says that it does not.
    """
    return set(getattr(trainer.lr_scheduler, "base_lrs", ()))


def replace_callbacks(trainer: Trainer, callbacks: list[TrainerCallback]) -> None:
    """Gives a trainer other callbacks, and no others: none that report, save or print.

    Can go when the Trainer can be told to run without its callbacks.
    """
    trainer.callback_handler = CallbackHandler(callbacks, trainer.model, trainer.processing_class, None, None)


def prepare_inputs(trainer: HostTrainer, batch: object) -> object:
    """Returns a batch as a trainer gives it to its loss: on the device.

    Can go when the Trainer has a public method for it.
    """
    return trainer._prepare_inputs(batch)


def set_batch_size(trainer: HostTrainer, size: int) -> None:
    """Sets the number of rows in a micro-batch of a trainer that is already built.

    Can go when the Trainer reads it from its arguments when it makes its dataloader.
    """
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = size


def checkpoint_folder(trainer: Trainer, trial: object) -> Path:
    """Returns where the Trainer saves the checkpoint of the current step.

    Can go when the Trainer tells its callbacks.
    """
    return Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


@contextmanager
def deferred_rotation() -> Iterator[list[dict[str, object]]]:
    """Holds back the host's rotation of checkpoints inside the block; yields the list of its calls, for [`rotate`].

    Can go when the Trainer asks somebody which checkpoints to delete.
    """
    calls: list[dict[str, object]] = []
    original: Any = trainer_module.rotate_checkpoints
    trainer_module.rotate_checkpoints = lambda **call: calls.append(call)  # type: ignore[assignment]
    try:
        yield calls
    finally:
        trainer_module.rotate_checkpoints = original


def rotate(call: dict[str, Any], protected: set[Path]) -> None:
    """Deletes the checkpoints that the host would, except the protected ones, which do not count for its limit.

    Can go when `rotate_checkpoints` takes several checkpoints to protect.
    """
    limit, best = call.get("save_total_limit"), call.get("best_model_checkpoint")
    if limit is None or limit <= 0:
        return
    found = [Path(each) for each in sort_checkpoints(call["output_dir"], use_mtime=call.get("use_mtime", False))]
    kept = {path.absolute() for path in protected} & {path.absolute() for path in found[:-1]}
    if not kept:
        trainer_module.rotate_checkpoints(**call)
        return
    others = [each for each in found if each.absolute() not in kept]
    old = [each for each in others[:-1] if best is None or each != Path(best)]
    for each in old[: max(len(others) - limit, 0)]:
        rmtree(each, ignore_errors=True)


# Attributes that are restored elsewhere, or hold data. TRL's reference, teacher and reward models are frozen; a reference that
# follows the policy is held by SyncRefModelCallback as well.
KEPT_ELSEWHERE = tuple(f"trainer.{name}" for name in (
    "model", "model_wrapped", "optimizer", "lr_scheduler", "accelerator", "callback_handler", "args", "state", "control",
    "train_dataset", "eval_dataset", "_eval_dataloaders", "processing_class", "data_collator", "_buffered_inputs", "_metrics",
    "_tr_loss", "ref_model", "teacher_model", "reward_model", "reward_funcs", "trainer",
))  # fmt: skip


def find_keepers(trainer: HostTrainer) -> dict[str, object]:
    """Returns by name what may keep copies of the weights: the trainer and its callbacks.

    Can go when the Trainer knows which of its callbacks have state.
    """
    keepers: dict[str, object] = {"trainer": trainer}
    for number, each in enumerate(trainer.callback_handler.callbacks):
        name = type(each).__name__
        keepers[f"{name}[{number}]" if name in keepers else name] = each
    return keepers


def ending_when_complete(trainer: HostTrainer) -> AbstractContextManager[None]:
    """Makes a `train()` inside the block end at once if it resumes from the last step of a run.

    Can go when the Trainer does: with `max_steps` that end inside an epoch it trains one step more.
    """

    def wrap(run_epoch: Callable[..., None]) -> Callable[..., None]:
        def run(*args: object, **kwargs: object) -> None:
            if trainer.state.global_step < trainer.state.max_steps:
                run_epoch(*args, **kwargs)
            else:
                trainer.control.should_training_stop = True

        return run

    return replaced_method(trainer, "_run_epoch", wrap)
