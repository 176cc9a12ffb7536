"""What the class of a trainer says about its loss, each private host name with the condition under which it can go."""

from transformers import Trainer

from .trainer_protocol import HostTrainer

HOSTS = ("transformers.", "trl.")
# Methods by which a class computes a loss of its own.
LOSS_METHODS = (
    "training_step", "compute_loss", "_compute_loss", "compute_loss_context_manager", "_get_per_token_logps_and_entropies",
)  # fmt: skip


def find_own_loss(trainer: HostTrainer) -> list[str]:
    """Returns the names of methods and arguments that make the loss the user's own code; none if it is the hosts'.

    Can go when a Trainer says who defined its loss.
    """
    users = [c for c in type(trainer).__mro__ if not c.__module__.startswith((*HOSTS, "hf_nanguard."))]
    own = {name for name in LOSS_METHODS if name in vars(trainer) or any(name in vars(c) for c in users)}
    return sorted(own | ({"compute_loss_func"} if trainer.compute_loss_func is not None else set()))


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
