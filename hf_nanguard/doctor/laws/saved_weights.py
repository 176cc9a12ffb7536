"""What is saved is what was trained: saved, loaded and merged models give the same logits, tied heads stay tied, and the
model to train is the one in its checkpoint."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...boundary import attempt
from ...hf.compat.model_config import find_adapters, find_config, without_adapter
from ...own_fields import own_fields
from ...plain_text import format_error
from ..trial.borrowed_trainer import borrowed
from ..trial.checkpoint_weights import compare_with_checkpoint
from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.moved_output import measure_move
from ..trial.trial_bench import ADAPTERS, Inputs, TrialBench, find_output

FROM_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def check_round_trip(bench: TrialBench) -> LawResult:
    """Saves the model as the trainer does, loads it as a user would, and compares weights and logits."""
    model = bench.bare
    tied = _check_tied(model)
    if tied is not None:
        return tied
    if _changes_base(model):
        raise NotApplicable(
            "its adapter takes its first values out of the model's own weights, which differ from the saved ones by design"
        )
    # A loss that calls parts of the model shows no inputs of the whole: then only weights are compared.
    inputs = attempt(bench.find_inputs, lambda error: None)
    # Of a model with adapters only these are saved. They are loaded into the model as it was before training.
    base = None if without_adapter(model) is model else _copy_base(model)
    with borrowed(bench.trainer):
        bench.disturb()
        return _save_and_load(bench, model, inputs, base)


def _save_and_load(bench: TrialBench, model: Any, inputs: Inputs | None, base: object) -> LawResult:
    folder = Path(bench.trainer.args.output_dir) / "saved"
    bench.trainer.save_model(str(folder))
    expected = None if inputs is None else bench.forward(inputs)
    try:
        loaded = _load(bench, model, folder, base)
    except (KeyError, RuntimeError) as error:  # what PEFT raises for weights that are absent or of another shape
        if base is None:
            raise
        return broken(
            ERROR,
            f"The saved adapter cannot be loaded ({format_error(error)}): its files lack weights that its config names.",
        )
    different = _compare_weights(model, loaded)
    if different is not None:
        name, off = different
        hint = "" if base is None or any(part in name for part in ADAPTERS) else (
            " It is trained outside the adapter, whose files do not hold it: name its module in modules_to_save."
        )  # fmt: skip
        return broken(ERROR, f"After saving and loading, {name} {off}.{hint}", parameter=name, difference=off)
    if inputs is None or expected is None:
        return held("saved and loaded weights are equal")
    move = _compare_logits(bench, loaded, inputs, expected)
    if move > bench.tolerance:
        return broken(
            WARNING,
            f"After saving and loading, all weights are equal, but the logits differ by {move:.1e} of their spread. A setting of "
            "the config is not saved, or the model has hooks or patched methods that a loaded one has not.",
            move=move,
        )
    return held(f"saved and loaded weights are equal, logits agree within {move:.1e}", move=move)


def check_merge(bench: TrialBench) -> LawResult:
    """Merges the adapter, saves and loads the merged model, and compares its logits with those of the adapter."""
    model: object = bench.bare
    if not hasattr(model, "merge_and_unload"):
        raise NotApplicable("its model has no adapter to merge")
    with borrowed(bench.trainer):
        bench.disturb()
        return _merge_and_load(bench, model)


def _merge_and_load(bench: TrialBench, model: object) -> LawResult:
    inputs = bench.find_inputs()
    expected = bench.forward(inputs)
    merged = _copy_model(model).merge_and_unload()
    move = _compare_logits(bench, merged, inputs, expected)
    if move > bench.allow(2):
        return broken(ERROR, f"After merging the adapter, the logits differ by {move:.1e} of their spread.", move=move)
    folder = Path(bench.trainer.args.output_dir) / "merged"
    merged.save_pretrained(str(folder))
    loaded = type(merged).from_pretrained(str(folder), dtype=merged.dtype)
    again = _compare_logits(bench, loaded, inputs, expected)
    if again > bench.allow(2):
        return broken(
            ERROR, f"The merged model, saved and loaded, gives logits that differ by {again:.1e} of their spread from those of the "
            "adapter. Is a tied head or embedding trained apart while tie_word_embeddings is True?", move=again, merged_move=move,
        )  # fmt: skip
    return held(f"logits of the merged model, saved and loaded, agree within {again:.1e}", move=again)


def check_loaded(bench: TrialBench) -> LawResult:
    """Compares the weights that are about to be trained with those of the checkpoint they were loaded from."""
    if bench.has_trained:
        raise NotApplicable("the trainer has trained already")
    model: object = without_adapter(bench.bare)
    if getattr(model, "quantization_method", None) is not None:
        raise NotApplicable("its weights are quantised")
    if _changes_base(bench.bare):
        raise NotApplicable("its adapter takes its first values out of the model's own weights")
    found = compare_with_checkpoint(model, is_adapted=model is not bench.bare)
    if found is None:
        raise NotApplicable("its model was not loaded from a folder with safetensors files")
    if not found.equal and not found.different:
        raise NotApplicable("its weights have other names than those of the checkpoint")
    if found.different:
        name = max(found.different, key=lambda each: found.different[each])
        total = len(found.equal) + len(found.different)
        return broken(ERROR, f"{len(found.different)} of {total} weights differ from the checkpoint {found.folder} they were loaded from, most "
                      f"{name} by {found.different[name]:.1e}. They were initialised anew or changed.", parameter=name,
                      count=len(found.different))  # fmt: skip
    total = len(found.equal) + len(found.new)
    if found.lost:
        return broken(
            ERROR if found.lost_inside else WARNING,
            f"{len(found.lost)} of {total} weights are not in the checkpoint {found.folder} and begin with random values, first {found.lost[0]}. "
            "Was it saved by another version, or by another class of model?", parameters=found.lost[:20],
        )  # fmt: skip
    if found.unused:
        return broken(NOTE, f"{len(found.equal)} weights equal those of the checkpoint, {len(found.unused)} of its weights have no counterpart "
                      f"in the model, first {found.unused[0]}.", parameters=found.unused[:20])  # fmt: skip
    new = f"; {', '.join(found.new[:3])} are new" if found.new else ""
    return held(
        f"{len(found.equal)} weights equal those of the checkpoint {found.folder}{new}", matched=len(found.equal)
    )


# ---- tools ----


def _check_tied(model: Any) -> LawResult | None:
    config = find_config(model)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return None
    modules = model.get_output_embeddings(), model.get_input_embeddings()
    weights = [weight for module in modules if isinstance(weight := getattr(module, "weight", None), Tensor)]
    if len(weights) < 2 or weights[0].shape != weights[1].shape or weights[0].data_ptr() == weights[1].data_ptr():
        return None
    severity = ERROR if any(weight.requires_grad for weight in weights) else WARNING
    return broken(severity, "tie_word_embeddings is True, but head and embeddings are two tensors: they are trained apart, and only "
                  "one of them is used after loading.")  # fmt: skip


def _copy_model(model: Any) -> Any:
    """Returns a copy without what somebody has put in place of a forward, which would call the original."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        for name in ("forward", "_original_forward"):
            own_fields(module).pop(name, None)
    return copied


def _changes_base(model: object) -> bool:
    """Whether an adapter is initialised from the weights it is added to, and taken off them (PiSSA, OLoRA, CorDA, LoftQ)."""
    starts = [getattr(config, "init_lora_weights", None) for config in find_adapters(model).values()]
    return any(isinstance(each, str) and each.startswith(FROM_WEIGHTS) for each in starts)


def _copy_base(model: object) -> object:
    copied = _copy_model(model)
    return copied.unload() if hasattr(copied, "unload") else copied.get_base_model()


def _load(bench: TrialBench, model: object, folder: Path, base: Any) -> Any:
    if isinstance(model, PreTrainedModel):
        return type(model).from_pretrained(str(folder), dtype=model.dtype).to(bench.device)
    if base is not None:
        from peft import PeftModel

        return PeftModel.from_pretrained(base, str(folder)).to(bench.device)
    raise NotApplicable("its model is no transformers or PEFT model, so there is no common way to load it")


def _compare_weights(model: nn.Module, loaded: nn.Module) -> tuple[str, str] | None:
    """Returns the first weight that is another one after loading, and by how much. Of a model with adapters only the trained
    ones are saved."""
    after = dict(loaded.state_dict())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, tensor in model.state_dict().items():
        if name not in trained and hasattr(model, "peft_config"):
            continue
        other = after.get(name)
        if other is None or other.shape != tensor.shape:
            return (
                name,
                "is absent"
                if other is None
                else f"has the shape {tuple(other.shape)} instead of {tuple(tensor.shape)}",
            )
        if not torch.equal(tensor, other.to(tensor.device, tensor.dtype)):
            return name, f"differs by {float((tensor.float() - other.to(tensor.device).float()).abs().max()):.1e}"
    return None


def _compare_logits(bench: TrialBench, loaded: nn.Module, inputs: Inputs, expected: Tensor) -> float:
    with torch.no_grad(), bench.trainer.accelerator.autocast():
        output = find_output(loaded.eval()(**bench.without_loss(inputs)))
    if output.shape != expected.shape:
        return float("inf")
    return measure_move(expected, output)
