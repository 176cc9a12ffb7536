"""The run that never saw the bad batch, made from stock classes only, and what it means for two runs to be equal."""

from typing import Any

import torch


def without(trainer_class: type, *dropped: tuple[int, int], generates: bool = True) -> type:
    """Returns a stock trainer class in which the given (step, micro-step) batches never come.

    A group with nothing left does not step and holds the schedule; losses are normalised by what is left. An online trainer
    `generates` the completions of dropped batches, or not.
    """

    class Without(trainer_class):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
            step = self.state.global_step
            good = [batch for i, batch in enumerate(batches) if (step, i) not in dropped]
            self.num_items = self._get_num_items_in_batch(good, device)
            self.num_good, self.micro_step = len(good), 0
            return batches, num_items

        def _prepare_inputs(self, inputs):
            prepared = super()._prepare_inputs(inputs)
            if "num_items_in_batch" not in prepared or hasattr(self.args, "steps_per_generation"):
                return prepared
            # Distillation counts the completion tokens of its group by itself.
            step, group = self.state.global_step, enumerate(self._buffered_inputs)
            good = [batch["completion_mask"].sum() for i, batch in group if (step, i) not in dropped]
            return {**prepared, "num_items_in_batch": sum(good, torch.tensor(0))}

        def training_step(self, model, inputs, num_items_in_batch=None):
            place = (self.state.global_step, self.micro_step)
            self.micro_step += 1
            self.optimizer._is_overflow = self.num_good == 0
            if place in dropped:
                if hasattr(self, "_buffered_inputs"):  # RL
                    if generates:
                        self._prepare_inputs(inputs)
                    else:  # nor are completions of an earlier policy used in their place
                        self._buffered_inputs = None
                    self._step += 1
                return torch.zeros((), device=self.args.device)
            self.current_gradient_accumulation_steps = self.num_good
            return super().training_step(model, inputs, self.num_items)

    Without.__name__ = trainer_class.__name__
    return Without


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Returns all that training changes: weights, buffers, optimizer state, random state."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, (parameter, state) in enumerate(trainer.optimizer.state.items()):
        for key, value in state.items():
            found[f"optimizer.{names.get(id(parameter), number)}.{key}"] = torch.as_tensor(value)
    found["rng"] = torch.get_rng_state()
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], rng: bool = True) -> None:
    """Asserts that two runs ended bit-identical."""
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name]) and (rng or name != "rng")]
    assert not different, f"differ: {different}"


def losses_of(trainer: Any) -> list[float]:
    """Returns the logged losses."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def counted_tokens(trainer: Any) -> dict[int, Any]:
    """Returns how many tokens each row of the log says the run has trained on, by step."""
    return {row["step"]: row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row}
