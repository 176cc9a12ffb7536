"""Online training: the sampler draws from the policy that the loss trains, advantages are as the config says, and the loss follows them."""

from typing import Any

import torch
from torch import Tensor

from ...core.rerun.kept_attributes import untouched
from ...hf.compat.accelerate import replaced_method
from ...hf.compat.online_trainer import OLD, OLD_SUM, POLICY_LOGPS, policy_logps
from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.trial_bench import TrialBench

SLIGHT = 0.1  # a difference of log-probabilities that a few forbidden tokens make
SMALL = 1e-4  # that TRL adds to a standard deviation
SHARE = 0.9
LEFT_OUT = "leave-one-out"  # the rule of RLOO
COUNTED = "dapo"  # the loss that is divided by num_items_in_batch and takes each token once


def check_sampler(bench: TrialBench) -> LawResult:
    """Compares the log-probabilities with which tokens were sampled with those that the loss computes for them."""
    sampled = bench.sampled
    bench.need_policy_logps()
    if sampled.drawn is None:
        raise NotApplicable("its sampler does not show its probabilities")
    batch, mask = sampled.batch, sampled.batch["completion_mask"].bool()
    if sampled.prompts is not None and not _same_prompts(sampled.prompts, batch):
        return broken(
            ERROR,
            "The sampler saw other prompts than those the loss is computed for. Is the chat template applied twice?",
        )
    with bench.steady():
        bench.model.train()
        trained = policy_logps(bench.trainer, bench.model, batch)
    stale = _check_old_logps(bench, batch, trained)
    if stale is not None:
        return stale
    off, bound = (sampled.drawn - trained)[mask].abs(), bench.tolerance
    values = {"difference": float(off.max()), "mean_difference": float(off.mean()), "bound": bound}
    if _is_close(off, bound):
        return held(f"log-probabilities of {int(mask.sum())} sampled tokens agree within {off.max():.1e}", **values)
    cuts = _find_cuts(bench)
    is_known = sampled.scaled is not None and _is_close((sampled.scaled - trained)[mask].abs(), bound)
    if is_known and not cuts and sampled.is_recorded:  # e.g. tokens of images that are never to be drawn
        return broken(WARNING if float(off.max()) > SLIGHT else NOTE, "Scores are changed before tokens are drawn, by a logits processor that the "
                      f"loss does not know: their log-probabilities differ by up to {off.max():.2g}.", **values)  # fmt: skip
    if cuts and is_known:
        return broken(NOTE, f"Tokens are sampled with {cuts}, which the loss does not know: their log-probabilities differ by up to "
                      f"{off.max():.2g}.", **values)  # fmt: skip
    plain = sampled.plain is not None and _is_close((sampled.plain - trained)[mask].abs(), bound)
    why = ": the loss computes them at temperature 1" if plain else ""
    return broken(
        ERROR, f"The sampler's log-probabilities differ from those of the loss by {off.mean():.2g} on average and {off.max():.2g} at "
        f"most (rounding explains {bound:.0e}), most at sampled token {int(off.argmax())}{why}.", token=int(off.argmax()), **values,
    )  # fmt: skip


def _check_old_logps(bench: TrialBench, batch: dict[str, Any], trained: Tensor) -> LawResult | None:
    """The log-probabilities that the ratio is divided by must be those of the policy, as long as it has not moved."""
    mask = batch["completion_mask"]
    if batch.get(OLD) is not None:
        off = ((batch[OLD] - trained) * mask).abs()
    elif batch.get(OLD_SUM) is not None:
        off = (batch[OLD_SUM] - (trained * mask).sum(1)).abs() / mask.sum(1).clamp(min=1)
    else:
        return None
    if _is_close(off, bench.tolerance):
        return None
    return broken(ERROR, f"The old log-probabilities of fresh completions differ from those of the policy by up to {off.max():.2g}: the ratio is not 1 "
                  "before the policy has moved, so updates are clipped or scaled.", difference=float(off.max()))  # fmt: skip


def _is_close(off: Tensor, bound: float) -> bool:
    return float(off.mean()) <= bound and float(off.max()) <= 10 * bound


def _same_prompts(prompts: Tensor, batch: dict[str, Any]) -> bool:
    mine = [ids[mask.bool()] for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    return all(torch.equal(own, ids[len(ids) - len(own) :]) for own, ids in zip(mine, prompts, strict=True))


def _find_cuts(bench: TrialBench) -> str:
    """Returns the settings by which the sampler leaves tokens out, which TRL's loss does not model."""
    trainer = bench.trainer
    settings = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    found = {name: getattr(trainer, name, usual) for name, usual in settings.items()}
    return ", ".join(
        f"{n}={v}" for n, v in found.items() if v not in (None, settings[n]) and not (n == "top_k" and v in (0, -1))
    )


def check_advantages(bench: TrialBench) -> LawResult:
    """Compares advantages with the rewards they are made of, by the config's rule."""
    sampled = bench.sampled
    trainer, rewards = bench.trainer, sampled.rewards
    advantages = sampled.batch.get("advantages")
    if rewards is None or advantages is None or advantages.ndim != 1:
        raise NotApplicable("its advantages are not one number for each completion")
    if getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") != "sum_then_normalize":
        raise NotApplicable("its rewards are normalised one by one before they are summed")
    groups = rewards.view(-1, trainer.num_generations)
    if not bool(torch.isfinite(groups).all()) or not bool((groups.std(1) > 0).any()):
        raise NotApplicable("its rewards are equal in every group, or not finite")
    rule = _read_rule(trainer)
    centred = groups - groups.mean(1, keepdim=True)
    if rule == LEFT_OUT:  # the mean of the others is the baseline
        centred = centred * groups.shape[1] / (groups.shape[1] - 1)
    scale = {"group": groups.std(1, keepdim=True), "batch": rewards.std()}.get(rule)
    if rule == LEFT_OUT and trainer.normalize_advantages:
        scale = centred.std()
    expected = (centred if scale is None else centred / (scale + SMALL)).flatten()
    off = float((expected - advantages.to(expected)).abs().max())
    sums = float(advantages.view(-1, trainer.num_generations).sum(1).abs().max())
    values = {"difference": off, "largest_group_sum": sums, "scale_rewards": rule}
    if off <= 1e-3 * max(float(expected.abs().max()), 1.0):
        return held(f"advantages are the centred rewards, scaled by {rule}; groups sum to {sums:.1e} at most", **values)
    return broken(
        ERROR, f"Advantages differ by up to {off:.2g} from what the rule {rule!r} says, and groups sum to up to {sums:.2g} "
        "instead of 0.", **values,
    )  # fmt: skip


def _read_rule(trainer: Any) -> str:
    if hasattr(trainer, "normalize_advantages"):
        if trainer.beta:
            raise NotApplicable("its rewards contain a KL term")
        return LEFT_OUT
    rule = getattr(trainer, "scale_rewards", None)
    if rule not in ("group", "batch", "none"):
        raise NotApplicable("its config does not say how rewards are scaled")
    return str(rule)


def check_policy_loss(bench: TrialBench) -> LawResult:
    """Reads off the loss's derivative how much it asks for each sampled token: more of those with a positive advantage, less of
    those with a negative one, nothing of a masked one."""
    bench.need_policy_logps()
    batch: dict[str, Any] = bench.batch
    advantages = batch.get("advantages")
    if advantages is None or advantages.ndim != 1:
        raise NotApplicable("its advantages are not one number for each completion")
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    asked = _read_asked(bench, batch) * advantages.sign().unsqueeze(1)
    masked = int((asked.abs() * (1 - mask) > 0).sum())
    followed, total = int((asked * mask > 0).sum()), int(mask.sum())
    values = {"tokens": total, "followed": followed, "masked": masked}
    if masked:
        return broken(ERROR, f"The loss takes {masked} tokens that completion_mask or tool_mask leaves out.", **values)
    if getattr(bench.trainer, "top_entropy_quantile", 1.0) < 1.0:
        total = int((asked != 0).sum())  # the others are left out on purpose
    if followed < SHARE * total or not total:
        against = int((asked * mask < 0).sum())
        how = f"{against} are pushed the other way" if against else "the others get no gradient from it"
        return broken(
            ERROR,
            f"Only {followed} of {total} sampled tokens are pushed the way their advantage says; {how}.",
            **values,
        )
    return _check_divisor(bench, batch, float(asked.sum()), values) or held(
        f"all {followed} tokens are pushed the way their advantage says" if followed == total
        else f"{followed} of {total} tokens are pushed the way their advantage says", **values,
    )  # fmt: skip


def _read_asked(bench: TrialBench, batch: dict[str, Any]) -> Tensor:
    """Returns for each sampled token the negative derivative of the loss by its log-probability, without the KL term."""
    kept: list[Tensor] = []

    def cut(compute: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                found = compute(*args, **kwargs)
            logps, *rest = found if isinstance(found, tuple) else (found,)
            kept.append(logps.detach().requires_grad_())
            return (kept[-1], *rest) if isinstance(found, tuple) else kept[-1]

        return call

    trainer = bench.trainer
    with untouched(trainer), replaced_method(trainer, POLICY_LOGPS, cut), bench.steady():
        trainer.beta = 0.0
        loss = bench.compute_loss(batch)
    if not kept or not loss.requires_grad:
        raise NotApplicable("its loss is not computed from log-probabilities of its completions")
    (gradient,) = torch.autograd.grad(loss, [kept[0]], allow_unused=True)
    return torch.zeros_like(kept[0]) if gradient is None else -gradient


def _check_divisor(bench: TrialBench, batch: dict[str, Any], total: float, values: dict[str, Any]) -> LawResult | None:
    """A loss over all tokens of a step must be divided by the number of those that it takes."""
    trainer, args = bench.trainer, bench.trainer.args
    if getattr(trainer, "loss_type", None) != COUNTED or values["followed"] < values["tokens"]:
        return None
    share = total / getattr(
        args, "steps_per_generation", 1
    )  # the completions of a whole generation are in one batch here
    if abs(share - 1) <= 10 * bench.tolerance:
        return None
    return broken(ERROR, f"The weights of all tokens add up to {share:.3g} instead of 1: the loss is divided by another number of tokens than it takes. "
                  "Does num_items_in_batch count tokens that are masked?", weight=share, **values)  # fmt: skip
