"""Training and evaluation see the same model: forwards agree at dropout 0, and a frozen reference draws nothing."""

from typing import Any

import torch
from torch import Tensor, nn

from ..trial.borrowed_trainer import find_models
from ..trial.law_result import ERROR, Law, LawResult, NotApplicable, broken, held
from ..trial.moved_output import measure_move
from ..trial.trial_bench import TrialBench, find_output


def check_modes(bench: TrialBench) -> LawResult:
    """Compares the outputs of the model in training mode, with dropout off, with those in evaluation mode."""
    if any("batchnorm" in type(module).__name__.lower() for module in bench.bare.modules()):
        raise NotApplicable("batch normalisation uses other statistics in training by design")
    inputs = bench.find_inputs()
    training = [_forward_seeded(bench, inputs, seed) for seed in (0, 1)]
    evaluation = bench.forward(inputs)
    if training[0].shape != evaluation.shape:
        raise NotApplicable("its model returns something else in training")
    places = torch.ones(evaluation.shape[:-1], dtype=torch.bool, device=evaluation.device)
    noise, bound = measure_move(training[0], training[1], places), bench.tolerance
    if noise > bound:
        raise NotApplicable(
            f"its forward draws random numbers in training with all dropout off (outputs differ by {noise:.1e})"
        )
    move = measure_move(evaluation, training[0], places)
    if move <= bound + 10 * noise:
        return held(
            f"outputs in training and in evaluation agree within {move:.1e} of their spread", move=move, bound=bound
        )
    return broken(ERROR, f"Outputs in training mode, with dropout off, differ from those in evaluation mode by {move:.1e} of their "
                  f"spread (rounding explains {bound:.0e}).", move=move, bound=bound)  # fmt: skip


def _forward_seeded(bench: TrialBench, inputs: dict[str, Any], seed: int) -> Tensor:
    torch.manual_seed(seed)
    return bench.forward(inputs, training=True)


def check_references(bench: TrialBench) -> LawResult:
    """Asks whether a frozen model of the trainer, as its loss runs it, gives the same outputs twice."""
    own = {id(parameter) for parameter in bench.bare.parameters()}
    models = {
        name: model
        for name, model in find_models(bench.trainer).items()
        if name != "model" and not any(id(parameter) in own for parameter in model.parameters())
    }
    if not models:
        raise NotApplicable("the trainer has no model beside the trained one")
    first, second = ({name: _outputs(bench, model, seed) for name, model in models.items()} for seed in (0, 1))
    ran = [name for name in models if first[name]]
    if not ran:
        raise NotApplicable("its loss does not run its frozen models in a training step")
    for name in ran:
        for a, b in zip(first[name], second[name], strict=False):
            places = torch.ones(a.shape[:-1], dtype=torch.bool, device=a.device)
            move = measure_move(a, b, places) if a.shape == b.shape else 0.0
            if move > bench.tolerance:
                mode = "it is in training mode" if models[name].training else "though it is in evaluation mode"
                return broken(ERROR, f"The frozen {name} gives other outputs for the same batch (by {move:.1e} of their spread): "
                              f"{mode}, with dropout on.", move=move, model=name)  # fmt: skip
    return held(f"{', '.join(ran)} gives the same outputs twice", models=ran)


def _outputs(bench: TrialBench, model: nn.Module, seed: int) -> list[Tensor]:
    """Returns the outputs of a model while the trainer computes its loss, with everything random left on."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        found.append(find_output(output))

    torch.manual_seed(seed)
    with model.register_forward_hook(note), torch.no_grad():
        bench.compute_loss()
    return found


LAWS = (
    Law("train_and_eval", "outputs in training and in evaluation agree at dropout 0", check_modes),
    Law("frozen_models", "a frozen reference or teacher gives the same outputs twice", check_references),
)  # fmt: skip
