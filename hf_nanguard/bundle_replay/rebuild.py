"""A bad micro-batch rebuilt from its bundle: model, loss and inputs as they were, ready to be run again."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..core.autopsy.bundle.reader import Bundle, read_bundle
from ..core.autopsy.examiner import Budget, examine
from ..core.autopsy.remedies.tensor_swap import map_tensors
from ..core.autopsy.suspect_batch import SuspectBatch
from ..core.autopsy.verdict import Verdict
from ..core.ranks import Ranks
from ..core.rerun.micro_batch import MicroBatch
from ..core.rerun.runner import LoopRunner, Runner
from ..core.rng import RngState
from ..errors import ArgumentError
from ..hf.trainer.trainer_runner import HeldInputs, TrainerRunner
from .loss_factory import LossFunction, call_factory, make_model_loss
from .rebuilt_model import build_model, find_adapters, match_adapters
from .rebuilt_trainer import build_share, build_trainer, set_up_training
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

    Args:
        bundle (`Bundle`):
            The bundle.
        checkpoint, factory:
            As in [`replay`].
        device (`str`, *optional*):
            Where to run it. By default where it ran, or on the CPU if this machine has no such device.

    Raises:
        ArgumentError: Something is missing; the message says what to do.
    """
    if bundle.inputs_are == "none":
        why = bundle.left_out.get("inputs", "they were left out")
        raise ArgumentError(f"The bundle {str(bundle.path)!r} cannot be replayed because it has no inputs: {why}.")
    facts, kind = bundle.facts, bundle.facts.get("kind")
    described = facts if kind == "callback" else facts.get("model")
    told: Facts = described if isinstance(described, dict) else {}
    home = find_device(device, told.get("device"))
    folders = [checkpoint] if isinstance(checkpoint, (str, Path)) else list(checkpoint or ())
    failure = f"The bundle's model or trainer could not be built with transformers {transformers.__version__}"
    with foreign_code(failure):
        model, loss_fn = (None, None) if factory is None else call_factory(factory, bundle)
        if loss_fn is None and kind not in ("trainer", "callback"):
            raise needs_factory("The bundle comes from a hand-written training loop, whose loss is not in it")
        known: set[int] | None = None  # of a model of the user's own everything is known
        if model is None:
            if "class" not in told:
                raise needs_factory("The bundle does not describe its model")
            model, known = build_model(told, [Path(folder) for folder in folders])
        trainer = None
        if loss_fn is None and kind == "callback":
            loss_fn = make_model_loss(bundle.inputs, take(told, "mixed_precision", str), home)
        elif loss_fn is None:
            trainer = build_trainer(model, facts, bundle.inputs, home)
        if known is None:
            load_weights(model, bundle.read_weights(), strict=False)
        else:
            match_adapters(model, find_adapters(told))
            fill_model(model, bundle, told, known)
        inputs = map_tensors(bundle.inputs, lambda tensor: tensor.to(home))
        if loss_fn is not None:
            return hold(bundle, build_loop(model.to(home), loss_fn), inputs, 1.0)
        assert trainer is not None
        set_up_training(trainer, facts)
        wrapped = trainer.accelerator.prepare_model(model)
        share = build_share(facts, inputs, home)
        return hold(bundle, TrainerRunner(trainer, wrapped, Ranks(home)), HeldInputs.of(inputs), share)


def build_loop(model: nn.Module, loss_fn: LossFunction) -> LoopRunner:
    """Returns the runner of a plain loss function."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ArgumentError("The model must have a trainable parameter, got none. Check what --factory returns.")
    runner = LoopRunner(model, torch.optim.SGD(trainable, lr=0.0))
    runner.optimizer = None  # type: ignore[assignment] # there is no update to be examined
    runner.loss_fn = lambda inputs: loss_fn(model, copy(inputs) if isinstance(inputs, Mapping) else inputs)
    return runner


def hold(bundle: Bundle, runner: Runner, payload: Any, share: Any) -> SuspectBatch:
    """Returns the micro-batch, with as many samples as it had in the run."""
    runner.model.train()
    runner.buffers.keep()
    rows = bundle.facts.get("rows")
    rows = rows if isinstance(rows, list) and all(isinstance(row, int) for row in rows) else None
    rng = bundle.rng
    if rng.device_type not in ("cpu", runner.device_type):
        rng = replace(rng, device=None, device_type="cpu")
    suspect = SuspectBatch(runner, MicroBatch(0, payload, rng, row_numbers=rows), share)
    entries, samples = suspect.num_entries, bundle.verdict.get("num_samples")
    if bundle.inputs_are == "all" and entries and isinstance(samples, int) and samples > 0 and entries % samples == 0:
        suspect.num_samples = samples  # the pair of a preference trainer is one sample
    return suspect


def find_device(asked: str | None, recorded: Any) -> torch.device:
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
