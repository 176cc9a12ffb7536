"""A bad micro-batch rebuilt from its bundle: model, loss and inputs as they were, ready to be run again."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn

from ..core.autopsy.bundle.reader import Bundle, read_bundle
from ..core.autopsy.evidence.suspect_batch import SuspectBatch
from ..core.autopsy.evidence.verdict import Verdict
from ..core.autopsy.examiner import Budget, examine
from ..core.ranks import Ranks
from ..core.rerun.micro_batch import MicroBatch
from ..core.rerun.nested_inputs import map_tensors
from ..core.rerun.runner import LoopRunner, Runner
from ..core.rng import RngState
from ..errors import ArgumentError
from ..hf.trainer.held_inputs import HeldInputs, LossWeight
from ..hf.trainer.trainer_runner import TrainerRunner
from .loss_factory import LossFunction, call_factory, make_model_loss
from .rebuilt_model import build_model, find_adapters, match_adapters
from .rebuilt_trainer import build_trainer, build_weight, check_trainer, set_up_training
from .rebuilt_weights import fill_model, load_weights
from .untrusted_facts import Facts, foreign_code, needs_factory, take

Checkpoint = str | Path | Sequence[str | Path] | None
REMEDY_SECONDS = 600.0


def replay(
    path: str | Path, checkpoint: Checkpoint = None, factory: str | None = None, remedies: bool = False
) -> Verdict:
    """Reproduces the verdict of an autopsy from its bundle.

    Args:
        path (`str` or `Path`):
            The bundle: a folder `autopsy/step-<n>` of a run.
        checkpoint (`str` or `Sequence[str]`, *optional*):
            Folder, or folders, with the weights of the model (safetensors only), if they are not in the bundle.
        factory (`str`, *optional*):
            `"module:function"` of your own that is called with the bundle and returns the model, or model and loss
            function, if these are not of transformers and TRL.
        remedies (`bool`, *optional*, defaults to `False`):
            Whether to try remedies again.

    Returns:
        `Verdict`: what was found this time.

    Raises:
        ArgumentError: if the folder is not a bundle, or the bundle is damaged, hostile or incomplete.

    No code of the bundle is executed, but it is rebuilt in this process: a forged one may take time and memory. The command
    `nanguard replay` limits both.

    Example:

    ```python
    verdict = replay("runs/sft/nanguard/autopsy/step-42", checkpoint="runs/sft/checkpoint-40")
    print(verdict.origin.module, verdict.cause)
    ```
    """
    before = RngState.capture()
    try:
        return examine_bundle(read_bundle(path), checkpoint, factory, remedies)
    finally:
        before.restore()


def examine_bundle(
    bundle: Bundle,
    checkpoint: Checkpoint = None,
    factory: str | None = None,
    remedies: bool = False,
    device: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Verdict:
    """Rebuilds the micro-batch of a bundle and examines it: [`replay`] with a device and a function that shows progress."""
    suspect = rebuild(bundle, checkpoint, factory, device)
    with foreign_code(f"The bundle {str(bundle.path)!r} could not be run"):
        return examine(suspect, Budget(REMEDY_SECONDS, say), remedies=remedies)


def rebuild(
    bundle: Bundle, checkpoint: Checkpoint = None, factory: str | None = None, device: str | None = None
) -> SuspectBatch:
    """Rebuilds the model and the loss of a bundle and returns its micro-batch, ready to be run with them.

    `checkpoint` and `factory` are as in [`replay`]. Without `device` it runs where it ran before, or on the CPU if this
    machine has no such device. If something is missing, the [`ArgumentError`] says what to do.
    """
    if bundle.inputs_are == "none":
        why = bundle.left_out.get("inputs", "they were left out")
        raise ArgumentError(f"The bundle {str(bundle.path)!r} cannot be replayed because it has no inputs: {why}.")
    kind = bundle.facts.get("kind")
    described = bundle.facts if kind == "callback" else bundle.facts.get("model")
    recorded: Facts = described if isinstance(described, dict) else {}
    with foreign_code(f"The bundle's model or trainer could not be built with transformers {transformers.__version__}"):
        home = find_device(device, recorded.get("device"))
        model, loss_fn = (None, None) if factory is None else call_factory(factory, bundle)
        known = None  # a model of the user's own has all its weights
        if loss_fn is None and kind not in ("trainer", "callback"):
            raise needs_factory("The bundle comes from a hand-written training loop, whose loss is not in it")
        name = check_trainer(bundle.facts, bundle.inputs) if loss_fn is None and kind == "trainer" else None
        if model is None:
            folders = [checkpoint] if isinstance(checkpoint, (str, Path)) else list(checkpoint or ())
            model, known = build_model(recorded, [Path(folder) for folder in folders])
        if name is not None:
            return hold_trainer(bundle, name, model, recorded, known, home)
        loss_fn = loss_fn or make_model_loss(bundle.inputs, take(recorded, "mixed_precision", str), home)
        fill(model, bundle, recorded, known)
        inputs = map_tensors(bundle.inputs, lambda tensor: tensor.to(home))
        return hold(bundle, build_loop(model.to(home), loss_fn), inputs, 1.0)


def fill(model: nn.Module, bundle: Bundle, recorded: Facts, known: set[int] | None) -> None:
    """Loads the bundle's weights into a rebuilt model, or those that fit into a model of the user's own."""
    if known is None:
        load_weights(model, bundle.read_weights(), strict=False)
    else:
        match_adapters(model, find_adapters(recorded))
        fill_model(model, bundle, recorded, known)


def hold_trainer(
    bundle: Bundle, name: str, model: nn.Module, recorded: Facts, known: set[int] | None, device: torch.device
) -> SuspectBatch:
    """Returns the micro-batch with a rebuilt trainer."""
    trainer = build_trainer(name, model, bundle.facts, device)
    fill(trainer.model, bundle, recorded, known)
    set_up_training(trainer, bundle.facts)
    model = trainer.accelerator.prepare_model(trainer.model)
    # Stands where a guarded trainer hands out held inputs: a rebuilt one takes its inputs as they are.
    prepared: Any = SimpleNamespace(num_backwards=0, replaying=lambda held: nullcontext())
    runner = TrainerRunner(trainer, model, Ranks(trainer.args.device), prepared)
    inputs = map_tensors(bundle.inputs, lambda tensor: tensor.to(trainer.args.device))
    return hold(bundle, runner, HeldInputs.of(inputs), build_weight(bundle.facts, inputs, trainer.args.device))


def build_loop(model: nn.Module, loss_fn: LossFunction) -> LoopRunner:
    """Returns the runner of a plain loss function."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ArgumentError("The model must have a trainable parameter, got none. Check what --factory returns.")
    runner = LoopRunner(model, None)  # there is no update to be examined
    runner.begin_group(lambda inputs: loss_fn(model, copy(inputs) if isinstance(inputs, Mapping) else inputs))
    return runner


def hold(bundle: Bundle, runner: Runner, payload: object, weight: LossWeight | float) -> SuspectBatch:
    """Returns the micro-batch, with as many samples as it had in the run."""
    runner.model.train()
    runner.buffers.keep()
    rows = bundle.facts.get("rows")
    rows = rows if isinstance(rows, list) and all(isinstance(row, int) for row in rows) else None
    rng = bundle.rng
    if rng.device_type not in ("cpu", runner.device_type):
        rng = replace(rng, device=None, device_type="cpu")
    samples = bundle.verdict.get("num_samples") if bundle.inputs_are == "all" else None
    known = samples if isinstance(samples, int) and samples > 0 else None
    return SuspectBatch(runner, MicroBatch(0, payload, rng, row_numbers=rows), weight, known)


def find_device(asked: str | None, recorded: object) -> torch.device:
    """Returns the device that was asked for, or the recorded one if this machine has it, or the CPU."""
    name = asked or (recorded if isinstance(recorded, str) else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if asked:
            raise ArgumentError(f"--device must be a device of this machine, got {name!r}. Use cpu.") from error
        return torch.device("cpu")
    return device
