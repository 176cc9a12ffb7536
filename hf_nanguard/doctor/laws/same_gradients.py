"""Another way of computing the same gives the same loss and gradients: checkpointing, attention kernels, fused heads, and the model's
code as it is installed in place of what was patched into it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from ...hf.compat.model_config import ATTENTION, find_adapters, find_config, find_implementation, without_adapter
from ..rules.finding import Severity
from ..trial.borrowed_trainer import list_parts
from ..trial.checkpoint_weights import MAX_COPIED
from ..trial.installed_model import build_again
from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.quiet_forward import without_randomness
from ..trial.trial_bench import FUSED, Run, TrialBench, compare, find_output, take_gradients
from ..trial.trial_rows import IDS

WINDOW = "sliding_window"  # of configs and of attention modules: how far back a token sees


def check_checkpointing(bench: TrialBench) -> LawResult:
    """Runs a batch with and without gradient checkpointing."""
    bench.need_steady()
    args, model = bench.trainer.args, bench.bare
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise NotApplicable("its model does not support gradient checkpointing")
    asked = dict(args.gradient_checkpointing_kwargs or {"use_reentrant": False})
    options = {name: value for name, value in asked.items() if name not in ("every_n_layers", "offload")}
    with bench.untouched_modules():
        if args.gradient_checkpointing:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            if _is_frozen_at_inputs(bench):
                model.enable_input_require_grads()
        other = bench.run()
    without, with_it = (other, bench.usual) if args.gradient_checkpointing else (bench.usual, other)
    severity = ERROR if args.gradient_checkpointing else NOTE
    return _judge(bench, without, with_it, "with gradient checkpointing", severity)


def _is_frozen_at_inputs(bench: TrialBench) -> bool:
    """Whether no gradient reaches the first checkpointed layer by itself."""
    try:
        return not any(p.requires_grad for p in bench.bare.get_input_embeddings().parameters())
    except (AttributeError, NotImplementedError):  # a model without embeddings of tokens
        return False


def check_attention(bench: TrialBench) -> LawResult:
    """Runs a batch with the attention implementation of the run and with the eager one."""
    bench.need_steady()
    model = without_adapter(bench.trainer.accelerator.unwrap_model(bench.model))
    now = find_implementation(find_config(model), ATTENTION) or {}
    if not now or not hasattr(model, "set_attn_implementation"):
        raise NotApplicable("its model has no choice of attention implementations")
    is_eager = set(now.values()) == {"eager"}
    other = "sdpa" if is_eager else "eager"
    with bench.untouched_modules():
        used = bench.run() if _narrow_windows(bench) else bench.usual
        try:
            model.set_attn_implementation(other)
        except ValueError as error:
            raise NotApplicable(f"its model has no {other} attention") from error
        if find_implementation(model.config, ATTENTION) == now:
            raise NotApplicable(f"its model has no {other} attention")
        reference = bench.run()
    name = " and ".join(sorted(set(now.values())))
    what = f"with {other} attention instead of eager" if is_eager else f"with {name} attention instead of eager"
    return _judge(bench, *((used, reference) if is_eager else (reference, used)), what, NOTE if is_eager else ERROR)


def _narrow_windows(bench: TrialBench) -> bool:
    """Makes sliding windows shorter than the trial rows, which are too short to reach them otherwise; returns whether there are any."""
    ids = bench.batch.get(IDS) if isinstance(bench.batch, Mapping) else None
    narrow = max(bench.limit if ids is None else ids.shape[-1], 8) // 2
    found = [
        part
        for part in list_parts(bench.bare)
        if isinstance(size := getattr(part, WINDOW, None), int) and size > narrow
    ]
    for part in found:
        setattr(part, WINDOW, narrow)
    return bool(found)


def check_fused_loss(bench: TrialBench) -> LawResult:
    """Compares a loss that never builds the logits with the cross-entropy of the logits."""
    bench.need_steady()
    inputs = bench.find_inputs()
    if not inputs.get("fused_lm_head") or not isinstance(inputs.get("labels"), torch.Tensor):
        raise NotApplicable("its loss builds the logits")
    inputs.pop("num_items_in_batch", None)
    with bench.steady():
        bench.model.train()
        fused = _differentiate(bench.bare, bench.model(**inputs).loss)
        labels, plain = inputs["labels"], {n: v for n, v in inputs.items() if n not in ("labels", "fused_lm_head")}
        temperature = float(getattr(bench.trainer, "temperature", 1.0)) if bench.is_online else 1.0
        logits = bench.model(**plain).logits.float() / temperature
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        reference = _differentiate(bench.bare, loss)
    return _judge(bench, reference, fused, "with the fused head instead of the logits", ERROR)


def check_installed_code(bench: TrialBench) -> LawResult:
    """Compares the model with its own weights in a model made of the unchanged file of transformers.

    Kernels of Liger, Unsloth or one's own are patched into modules and classes and cannot be taken off. The file that defines the model
    is read a second time under another name, where nothing is patched. The copy shares the weights.
    """
    model: Any = bench.bare
    if find_adapters(model):
        raise NotApplicable("its model has an adapter, which is no part of the installed code")
    if not isinstance(model, PreTrainedModel) or not type(model).__module__.startswith("transformers.models."):
        raise NotApplicable("its model is not defined by transformers")
    if getattr(model, "hf_quantizer", None) is not None or sum(p.numel() for p in model.parameters()) > MAX_COPIED:
        raise NotApplicable("its model is quantized or too large to be built again")
    bench.need_steady()
    inputs = {name: value for name, value in bench.find_inputs().items() if name not in FUSED}
    other = build_again(model)
    model.train()
    for copied, own in zip(other.modules(), model.modules(), strict=True):
        copied.training = own.training  # some may stay in evaluation mode
    found = []
    for each in (other, model):
        with bench.steady(), without_randomness(list_parts(other)), bench.trainer.accelerator.autocast():
            found.append(_run_model(each, inputs))
    severity = ERROR if bench.trainer.args.use_liger_kernel else WARNING
    return _judge(
        bench, found[0], found[1], f"of the code that runs instead of the installed {type(model).__name__}", severity
    )


def _run_model(model: Any, inputs: Any) -> Run:
    """Returns the model's own loss with its gradients; where the inputs have no labels, the mean of the squared outputs."""
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    return _differentiate(model, find_output(output, detached=False).float().square().mean() if loss is None else loss)


def _differentiate(model: nn.Module, loss: torch.Tensor) -> Run:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Run(float(loss.detach()), take_gradients(loss, parameters))


def _judge(bench: TrialBench, reference: Run, run: Run, what: str, severity: Severity) -> LawResult:
    if bench.is_negligible(reference) and bench.is_negligible(run):
        raise NotApplicable("the gradient of its batch is zero")
    off, worst, name = compare(reference, run)
    bound = bench.allow()
    values = {"difference": off, "bound": bound, "parameter": name, "parameter_difference": worst,
              "loss": run.loss, "reference_loss": reference.loss}  # fmt: skip
    if off <= bound and worst <= 10 * bound:
        return held(f"loss and gradients {what} agree within {off:.1e}", **values)
    return broken(
        severity,
        f"Loss and gradients {what} differ by {off:.1e} (rounding explains {bound:.0e}): loss {run.loss:.4g} instead of "
        f"{reference.loss:.4g}, most in {name} (by {worst:.1e}).",
        **values,
    )
