"""The guard in a hand-written training loop: torch only, no Trainer.

A small network learns to predict prices from features, with a relative error as its loss. One sample has a price of
exactly 0, so its relative error is a division by zero. Without the guard every weight is NaN after that step. The guard
drops the micro-batch with that sample and finishes the step with the others.

    python recipes/plain_loop.py --steps 50
"""

import argparse

import torch
from torch import Tensor, nn

from hf_nanguard import Guard

Batch = tuple[Tensor, Tensor]
BATCHES_PER_STEP = 4


def build_groups(steps: int, bad_step: int) -> list[list[Batch]]:
    """Returns the micro-batches of every step; one target of `bad_step` is 0."""
    torch.manual_seed(0)
    features = torch.randn(steps, BATCHES_PER_STEP, 8, 6)
    prices = (features @ torch.linspace(0.1, 0.5, 6)).exp()
    prices[bad_step, 2, 5] = 0.0
    return [list(zip(x, y, strict=True)) for x, y in zip(features, prices, strict=True)]


def build_model() -> nn.Module:
    """Returns a small network with dropout."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1), nn.Flatten(0))


def train(groups: list[list[Batch]], guarded: bool) -> tuple[nn.Module, list[dict]]:
    """Trains with or without the guard and returns the model and the events."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    events: list[dict] = []

    def relative_error(batch: Batch) -> Tensor:
        features, prices = batch
        return ((model(features) - prices).abs() / prices).mean()

    if guarded:
        guard = Guard(model, optimizer, max_grad_norm=1.0, on_event=events.append)
        for group in groups:
            guard.step(relative_error, group)
        return model, events

    for group in groups:
        for batch in group:
            (relative_error(batch) / len(group)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, events


def measure_error(model: nn.Module, batches: list[Batch]) -> float:
    """Returns the mean relative error over healthy batches."""
    with torch.no_grad():
        return torch.stack([((model.eval()(x) - y).abs() / y).mean() for x, y in batches]).mean().item()


def main() -> None:
    """Runs the loop with and without the guard and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps, at least 2 (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"argument --steps: must be at least 2, got {arguments.steps}")
    bad_step = arguments.steps // 2
    groups = build_groups(arguments.steps, bad_step)
    for name, guarded in (("plain loop", False), ("guarded loop", True)):
        model, events = train(groups, guarded)
        is_finite = [bool(weight.isfinite().all()) for weight in model.parameters()]
        weights = "all finite" if all(is_finite) else f"{is_finite.count(False)} of {len(is_finite)} tensors not finite"
        print(f"{name}: weights {weights}, relative error {measure_error(model, groups[0]):.3f}")
        for event in events:
            print(f"  event: {event['signal']}, {event['action']}: {event['message']}")


if __name__ == "__main__":
    main()
