"""Terms and tensors of a loss, named to the guard by a trainer that runs with it or without it."""

from torch import Tensor
from transformers import Trainer

from .trainer.mixin import GuardedTrainerMixin


def weigh_term(trainer: Trainer, name: str, value: Tensor, weight: float = 1.0, on_nonfinite: str = "keep") -> Tensor:
    """Returns a term of the loss times its weight. If the trainer is guarded, the term is checked, logged and named in events.

    Args:
        trainer (`Trainer`):
            Whose `compute_loss` this is called in.
        name (`str`), value (`Tensor`), weight (`float`, *optional*, defaults to `1.0`), on_nonfinite (`str`, *optional*):
            As in [`Guard.term`].

    Example:

    ```python
    loss = weigh_term(self, "text", text_loss) + weigh_term(self, "latent", latent_loss, 0.1, "drop")
    ```
    """
    if isinstance(trainer, GuardedTrainerMixin):
        return trainer.nanguard.guard.term(name, value, weight, on_nonfinite)
    return weight * value


def watch_tensor(trainer: Trainer, name: str, tensor: Tensor, bound: float | None = None) -> None:
    """Checks a tensor, as [`Guard.watch`] does, if the trainer is guarded."""
    if isinstance(trainer, GuardedTrainerMixin):
        trainer.nanguard.guard.watch(name, tensor, bound)
