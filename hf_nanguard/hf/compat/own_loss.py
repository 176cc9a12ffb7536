"""What the class of a trainer says about its loss, each private host name with the condition under which it can go."""

from functools import partial
from types import MethodType

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from transformers import Trainer

from ...boundary import attempt
from ...core.torch_private import list_state_slots, pre_hooks
from .model_config import without_adapter
from .trainer_protocol import HostTrainer

HOSTS = ("transformers.", "trl.")
OURS = (
    "hf_nanguard.core.",
    "hf_nanguard.hf.",
    "hf_nanguard.takeover.",
    "hf_nanguard.testing.",
)  # examples are the users'
LIBRARIES = (*HOSTS, *OURS, "torch.", "accelerate.", "peft.", "bitsandbytes.", "liger_kernel.")
# Methods by which a class computes a loss of its own.
LOSS_METHODS = (
    "training_step", "compute_loss", "_compute_loss", "compute_loss_context_manager", "_get_per_token_logps_and_entropies",
)  # fmt: skip
# Methods that write a checkpoint, or take a run up from one.
RESUME_METHODS = (
    "_save", "save_model", "_save_checkpoint", "_save_optimizer_and_scheduler", "_save_rng_state", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_load_rng_state", "create_optimizer", "create_scheduler",
)  # fmt: skip
# Methods by which a class may change a batch between its collator and its loss.
BATCH_METHODS = ("get_batch_samples", "_prepare_inputs", "_prepare_input")


def find_own_loss(trainer: HostTrainer) -> list[str]:
    """Returns the names of methods and arguments that make the loss the user's own code; none if it is the hosts'.

    Can go when a Trainer says who defined its loss.
    """
    return _find_loss_beside(trainer, (*HOSTS, *OURS))


def _find_loss_beside(trainer: HostTrainer, libraries: tuple[str, ...]) -> list[str]:
    """Returns the names of methods and arguments by which something else than these libraries computes the loss."""
    others = [c for c in type(trainer).__mro__ if not c.__module__.startswith(libraries)]
    own = {name for name in LOSS_METHODS if name in vars(trainer) or any(name in vars(c) for c in others)}
    return sorted(own | ({"compute_loss_func"} if trainer.compute_loss_func is not None else set()))


def find_loss_state(trainer: HostTrainer) -> tuple[list[nn.Module], list[object]]:
    """Returns what a loss may write outside the model: modules that the trainer holds (a criterion with running statistics, a
    teacher), and objects with attributes, the trainer among them. TRL's losses write the trainer alone, by counting tokens;
    those of transformers write nothing.

    Can go together with [`find_own_loss`].
    """
    if not find_own_loss(trainer):
        return [], [trainer] if _find_loss_beside(trainer, ("transformers.", *OURS)) else []
    function: object = trainer.compute_loss_func
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__self__
    inside = {id(module) for module in trainer.model.modules()}
    held = {id(each): each for each in (*vars(trainer).values(), function) if isinstance(each, nn.Module)}
    kept = [module for module in held.values() if attempt(partial(_can_be_kept, module), lambda error: False)]
    modules = [module for module in kept if inside.isdisjoint(map(id, module.modules()))]
    has_attributes = hasattr(function, "__dict__")
    is_own = function is not None and function is not trainer and not isinstance(function, nn.Module)
    return modules, [trainer, *([function] if is_own and has_attributes else [])]


def _can_be_kept(module: nn.Module) -> bool:
    """Returns whether all tensors of a module can be copied and compared; raises for a scripted module, or one without a hash."""
    tensors = [tensor for slot in list_state_slots(module) if (tensor := slot.get()) is not None]
    return not any(map(is_lazy, module.parameters())) and all(
        tensor.layout is torch.strided
        and not (tensor.is_inference() or tensor.is_meta or tensor.is_quantized or tensor.is_nested)
        for tensor in tensors
    )


def has_own_batches(trainer: HostTrainer) -> bool:
    """Returns whether code of the user's stands between a batch and its loss, so that its labels and ids can mean anything.

    Can go when a Trainer says which labels its loss takes.
    """
    names = (*LOSS_METHODS, *BATCH_METHODS)
    places = [vars(owner) for owner in (trainer, *type(trainer).__mro__)]
    methods = [place[name] for place in places for name in names if name in place]
    return trainer.compute_loss_func is not None or not all(map(is_library_code, methods))


def is_hosts_resume(trainer: HostTrainer) -> bool:
    """Returns whether only the hosts' code saves and loads checkpoints of this run, and it does not start from one.

    Can go when a Trainer's resume loads what its save wrote, for every model.
    """
    places = [vars(owner) for owner in (trainer, *type(trainer).__mro__)]
    methods = [place[name] for place in places for name in RESUME_METHODS if name in place]
    classes = [type(without_adapter(trainer.model)), type(getattr(trainer.optimizer, "optimizer", trainer.optimizer))]
    asks = trainer.args.resume_from_checkpoint or trainer.args.ignore_data_skip  # type: ignore[attr-defined]
    return not asks and all(map(is_library_code, (*methods, *classes)))


def is_library_code(function: object) -> bool:
    """Returns whether a function or method is of one of the libraries, wherever it has been put."""
    return str(getattr(function, "__module__", "")).startswith(LIBRARIES)


def is_library_module(module: nn.Module) -> bool:
    """Returns whether a module's forward is a library's, and no hook of the user's comes before it.

    Can go together with [`has_own_batches`].
    """
    own = vars(module).get(
        "_original_forward", vars(module).get("forward", type(module).forward)
    )  # accelerate wraps it
    return all(map(is_library_code, (own, type(module).forward, *pre_hooks(module))))


def without_data(trainer_class: type[Trainer]) -> type[Trainer]:
    """Returns a subclass whose constructor does not process its dataset or send telemetry, and whose steps take inputs
    that are already prepared.

    Can go when a TRL trainer can be constructed without a dataset.
    """

    def keep(self: Trainer, value: object, *args: object, **kwargs: object) -> object:
        return value

    body: dict[str, object] = dict.fromkeys(("_prepare_dataset", "_precompute_ref_logps", "_prepare_inputs"), keep)
    body |= {"_send_telemetry": lambda self: None, "__module__": trainer_class.__module__}
    return type(trainer_class.__name__, (trainer_class,), body)
