"""Another way of computing the same gives the same loss and gradients: checkpointing, attention kernels, fused heads."""

from typing import Any

import torch
from torch.nn import functional

from ...hf.compat.model_config import ATTENTION, find_implementation
from ..rules.finding import Severity
from ..trial.law_result import ERROR, NOTE, Law, LawResult, NotApplicable, broken, held
from ..trial.trial_bench import Run, TrialBench, compare


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
    model: Any = bench.trainer.accelerator.unwrap_model(bench.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    now = find_implementation(getattr(model, "config", None), ATTENTION) or {}
    if not now or not hasattr(model, "set_attn_implementation"):
        raise NotApplicable("its model has no choice of attention implementations")
    is_eager = set(now.values()) == {"eager"}
    other = "sdpa" if is_eager else "eager"
    used = bench.usual
    with bench.untouched_modules():
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


def check_fused_loss(bench: TrialBench) -> LawResult:
    """Compares a loss that never builds the logits with the cross-entropy of the logits."""
    bench.need_steady()
    inputs = bench.find_inputs()
    if not inputs.get("fused_lm_head") or not isinstance(inputs.get("labels"), torch.Tensor):
        raise NotApplicable("its loss builds the logits")
    inputs.pop("num_items_in_batch", None)
    with bench.steady():
        fused = _gradients(bench, lambda: bench.model(**inputs).loss)
        labels, plain = inputs["labels"], {n: v for n, v in inputs.items() if n not in ("labels", "fused_lm_head")}

        def loss() -> torch.Tensor:
            logits = bench.model(**plain).logits.float() / _temperature(bench)
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        reference = _gradients(bench, loss)
    return _judge(bench, reference, fused, "with the fused head instead of the logits", ERROR)


def _temperature(bench: TrialBench) -> float:
    return float(getattr(bench.trainer, "temperature", 1.0)) if bench.is_online else 1.0


def _gradients(bench: TrialBench, compute: Any) -> Run:
    bench.model.train()
    parameters = bench.trainable()
    loss = compute()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return Run(float(loss), {n: g for n, g in zip(parameters, found, strict=True) if g is not None})


def _judge(bench: TrialBench, reference: Run, run: Run, what: str, severity: Severity) -> LawResult:
    if not reference.norm and not run.norm:
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


LAWS = (
    Law("checkpointing", "gradient checkpointing changes neither loss nor gradients", check_checkpointing),
    Law("attention", "the attention implementation agrees with eager attention, gradients included", check_attention),
    Law("fused_loss", "a fused loss agrees with the cross-entropy of the logits, gradients included", check_fused_loss),
)  # fmt: skip
