"""A bad micro-batch brought back from a bundle: model, loss and inputs as they were, ready to be run again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
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
from ..hf.trainer.held_inputs import HeldInputs
from ..hf.trainer.trainer_runner import TrainerRunner
from .loss_factory import LossFunction, call_factory, check_calls, own_loss_of_model
from .rebuilt_model import build_model, offline
from .rebuilt_trainer import REFERRING, build_share, build_trainer, check_trainer, set_up_training
from .rebuilt_weights import find_missing, load_weights, set_dtypes, set_trainable

Checkpoint = str | Path | Sequence[str | Path] | None
REMEDY_SECONDS = 600.0
# What facts must be where they are told; `None` is always allowed.
SHAPES: dict[str, type] = {"trainer": dict, "arguments": dict, "attributes": dict}
MODEL_SHAPES: dict[str, type] = {
    "class": str, "config": dict, "dtype": str, "dtypes": dict, "trainable": list, "adapters": dict,
    "active_adapter": str,
}  # fmt: skip


def replay(
    path: str | Path, checkpoint: Checkpoint = None, factory: str | None = None, remedies: bool = False
) -> Verdict:
    """Reproduces the verdict of an autopsy from its bundle.

    Args:
        path (`str` or `Path`):
            The bundle: a folder `autopsy/step-<n>` of a run.
        checkpoint (`str` or `Sequence[str]`, *optional*):
            Folder, or folders, with the weights of the model (safetensors only), if the bundle does not hold them.
        factory (`str`, *optional*):
            `"module:function"` of your own that is called with the bundle and returns the model, or model and loss
            function, if transformers and TRL alone do not have them.
        remedies (`bool`, *optional*, defaults to `False`):
            Whether to try remedies again.

    Returns:
        `Verdict`: what was found this time.

    Raises:
        ArgumentError: if the bundle is not one, is hostile, or does not hold enough.

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
    """Rebuilds what a bundle tells of and examines it. As [`replay`], with a device and a listener to its progress."""
    with offline(), quiet_hosts():
        suspect = rebuild(bundle, checkpoint, factory, device)
        return examine(suspect, Budget(REMEDY_SECONDS, say), remedies=remedies)


def rebuild(
    bundle: Bundle, checkpoint: Checkpoint = None, factory: str | None = None, device: str | None = None
) -> SuspectBatch:
    """Builds model and loss of a bundle again and puts its inputs before them.

    Args:
        bundle (`Bundle`):
            The bundle, as it was read.
        checkpoint, factory:
            As in [`replay`].
        device (`str`, *optional*):
            Where to run it. By default where it ran, or on the CPU if there is no such device here.

    Raises:
        ArgumentError: if something is missing, and what to do then.
    """
    facts = bundle.facts
    if bundle.inputs_are == "none":
        why = bundle.left_out.get("inputs", "they were left out")
        raise ArgumentError(f"The bundle {str(bundle.path)!r} holds no inputs ({why}), so nothing can be run again.")
    model = facts.get("model")
    check_shapes(facts, SHAPES)
    check_shapes(model if isinstance(model, dict) else facts, MODEL_SHAPES)
    recorded = (model if isinstance(model, dict) else facts).get("device")
    home = find_device(device or recorded, asked=device is not None)
    given, loss_fn = (None, None) if factory is None else call_factory(factory, bundle)
    with offline(), quiet_hosts():
        if given is not None and loss_fn is not None:
            load_weights(given, bundle.read_weights(), strict=False)
            return hold_loop(bundle, given.to(home), loss_fn, home)
        if facts.get("kind") == "callback":
            check_calls(bundle.inputs)
            built = fill(bundle, *(build_parts(bundle, checkpoint) if given is None else (given, None)))
            return hold_loop(bundle, built.to(home), own_loss_of_model(model_facts(bundle), home), home)
        if facts.get("kind") != "trainer":
            raise ArgumentError(
                "The bundle comes from a loop of its author's, whose loss it cannot hold. Give model and loss by --factory "
                "module:function, a function of the bundle that returns (model, loss_fn)."
            )
        return hold_trainer(bundle, checkpoint, given, home)


def check_shapes(facts: dict[str, Any], shapes: dict[str, type]) -> None:
    """Refuses facts that are not of the type they should be."""
    for name, kind in shapes.items():
        value = facts.get(name)
        if value is None:
            continue
        parts = [*value.keys(), *(value.values() if name == "dtypes" else ())] if isinstance(value, dict) else value
        if not isinstance(value, kind) or (kind is not str and not all(isinstance(part, str) for part in parts)):
            raise ArgumentError(
                f"The bundle's fact {name!r} must be a {kind.__name__}, got {str(value)[:60]!r}. Have it written anew."
            )


def hold_trainer(bundle: Bundle, checkpoint: Checkpoint, given: nn.Module | None, device: torch.device) -> SuspectBatch:
    """Returns the specimen of a recorded trainer, built as its constructor builds it."""
    facts = bundle.facts
    name = check_trainer(facts, bundle.inputs)
    added = ("ref",) if name in REFERRING else ()  # a copy of the adapter that the constructor makes
    model, known = build_parts(bundle, checkpoint, added) if given is None else (given, None)
    trainer = build_trainer(name, model, facts, device)
    model = fill(bundle, trainer.model, known)
    set_up_training(trainer, facts)
    wrapped = trainer.accelerator.prepare_model(model)
    runner = TrainerRunner(trainer, wrapped, Ranks(trainer.args.device), trainer.nanguard.recorder)
    inputs = move(bundle.inputs, trainer.args.device)
    share = build_share(facts, inputs, trainer.args.device)
    return hold(bundle, runner, HeldInputs.of(inputs), share)


def hold_loop(bundle: Bundle, model: nn.Module, loss_fn: LossFunction, device: torch.device) -> SuspectBatch:
    """Returns the specimen of a plain loss function."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ArgumentError("The model must have a trainable parameter, got none. Check what --factory returns.")
    runner = LoopRunner(model, torch.optim.SGD(trainable, lr=0.0))
    runner.optimizer = None  # type: ignore[assignment] # there is no update to be examined
    runner.loss_fn = lambda inputs: loss_fn(model, copy(inputs) if isinstance(inputs, Mapping) else inputs)
    share = bundle.facts.get("share")
    weight = float(share) if isinstance(share, (int, float)) else 1.0
    return hold(bundle, runner, move(bundle.inputs, device), weight)


def hold(bundle: Bundle, runner: Runner, payload: Any, share: Any) -> SuspectBatch:
    """Returns the specimen, with as many samples as it had in the run."""
    runner.model.train()
    runner.buffers.keep()
    rows = bundle.facts.get("rows")
    rows = rows if isinstance(rows, list) and all(isinstance(row, int) for row in rows) else None
    rng = bundle.rng
    if rng.device_type not in ("cpu", runner.device_type):
        rng = replace(rng, device=None, device_type="cpu")
    samples = bundle.verdict.get("num_samples") if bundle.inputs_are == "all" else None
    known = samples if isinstance(samples, int) and samples > 0 else None
    return SuspectBatch(runner, MicroBatch(0, payload, rng, row_numbers=rows), share, known)


def find_device(name: Any, asked: bool) -> torch.device:
    """Returns a device that is there: the CPU in place of one that is not, unless it was asked for."""
    try:
        wanted = torch.device(name if isinstance(name, str) else "cpu")
        torch.empty(1, device=wanted).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if asked:
            raise ArgumentError(f"--device must be a device of this machine, got {name!r}. Use cpu.") from error
        return torch.device("cpu")
    return wanted


# ---- model ----


def build_parts(bundle: Bundle, checkpoint: Checkpoint, without: tuple[str, ...] = ()) -> tuple[nn.Module, set[int]]:
    """Returns the bundle's model, its weights still to come, and the parameters that have theirs from a checkpoint.

    Args:
        bundle, checkpoint:
            As in [`rebuild`].
        without (`tuple[str, ...]`):
            Adapters that somebody else is to add.
    """
    folders = [checkpoint] if isinstance(checkpoint, (str, Path)) else list(checkpoint or ())
    facts = dict(model_facts(bundle))
    adapters = facts.get("adapters")
    if isinstance(adapters, dict):
        facts["adapters"] = {name: told for name, told in adapters.items() if name not in without}
    return build_model(facts, [Path(folder) for folder in folders])


def model_facts(bundle: Bundle) -> dict[str, Any]:
    """Returns what the bundle tells about its model."""
    facts = bundle.facts if bundle.facts.get("kind") == "callback" else bundle.facts.get("model")
    if not isinstance(facts, dict) or "class" not in facts:
        raise ArgumentError(
            "The bundle does not tell how its model is built. Give the model by --factory module:function."
        )
    return facts


def fill(bundle: Bundle, model: nn.Module, known: set[int] | None) -> nn.Module:
    """Puts the bundle's weights into a model, sees that none is missing, and sets dtypes and trainability as of old.

    A model of the user's own (`known` is `None`) keeps what it has apart from that.
    """
    if known is None:
        load_weights(model, bundle.read_weights(), strict=False)
        return model
    facts = model_facts(bundle)
    host: Any = model
    adapters = facts.get("adapters") or {}
    if adapters and "ref" in host.peft_config and "ref" not in adapters:  # the run had none: its reference was the base
        host.delete_adapter("ref")
    known = known | load_weights(model, bundle.read_weights())
    missing = find_missing(model, known)
    if missing:
        total = sum(1 for _ in model.parameters())
        raise ArgumentError(
            f"The bundle does not hold {len(missing)} of the model's {total} parameters (the first is {missing[0]}). Give "
            "them by --checkpoint FOLDER, or set nanguard_bundle_weights='all' in the run for the next bundle."
        )
    set_dtypes(model, facts)
    set_trainable(model, facts)
    return model


def move(inputs: Any, device: torch.device) -> Any:
    """Returns nested inputs on a device."""
    return map_tensors(inputs, lambda tensor: tensor.to(device))


@contextmanager
def quiet_hosts() -> Iterator[None]:
    """Keeps banners of the host libraries off the screen."""
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)
