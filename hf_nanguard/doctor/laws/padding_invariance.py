"""Padding has no effect: a sample has the outputs in a batch that it has alone."""

import torch
from torch import Tensor
from torch.nn import functional

from ...hf.compat.online_trainer import policy_logps
from ..trial.law_result import ERROR, NOTE, LawResult, NotApplicable, broken, held
from ..trial.moved_output import measure_spread
from ..trial.special_tokens import find_padding
from ..trial.trial_bench import Inputs, TrialBench
from ..trial.trial_rows import IDS

MASK = "attention_mask"
EXTRA = 3  # tokens of padding that are added


def check_padding(bench: TrialBench) -> LawResult:
    """Compares the outputs of the shortest row alone with those it has beside the longest, where it is padded."""
    if bench.is_online:
        return _check_completions(bench)
    short, long = bench.rows[0], bench.rows[-1]
    alone, padded = (_find_inputs(bench, rows) for rows in ([short], [short, long]))
    pair = _find_padded(alone, padded)
    if pair is None:
        raise NotApplicable("its batches have no padding")
    bench.need_steady()
    outputs = bench.forward(alone), bench.forward(padded)
    at, row = pair
    if any(
        o.ndim > 2 and not bench.is_seq2seq and o.shape[1] != i[IDS].shape[1]
        for o, i in zip(outputs, (alone, padded), strict=True)
    ):
        raise NotApplicable("its outputs cannot be matched with tokens")
    before, after = _real_outputs(bench, alone, outputs[0], at), _real_outputs(bench, padded, outputs[1], row)
    if before.shape != after.shape:
        raise NotApplicable("its outputs cannot be matched with tokens")
    move = (before - after).abs().flatten(1).amax(1) / measure_spread(before)
    move = torch.where(torch.isfinite(move), move, torch.inf)
    worst, bound = float(move.max()), bench.allow()
    if worst <= bound:
        return held(f"a sample beside padding moves by {worst:.1e} of the logits' spread", move=worst, bound=bound)
    is_left = not bool(padded[MASK][row, 0])
    first_only = bool((move[1:] <= bound).all()) and len(move) > 1
    place = f"token {int(move.argmax())}" if len(move) > 1 else "its output"
    message = (
        f"A sample moves by {worst:.1e} of the logits' spread (rounding explains {bound:.0e}) if it is padded on the "
        f"{'left' if is_left else 'right'}, most at {place}"
    )
    if is_left and not first_only and _has_learned_positions(bench):
        return broken(NOTE, f"{message}: its positions are counted from the padding.", move=worst, bound=bound)
    if is_left and first_only:
        return broken(NOTE, f"{message}, which has nothing before it to attend to.", move=worst, bound=bound)
    return broken(ERROR, f"{message}. Real tokens see padding.", move=worst, bound=bound, token=int(move.argmax()))


def _check_completions(bench: TrialBench) -> LawResult:
    """Compares the log-probabilities of sampled tokens with those they have with more padding around prompt and completion."""
    bench.need_policy_logps()
    bench.need_steady()
    batch, bound = bench.sampled.batch, bench.allow()
    pad = find_padding(bench.trainer)
    sizes = {"prompt": (EXTRA, 0), "completion": (0, EXTRA)}
    padded = dict(batch)
    for part, size in sizes.items():
        if batch[f"{part}_ids"].ndim != 2 or pad is None:
            raise NotApplicable("its completions cannot be padded")
        padded[f"{part}_ids"] = functional.pad(batch[f"{part}_ids"], size, value=pad)
        padded[f"{part}_mask"] = functional.pad(batch[f"{part}_mask"], size, value=0)
    with bench.steady():
        bench.model.train()
        before, after = (policy_logps(bench.trainer, bench.model, each) for each in (batch, padded))
    mask = batch["completion_mask"].bool()
    off = (before - after[:, : before.shape[1]]).abs()[mask]
    worst = float(off.max()) if off.numel() and bool(torch.isfinite(off).all()) else float("inf")
    if worst <= bound:
        return held(
            f"log-probabilities of {int(mask.sum())} sampled tokens move by {worst:.1e} with more padding",
            move=worst,
            bound=bound,
        )
    return broken(ERROR, f"Log-probabilities of sampled tokens move by up to {worst:.1e} (rounding explains {bound:.0e}) if prompt and "
                  "completion have more padding. Real tokens see padding.", move=worst, bound=bound)  # fmt: skip


def _find_inputs(bench: TrialBench, rows: list[object]) -> Inputs:
    """Returns the model's inputs for some rows; of a model with a decoder also the labels, which say how long its outputs are and which a
    smoothed loss takes out."""
    batch = bench.collate(rows)
    inputs = bench.find_inputs(batch)
    return {"labels": batch["labels"], **inputs} if bench.is_seq2seq and "labels" in batch else inputs


def _find_padded(alone: Inputs, padded: Inputs) -> tuple[int, int] | None:
    """Returns a row of the lone sample, and the row of the same tokens in the batch, if there is padding in it."""
    masks = [each.get(MASK) for each in (alone, padded)]
    if not all(isinstance(mask, Tensor) and mask.ndim == 2 for mask in masks) or IDS not in alone:
        return None
    for row, (ids, mask) in enumerate(zip(padded[IDS], padded[MASK], strict=True)):
        if mask.all():
            continue
        for at, (own, real) in enumerate(zip(alone[IDS], alone[MASK], strict=True)):
            if torch.equal(own[real.bool()], ids[mask.bool()]) and real.sum() > 0:
                return at, row
    return None


def _real_outputs(bench: TrialBench, inputs: Inputs, output: Tensor, row: int) -> Tensor:
    """Returns the outputs of one sample that are not of padding, one for each token or one in all."""
    if output.ndim < 3:
        return output[row : row + 1].float()
    labels = inputs.get("labels")
    if bench.is_seq2seq and isinstance(labels, Tensor):
        return output[row][: int((labels[row] != -100).sum())].float()
    return output[row][inputs[MASK][row].bool()].float()


def _has_learned_positions(bench: TrialBench) -> bool:
    """Whether the model adds an embedding of absolute positions, which padding on the left shifts."""
    return any(
        "position" in name or name.endswith("wpe")
        for name, m in bench.bare.named_modules()
        if hasattr(m, "embedding_dim")
    )
