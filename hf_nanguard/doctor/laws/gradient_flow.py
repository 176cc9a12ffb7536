"""Every trainable parameter gets a gradient and moves, nothing frozen does, and gradients say how the outputs change."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...hf.compat.accelerate import bare_optimizer
from ..rules.finding import Severity
from ..trial.borrowed_trainer import borrowed, find_models
from ..trial.checkpoint_weights import MAX_COPIED
from ..trial.law_result import ERROR, HELD, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.stopped_gradients import HOSTS, Detaches, find_custom_functions
from ..trial.trial_bench import ADAPTERS, Inputs, TrialBench, find_output, take_gradients

MAX_TRIED = 16
NOISE = 10.0  # times what the loss changes by itself: more than that is the work of a parameter
STEPS = 3  # the first update of a LoRA moves only one of its two matrices
PARTS = 4  # groups of parameters, one after the other, of which the derivative is taken
SHIFTS = (
    1e-3,
    3e-4,
    1e-4,
    3e-5,
    1e-5,
)  # of the weights, relative to their size; the next is tried if the outputs are bent
WRONG = 0.03  # a difference of a derivative that no rounding explains


def check_gradients(bench: TrialBench) -> LawResult:
    """Takes a few optimizer steps and asks which trainable parameters had a gradient in any of them."""
    parameters = bench.trainable()
    if not parameters:
        return broken(ERROR, "No parameter is trainable: requires_grad is False for all of them.")
    with borrowed(bench.trainer):
        return _check_steps(bench, parameters)


def _check_steps(bench: TrialBench, parameters: dict[str, nn.Parameter]) -> LawResult:
    before = {name: p.detach().clone() for name, p in parameters.items()}
    frozen = {name: p.detach().clone() for name, p in _name_parameters(bench).items() if not p.requires_grad}
    statistics = _copy_statistics(bench)
    reached = _take_steps(bench)
    without = [name for name in parameters if name not in reached]
    adapters = [name for name in without if any(part in name for part in ADAPTERS) and ".experts." not in name]
    if adapters:
        return _describe_missing(ERROR, adapters, len(parameters), "it is part of an adapter")
    needed = _find_needed(bench, without)
    if needed:
        return _describe_missing(ERROR, needed, len(parameters), "the loss depends on it, but nothing flows back")
    result = _check_movement(bench, {name: value for name, value in before.items() if name in reached}, frozen)
    result = _check_statistics(bench, statistics) if result.status == HELD else result
    if without and result.status == HELD:
        return _describe_missing(NOTE, without, len(parameters), "the loss of these rows does not depend on it")
    return result


def _describe_missing(severity: Severity, names: list[str], total: int, why: str) -> LawResult:
    return broken(
        severity, f"{len(names)} of {total} trainable parameters get no gradient, first {names[0]}: {why}.",
        count=len(names), parameters=names[:20], total=total,
    )  # fmt: skip


@torch.no_grad()
def _find_needed(bench: TrialBench, names: list[str]) -> list[str]:
    """Returns those parameters without a gradient whose values change the loss, by more than it changes by itself from one time
    to the next, as with the power iteration of a spectral norm; if many have none, of the first of them."""
    parameters, needed = bench.trainable(), []
    with bench.steady():
        before = float(bench.compute_loss()) if names else 0.0
        for name in names[:MAX_TRIED]:
            parameter = parameters[name]
            value = parameter.clone()
            parameter.add_(torch.randn_like(parameter))
            moved = float(bench.compute_loss())
            parameter.copy_(value)
            again = before if moved == before else float(bench.compute_loss())
            if not abs(moved - before) <= NOISE * abs(again - before):
                needed.append(name)
            before = again
    return needed


def _name_parameters(bench: TrialBench) -> dict[str, nn.Parameter]:
    """Returns the parameters of all models of the trainer; those of the trained one by their own names."""
    models = find_models(bench.trainer).items()
    return {
        name if owner == "model" else f"{owner}.{name}": p
        for owner, model in models
        for name, p in model.named_parameters()
    }


def _take_steps(bench: TrialBench) -> set[str]:
    """Takes optimizer steps and returns which parameters had a gradient."""
    optimizer = bench.trainer.optimizer
    if optimizer is None:
        raise NotApplicable("the trainer has no optimizer")
    for group in bare_optimizer(optimizer).param_groups:
        # the first step of a warm-up, not a group that never learns
        if not group["lr"] and group.get("initial_lr") != 0:
            group["lr"] = bench.trainer.args.learning_rate or 1e-4
    reached: set[str] = set()
    for step in range(STEPS):
        run = bench.run(steady=False, seed=step)
        reached |= {name for name, g in run.gradients.items() if bool((g != 0).any())}
        for name, parameter in bench.trainable().items():
            parameter.grad = run.gradients.get(name)
        optimizer.step()
        optimizer.zero_grad()
    return reached


def _check_movement(bench: TrialBench, before: dict[str, Tensor], frozen: dict[str, Tensor]) -> LawResult:
    now = _name_parameters(bench)
    moved = [name for name, value in frozen.items() if not torch.equal(now[name], value)]
    if moved:
        off = float((now[moved[0]].float() - frozen[moved[0]].float()).abs().max())
        return broken(
            ERROR, f"{len(moved)} frozen parameters moved within {STEPS} steps, first {moved[0]} by {off:.1e}.",
            count=len(moved), parameters=moved[:20], move=off,
        )  # fmt: skip
    owned = {id(p) for group in bare_optimizer(bench.trainer.optimizer).param_groups for p in group["params"]}
    stuck = [name for name, value in before.items() if torch.equal(now[name], value)]
    absent = [name for name in stuck if id(now[name]) not in owned]
    if absent:
        return broken(
            ERROR, f"{len(absent)} trainable parameters are in no group of the optimizer and never move, first {absent[0]}.",
            count=len(absent), parameters=absent[:20],
        )  # fmt: skip
    if stuck:
        return broken(
            NOTE if _is_rounded(bench, [now[name] for name in stuck]) else WARNING,
            f"{len(stuck)} trainable parameters with a gradient do not move within {STEPS} steps, first {stuck[0]}: updates "
            f"of learning rate {bench.trainer.args.learning_rate:g} are below the rounding of {bench.dtype}, or zero.",
            count=len(stuck), parameters=stuck[:20],
        )  # fmt: skip
    return held(f"{len(before)} trainable parameters move, {len(frozen)} frozen ones do not", steps=STEPS)


def _copy_statistics(bench: TrialBench) -> dict[str, Tensor]:
    """Returns the running statistics of frozen norms of batches, by the names of the modules."""
    norms = {
        name: module for name, module in bench.bare.named_modules() if getattr(module, "running_mean", None) is not None
    }
    frozen = {n: m for n, m in norms.items() if (own := list(m.parameters())) and not any(p.requires_grad for p in own)}
    return {name: torch.cat([module.running_mean, module.running_var]) for name, module in frozen.items()}


def _check_statistics(bench: TrialBench, before: dict[str, Tensor]) -> LawResult:
    now = _copy_statistics(bench)
    moved = [name for name, value in before.items() if not torch.equal(now[name], value)]
    if not moved:
        return held(f"{len(bench.trainable())} trainable parameters move, frozen ones do not", steps=STEPS)
    return broken(
        WARNING,
        f"The running mean and variance of {len(moved)} frozen batch norms move in training, first of {moved[0]}: freezing their weights does "
        "not freeze these. Keep these modules in evaluation mode, e.g. by an own train() of the model.",
        modules=moved[:20], count=len(moved),
    )  # fmt: skip


def _is_rounded(bench: TrialBench, stuck: list[Tensor]) -> bool:
    """Whether an update of the learning rate is below half the spacing of all entries of these parameters, as of norms around 1 in
    bfloat16, and most other weights move."""
    rate, eps = bench.trainer.args.learning_rate, {p.dtype: torch.finfo(p.dtype).eps for p in stuck}
    total = sum(p.numel() for p in bench.trainable().values())
    is_small = sum(p.numel() for p in stuck) < total / 2
    return is_small and rate > 0 and all(float(p.abs().min()) * eps[p.dtype] / 4 > rate for p in stuck)


def check_backward(bench: TrialBench) -> LawResult:
    """Moves weights a little along their gradients, in float32, and compares how far the outputs move with what the gradients say.

    The outputs are those of the model, not the loss, which may leave terms out of the gradient on purpose.
    """
    parameters = bench.trainable()
    if not all(p.is_floating_point() for p in bench.bare.parameters()):
        raise NotApplicable("its weights are quantised")
    if not parameters or sum(p.numel() for p in bench.bare.parameters()) > MAX_COPIED:
        raise NotApplicable("nothing of it is trained, or it is too large to be held in float32")
    inputs = bench.find_inputs()
    with borrowed(bench.trainer):
        bench.disturb()  # an adapter that is 0 gives half of its weights no gradient
        bench.use_float32()
        output = _WeighedOutput(bench, inputs)
        with bench.steady():
            found = _compare_derivatives(bench, parameters, output)
            with Detaches() as detaches:
                value = output.compute()
            functions = find_custom_functions(value)
    if not found:
        raise NotApplicable("its outputs do not depend on what is trained, as far as float32 shows")
    worst = max(found, key=lambda each: each.off)
    values = {"difference": worst.off, "bound": WRONG, "parameter": worst.name, "parts": len(found)}
    if worst.off <= WRONG:
        return held(
            f"outputs move as the gradients of {len(found)} groups of parameters say, within {worst.off:.1e}", **values
        )
    if not worst.measured:
        return broken(
            NOTE,
            f"Outputs do not move with {worst.name}, although it has a gradient: is something rounded in the forward pass?",
            **values,
        )
    if functions:  # as for gradient reversal or rounding that is passed over
        return broken(
            WARNING, f"Gradients are not how outputs move (off by {worst.off:.1%} with {worst.name}), because {', '.join(functions)} has a backward "
            "pass of its own. Unless it changes the gradient on purpose, that is wrong.", functions=functions, **values,
        )  # fmt: skip
    if detaches.modules:  # most of them on purpose, as in DoRA, and where boxes are refined layer by layer
        where = ", ".join(sorted(detaches.modules))
        return broken(
            NOTE if all(name.startswith(HOSTS) for name in detaches.modules) else WARNING,
            f"Gradients leave out a part of how outputs move ({worst.off:.1%} with {worst.name}), because {where} takes tensors out of the graph.",
            **values,
        )  # fmt: skip
    return broken(
        ERROR, f"Along the gradient of {worst.name} and the parameters after it, outputs change by {worst.measured:.3g} where the gradient says "
        f"{worst.said:.3g}. The backward pass does not belong to the forward pass: a kernel with a wrong gradient, weights that are exchanged "
        "between both, or a part that has no graph.", **values,
    )  # fmt: skip


@dataclass
class _Derivative:
    """How far outputs change along a gradient: as it says, and as measured."""

    name: str
    said: float
    measured: float

    @property
    def off(self) -> float:
        return abs(self.said - self.measured) / max(abs(self.said), abs(self.measured), 1e-30)


class _WeighedOutput:
    """A sum of all outputs with random weights, as a number to be differentiated."""

    def __init__(self, bench: TrialBench, inputs: Inputs):
        self.bench, self.inputs = bench, bench.without_loss(inputs)
        self.weights: Tensor | None = None

    def compute(self) -> Tensor:
        torch.manual_seed(0)
        self.bench.model.train()
        output = find_output(self.bench.model(**self.inputs), detached=False)
        if self.weights is None:
            generator = torch.Generator().manual_seed(0)
            self.weights = torch.randn(output.shape, generator=generator).to(output.device) / output.numel() ** 0.5
        return (output.float() * self.weights).double().sum()


def _compare_derivatives(
    bench: TrialBench, parameters: dict[str, nn.Parameter], output: _WeighedOutput
) -> list[_Derivative]:
    value = output.compute()
    if not value.requires_grad:
        return []
    noise = 2 * abs(float(output.compute()) - float(value)) + 1e-7 * max(abs(float(value)), 1.0)
    gradients = take_gradients(value, parameters)
    _leave_padding(bench, parameters, gradients)
    names = [name for name in parameters if name in gradients and bool((gradients[name] != 0).any())]
    size = -(-len(names) // PARTS) or 1
    parts = [{name: gradients[name] for name in names[i : i + size]} for i in range(0, len(names), size)]
    found = [_differentiate(output, {name: parameters[name] for name in part}, part, noise) for part in parts]
    return [each for each in found if each is not None]


def _leave_padding(bench: TrialBench, parameters: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    """Takes the row of the padding out of the gradient of an embedding, which gets none by design even if it is the head as well."""
    rows = {
        id(m.weight): m.padding_idx
        for m in bench.bare.modules()
        if isinstance(m, nn.Embedding) and m.padding_idx is not None
    }
    for name, gradient in gradients.items():
        row = rows.get(id(parameters[name]))
        if row is not None:
            gradient[row] = 0


def _differentiate(
    output: _WeighedOutput, parameters: dict[str, nn.Parameter], gradients: dict[str, Tensor], noise: float
) -> _Derivative | None:
    """Returns what a gradient says and what is measured, `None` if no shift is both small enough and above the rounding."""
    name = next(iter(gradients))
    scale = _norm(list(parameters.values())) / _norm(list(gradients.values()))
    said = sum(float(g.double().square().sum()) for g in gradients.values()) * scale
    settled: _Derivative | None = None  # on another value than the gradient's, through all smaller shifts
    before: _Derivative | None = None
    for shift in SHIFTS:
        now = _Derivative(name, said, _measure(output, parameters, gradients, scale * shift) * scale)
        if max(said, abs(now.measured)) * shift * WRONG <= noise:
            break
        if now.off <= WRONG:
            return now
        same = before is not None and _Derivative(name, before.measured, now.measured).off <= WRONG / 3
        settled, before = (now if same else None), now  # two may agree by chance where a router changes its mind
    return settled


@torch.no_grad()
def _measure(
    output: _WeighedOutput, parameters: dict[str, nn.Parameter], directions: dict[str, Tensor], shift: float
) -> float:
    """Returns the change of the output along directions, from weights on both sides of where they are."""
    ends = []
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for sign in (1, -1):
        for name, direction in directions.items():
            parameters[name].copy_(kept[name] + sign * shift * direction)
        ends.append(float(output.compute()))
    for name, value in kept.items():
        parameters[name].copy_(value)
    return (ends[0] - ends[1]) / (2 * shift)


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([each.detach().float().norm() for each in tensors]).norm())
