"""Tries every law on a trainer, one after the other, and leaves no trace in it."""

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from transformers import Trainer

from ...boundary import attempt
from ...errors import ArgumentError
from ...own_fields import own_fields
from ...plain_text import format_error
from ..trial.borrowed_trainer import borrowed, calm, kept_buffers, prepare
from ..trial.law_result import COULD_NOT_RUN, NOTE, Law, LawResult, NotApplicable
from ..trial.trial_bench import TrialBench
from . import (
    accumulated_batches,
    document_isolation,
    epoch_rows,
    gradient_flow,
    loss_value,
    padding_invariance,
    resumed_step,
    same_gradients,
    sampled_policy,
    saved_weights,
    supervised_tokens,
    train_and_eval,
)

LAWS = (
    Law("causality", "no token sees those after it", document_isolation.check_causality),
    Law("isolation", "documents that share a row do not see each other", document_isolation.check_isolation),
    Law("padding", "padding changes nothing for the samples beside it", padding_invariance.check_padding),
    Law("accumulation", "one batch of four equals four accumulated batches of one", accumulated_batches.check_accumulation),
    Law("schedule", "the learning rate moves once for each step of the optimizer", accumulated_batches.check_schedule),
    Law("checkpointing", "gradient checkpointing changes neither loss nor gradients", same_gradients.check_checkpointing),
    Law("attention", "the attention implementation agrees with eager attention, gradients included", same_gradients.check_attention),
    Law("installed_code", "what was patched into the model computes what the installed code does", same_gradients.check_installed_code),
    Law("fused_loss", "a fused loss agrees with the cross-entropy of the logits, gradients included", same_gradients.check_fused_loss),
    Law("gradients", "every trainable parameter gets a gradient and moves, nothing frozen does", gradient_flow.check_gradients),
    Law("backward", "the gradients are those of the forward pass", gradient_flow.check_backward),
    Law("next_token", "each label is the next token, and none is padding", supervised_tokens.check_next_token),
    Law("stop_token", "the stop token is supervised where the text before it is", supervised_tokens.check_stop_token),
    Law("prompt_tokens", "prompt tokens are not supervised, answers are", supervised_tokens.check_prompt_tokens),
    Law("train_and_eval", "outputs in training and in evaluation agree at dropout 0", train_and_eval.check_modes),
    Law("generation", "the logits of generated tokens are those of one forward", train_and_eval.check_generation),
    Law("dropout", "dropout is on in training steps", train_and_eval.check_dropout),
    Law("frozen_models", "a frozen reference or teacher gives the same outputs twice", train_and_eval.check_references),
    Law("saved_weights", "saving and loading gives the same weights and logits, and tied heads stay tied", saved_weights.check_round_trip),
    Law("merged_adapter", "merging, saving and loading gives the logits of the adapter", saved_weights.check_merge),
    Law("loaded_weights", "no weight differs from the checkpoint it was loaded from", saved_weights.check_loaded),
    Law("precision", "the loss in training precision is close to that in float32", loss_value.check_precision),
    Law("router_loss", "the auxiliary loss of experts is in the loss if the config asks for it", loss_value.check_router_loss),
    Law("resume", "step, save, resume, step equals two steps", resumed_step.check_resume),
    Law("epoch", "an epoch takes every row once", epoch_rows.check_epoch),
    Law("sampler", "tokens are sampled with the probabilities that the loss trains", sampled_policy.check_sampler),
    Law("advantages", "advantages are the rewards, centred and scaled as the config says", sampled_policy.check_advantages),
    Law("policy_loss", "the loss asks for more of good completions and less of bad ones, and for nothing that is masked", sampled_policy.check_policy_loss),
)  # fmt: skip

# Called before each law with its position, the number of laws and its name.
Progress = Callable[[int, int, str], None]


def prove(
    trainer: Trainer, only: Collection[str] | None = None, skip: Collection[str] = (), progress: Progress | None = None
) -> list[LawResult]:
    """Tests relations that must hold for this model, data, loss and kernels, in seconds and without a reference run.

    Nothing is trained: weights, optimizer, random state, metrics and files are afterwards as they were. The weights are held
    once more in main memory meanwhile.

    Args:
        trainer (`Trainer`):
            Any trainer, stock or guarded, that is not training. It may have been trained.
        only (`Collection[str]`, *optional*):
            Names of the laws to try, all by default.
        skip (`Collection[str]`, *optional*):
            Names of laws that are not tried.
        progress (`Callable`, *optional*):
            Called before each law with its position, the number of laws and its name.

    Returns:
        `list[LawResult]`: one for each law: `.status` is `"held"`, `"broken"` or `"could not run"`, `.message` says where and
        by how much, or why.

    Example:

    ```python
    for result in prove(trainer):
        print(result.name, result.status, result.message)
    ```
    """
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"prove() must be given a Trainer, got {type(trainer).__name__}.")
    laws = choose_laws(only, skip)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return [_could_not(law, "sharded models are not tried: their weights cannot be put back") for law in laws]
    if trainer.args.world_size > 1:
        return [
            _could_not(law, "the laws are tried in one process, without torchrun or accelerate launch") for law in laws
        ]
    results = []
    has_trained, own_forward = trainer.state.global_step > 0, own_fields(trainer.model).get("forward")
    with borrowed(trainer):
        calm(trainer)
        failure = _prepare(trainer)
        bench = TrialBench(trainer, has_trained, own_forward)
        for at, law in enumerate(laws):
            if progress is not None:
                progress(at, len(laws), law.name)
            results.append(_could_not(law, failure) if failure else _try(law, bench))
    return results


def choose_laws(only: Collection[str] | None, skip: Collection[str]) -> list[Law]:
    """Returns the laws that were asked for; a name that is no law is an error."""
    names = {law.name for law in LAWS}
    unknown = sorted(
        {*([only] if isinstance(only, str) else only or ()), *([skip] if isinstance(skip, str) else skip)} - names
    )
    if unknown:
        raise ArgumentError(
            f"only and skip must be names of laws, got {', '.join(unknown)}. Laws: {', '.join(sorted(names))}."
        )
    return [law for law in LAWS if (only is None or law.name in only) and law.name not in skip]


def _explain(error: Exception) -> str:
    return str(error) if isinstance(error, NotApplicable) else f"it raised {format_error(error)}"


def _prepare(trainer: Trainer) -> str | None:
    """Prepares the trainer; returns why it could not."""
    return attempt(
        lambda: prepare(trainer), lambda error: f"train() fails before its first step: {format_error(error)}"
    )


def _try(law: Law, bench: TrialBench) -> LawResult:
    start = time.perf_counter()
    with kept_buffers(bench.trainer):
        # The other laws are still tried.
        result = attempt(lambda: law.check(bench), lambda error: _could_not(law, _explain(error)))
    return replace(result, name=law.name, seconds=time.perf_counter() - start)


def _could_not(law: Law, reason: str) -> LawResult:
    return LawResult(law.name, COULD_NOT_RUN, NOTE, reason)
