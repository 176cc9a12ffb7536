"""One batch of four equals four accumulated batches of one, in loss and gradients, and is one step of the schedule."""

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..trial.asked_targets import has_own_loss
from ..trial.borrowed_trainer import borrowed
from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.trial_bench import Run, TrialBench, compare


def check_accumulation(bench: TrialBench) -> LawResult:
    """Runs four rows as one batch and as an accumulation group of four, each through the trainer's own steps."""
    if not bench.is_online and len({len(bench.collate(rows)) for rows in (bench.rows[:1], bench.rows)}) > 1:
        raise NotApplicable("its batches of one have other fields than its batches of four")
    if not bench.is_online and bench.collator_draws:
        raise NotApplicable("its collator draws random numbers, so four batches of one are not one batch of four")
    bench.need_steady()
    singles = _split_completions(bench) if bench.is_online else [bench.collate([row]) for row in bench.rows]
    whole, parts = bench.usual, _run_singles(bench, singles)
    if bench.is_negligible(whole) and bench.is_negligible(parts):
        raise NotApplicable("the gradient of its batch is zero")
    off, worst, name = compare(whole, parts)
    bound = bench.allow()
    ratio = parts.norm / whole.norm
    values = {"difference": off, "bound": bound, "ratio": ratio, "loss": whole.loss, "accumulated_loss": parts.loss,
              "parameter": name}  # fmt: skip
    if off <= bound and worst <= 10 * bound:
        return held(f"loss and gradients agree within {off:.1e}", **values)
    return _describe(bench, whole, parts, singles, values)


def _run_singles(bench: TrialBench, singles: list[Any]) -> Run:
    args: Any = bench.trainer.args
    steps = getattr(args, "steps_per_generation", None) if bench.is_online else None
    if steps is None:
        return bench.run(singles)
    args.steps_per_generation = steps * len(singles)  # the same completions in as many more micro-batches
    try:
        return bench.run(singles)
    finally:
        args.steps_per_generation = steps


def _split_completions(bench: TrialBench) -> list[dict[str, object]]:
    """Returns a batch of sampled completions as batches of one; what is not of single completions stays as it is."""
    batch: dict[str, Any] = bench.batch
    size = len(batch["completion_ids"])
    if size < 2:
        raise NotApplicable("its micro-batches have one completion")
    if any(name.startswith(("pixel", "image")) for name in batch):
        raise NotApplicable("the images of its prompts cannot be divided")

    def take(value: Any, at: int) -> object:
        is_divided = isinstance(value, Tensor | list) and getattr(value, "ndim", 1) > 0 and len(value) == size
        return value[at : at + 1] if is_divided else value

    return [{name: take(value, at) for name, value in batch.items()} for at in range(size)]


def _describe(bench: TrialBench, whole: Run, parts: Run, singles: list, values: dict) -> LawResult:
    ratio, off = values["ratio"], values["difference"]
    message = (
        f"{len(singles)} accumulated batches of one give a gradient {ratio:.2f} times that of one batch of {len(singles)}, and the loss "
        f"{parts.loss:.4g} instead of {whole.loss:.4g} (difference {off:.1e}, rounding explains {values['bound']:.0e}), most in "
        f"{values['parameter']}"
    )
    if bench.is_online and getattr(bench.trainer, "loss_type", None) == "bnpo":
        return broken(
            NOTE, f"{message}. loss_type='bnpo' averages over the tokens of each micro-batch by design.", **values
        )
    if bench.is_online and getattr(bench.trainer, "top_entropy_quantile", 1.0) < 1:
        return broken(NOTE, f"{message}. top_entropy_quantile chooses tokens in each micro-batch by design.", **values)
    if bench.has_batch_statistics:
        return broken(NOTE, f"{message}. Batch normalisation uses statistics of the batch.", **values)
    if bench.trainer.args.gradient_accumulation_steps == 1:
        return broken(NOTE, f"{message}. This run does not accumulate.", **values)
    mean = _average([bench.run([single]) for single in singles])
    if compare(mean, parts)[0] <= values["bound"]:
        # A loss of the hosts is defined so, as that of a classifier or of pairs; one's own is given the count and does not use it.
        counted = bench.trainer.model_accepts_loss_kwargs or bench.trainer.compute_loss_func is not None
        severity = WARNING if counted and has_own_loss(bench) else NOTE
        return broken(severity, f"{message}. Each micro-batch counts the same, however many labels it has.", **values)
    return broken(
        ERROR,
        f"{message}. The loss must be divided once: by num_items_in_batch, or by the number of micro-batches "
        "(loss_is_scaled_for_ga of the trainer says which).",
        **values,
    )


def _average(runs: list[Run]) -> Run:
    names = runs[0].gradients.keys()
    gradients: dict[str, Tensor] = {n: sum(r.gradients[n] for r in runs) / len(runs) for n in names}  # type: ignore[misc]
    return Run(sum(run.loss for run in runs) / len(runs), gradients)


def check_schedule(bench: TrialBench) -> LawResult:
    """Runs a micro-batch and asks whether the schedule of the learning rate has moved, which is for the end of a group."""
    scheduler = bench.trainer.lr_scheduler
    scheduler = getattr(scheduler, "scheduler", scheduler)  # of accelerate's wrapper
    if not isinstance(scheduler, LRScheduler):
        raise NotApplicable("its learning rate has no schedule")
    with borrowed(bench.trainer):
        before = scheduler.last_epoch
        bench.run()
        moved = scheduler.last_epoch - before
        scheduler.last_epoch = before
    if not moved:
        return held("micro-batches leave the learning rate as it is")
    times = bench.trainer.args.gradient_accumulation_steps * moved + 1
    return broken(ERROR, f"A micro-batch moves the schedule of the learning rate by {moved}, before the step of the optimizer does: it ends after "
                  f"1/{times} of the run. Do not call lr_scheduler.step() in a training step or a loss.", moved=moved)  # fmt: skip
