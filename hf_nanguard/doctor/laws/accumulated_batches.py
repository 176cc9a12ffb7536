"""One batch of four equals four accumulated batches of one, in loss and gradients."""

from torch import Tensor

from ..trial.law_result import ERROR, NOTE, WARNING, Law, LawResult, NotApplicable, broken, held
from ..trial.trial_bench import Run, TrialBench, compare


def check_accumulation(bench: TrialBench) -> LawResult:
    """Runs four rows as one batch and as an accumulation group of four, each through the trainer's own steps."""
    if len({len(bench.collate(rows)) for rows in (bench.rows[:1], bench.rows)}) > 1:
        raise NotApplicable("its batches of one have other fields than its batches of four")
    bench.need_steady()
    singles = [bench.collate([row]) for row in bench.rows]
    whole, parts = bench.usual, bench.run(singles)
    if not whole.norm:
        raise NotApplicable("the gradient of its batch is zero")
    off, worst, name = compare(whole, parts)
    bound = bench.allow()
    ratio = parts.norm / whole.norm
    values = {"difference": off, "bound": bound, "ratio": ratio, "loss": whole.loss, "accumulated_loss": parts.loss,
              "parameter": name}  # fmt: skip
    if off <= bound and worst <= 10 * bound:
        return held(f"loss and gradients agree within {off:.1e}", **values)
    return _describe(bench, whole, parts, singles, values)


def _describe(bench: TrialBench, whole: Run, parts: Run, singles: list, values: dict) -> LawResult:
    ratio, off = values["ratio"], values["difference"]
    message = (
        f"Four accumulated batches of one give a gradient {ratio:.2f} times that of one batch of four, and the loss "
        f"{parts.loss:.4g} instead of {whole.loss:.4g} (difference {off:.1e}, rounding explains {values['bound']:.0e}), most in "
        f"{values['parameter']}"
    )
    if _has_batch_statistics(bench):
        return broken(NOTE, f"{message}. Batch normalisation uses statistics of the batch.", **values)
    if bench.trainer.args.gradient_accumulation_steps == 1:
        return broken(NOTE, f"{message}. This run does not accumulate.", **values)
    mean = _average([bench.run([single]) for single in singles])
    counted = bench.trainer.model_accepts_loss_kwargs or bench.trainer.compute_loss_func is not None
    if compare(mean, parts)[0] <= values["bound"]:
        severity = WARNING if counted else NOTE
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


def _has_batch_statistics(bench: TrialBench) -> bool:
    return any("batchnorm" in type(module).__name__.lower() for module in bench.bare.modules())


LAWS = (
    Law("accumulation", "one batch of four equals four accumulated batches of one", check_accumulation),
)  # fmt: skip
