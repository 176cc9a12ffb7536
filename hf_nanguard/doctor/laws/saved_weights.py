"""What is saved is what was trained: saved, loaded and merged models give the same logits, tied heads stay tied, and the
model to train is the one in its checkpoint."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...core.torch_private import plain_name
from ...hf.compat.model_config import find_config, without_adapter
from ..trial.borrowed_trainer import borrowed
from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.moved_output import measure_move
from ..trial.trial_bench import Inputs, TrialBench, find_output

NOISE = 0.05  # of a weight's spread: as if trained, so that equal and tied weights differ where they can


def check_round_trip(bench: TrialBench) -> LawResult:
    """Saves the model as the trainer does, loads it as a user would, and compares weights and logits."""
    with borrowed(bench.trainer):
        _disturb(bench)
        return _save_and_load(bench, bench.bare)


def _save_and_load(bench: TrialBench, model: Any) -> LawResult:
    tied = _check_tied(model)
    if tied is not None:
        return tied
    folder = Path(bench.trainer.args.output_dir) / "saved"
    bench.trainer.save_model(str(folder))
    inputs = bench.find_inputs()
    expected = bench.forward(inputs)
    loaded = _load(bench, model, folder)
    different = _compare_weights(model, loaded)
    if different is not None:
        name, off = different
        return broken(ERROR, f"After saving and loading, {name} differs by {off}.", parameter=name, difference=off)
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
    model: Any = bench.bare
    if not hasattr(model, "merge_and_unload"):
        raise NotApplicable("its model has no adapter to merge")
    with borrowed(bench.trainer):
        _disturb(bench)
        return _merge_and_load(bench, model)


def _merge_and_load(bench: TrialBench, model: Any) -> LawResult:
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


def check_checkpoint(bench: TrialBench) -> LawResult:
    """Compares the weights that are about to be trained with those of the checkpoint they were loaded from."""
    model: Any = without_adapter(bench.bare)
    if bench.has_trained:
        raise NotApplicable("the trainer has trained already")
    path = Path(str(getattr(model, "name_or_path", "") or ""))
    files = sorted(path.glob("*.safetensors")) if path.name and path.is_dir() else []
    if not files:
        raise NotApplicable("its model was not loaded from a folder with safetensors files")
    if getattr(model, "quantization_method", None) is not None:
        raise NotApplicable("its weights are quantised")
    own = {_plain(name): tensor for name, tensor in model.state_dict().items()}
    matched, different, unknown = 0, [], []
    for name, saved in _read_tensors(files):
        tensor = _find_same(own, name, saved, model)
        if tensor is None:
            unknown.append(name)
            continue
        matched += 1
        if not torch.equal(tensor.cpu(), saved.to(tensor.dtype)):
            different.append((name, float((tensor.cpu().float() - saved.float()).abs().max())))
    if not matched:
        raise NotApplicable("its weights have other names than those of the checkpoint")
    if different:
        name, off = max(different, key=lambda each: each[1])
        return broken(ERROR, f"{len(different)} of {matched} weights differ from the checkpoint {path.name} they were loaded from, most "
                      f"{name} by {off:.1e}. They were initialised anew or changed.", parameter=name, count=len(different))  # fmt: skip
    if unknown:
        return broken(NOTE, f"{matched} weights equal those of the checkpoint, {len(unknown)} of its weights have no counterpart in "
                      f"the model, first {unknown[0]}.", parameters=unknown[:20])  # fmt: skip
    return held(f"{matched} weights equal those of the checkpoint {path.name}", matched=matched)


# ---- tools ----


@torch.no_grad()
def _disturb(bench: TrialBench) -> None:
    """Gives all trainable weights other values, as training does: a new adapter is 0, and tied copies are still equal."""
    torch.manual_seed(0)
    for parameter in bench.trainable().values():
        spread = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
        parameter.add_(torch.randn_like(parameter) * NOISE * (spread or 1.0))


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
            vars(module).pop(name, None)
    return copied


def _load(bench: TrialBench, model: Any, folder: Path) -> Any:
    if isinstance(model, PreTrainedModel):
        return type(model).from_pretrained(str(folder), dtype=model.dtype).to(bench.device)
    if hasattr(model, "merge_and_unload") or hasattr(model, "peft_config"):
        from peft import PeftModel

        base = _copy_model(model).unload()
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
            return name, "being absent" if other is None else f"its shape {tuple(other.shape)}"
        if not torch.equal(tensor, other.to(tensor.device, tensor.dtype)):
            return name, f"{float((tensor.float() - other.to(tensor.device).float()).abs().max()):.1e}"
    return None


def _compare_logits(bench: TrialBench, loaded: nn.Module, inputs: Inputs, expected: Tensor) -> float:
    with torch.no_grad(), bench.trainer.accelerator.autocast():
        output = find_output(loaded.eval()(**bench.without_loss(inputs)))
    if output.shape != expected.shape:
        return float("inf")
    return measure_move(expected, output)


def _read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - no dictionary
                yield name, content.get_tensor(name)


def _plain(name: str) -> str:
    return plain_name(name).replace(".base_layer.", ".")


def _find_same(own: dict[str, Tensor], name: str, saved: Tensor, model: Any) -> Tensor | None:
    prefix = getattr(model, "base_model_prefix", "")
    for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if each in own and own[each].shape == saved.shape:
            return own[each]
    return None
