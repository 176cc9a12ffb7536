"""The loss asks for the right tokens: the next ones, the stop token too, no prompt and no padding."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..trial.asked_targets import find_targets, has_own_loss
from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.special_tokens import find_stop_tokens, show_token
from ..trial.trial_bench import TrialBench
from ..trial.trial_rows import IDS, MASKED, find_documents

CHUNK = 8  # rows of one batch
STOP_AT = 3  # where sampled completions are made to end
SHARE = 0.9
CONTENT = ("labels", "completion_mask", "assistant_masks")


@dataclass
class Targets:
    """Which token each token of a batch is asked to predict next, -100 for none."""

    ids: Tensor
    target: Tensor
    real: Tensor

    @property
    def asked(self) -> Tensor:
        return self.target != MASKED


def check_next_token(bench: TrialBench) -> LawResult:
    """Each position must be asked for the token after it, and none for padding."""
    if bench.is_online:
        raise NotApplicable("its loss takes the tokens that were sampled, which the law sampler compares")
    found = _find_targets(bench, bench.batch)
    asked, follows = found.asked, found.ids.roll(-1, 1)
    follows[:, -1] = MASKED
    if not bool(asked.any()):
        raise NotApplicable("no label of its rows is unmasked")
    right = (found.target == follows)[asked].float().mean().item()
    if right >= SHARE:
        return _check_padding_labels(found, right)
    others = {"itself": found.ids, "the token after the next": found.ids.roll(-2, 1)}
    shares = {name: (found.target == ids)[asked].float().mean().item() for name, ids in others.items()}
    name = max(shares, key=lambda each: shares[each])
    if shares[name] < SHARE:
        raise NotApplicable(f"its labels are not the tokens of its inputs (only {right:.0%} are the next token)")
    hint = "Labels are shifted twice." if name == "the token after the next" else "Labels are not shifted."
    return broken(ERROR, f"{shares[name]:.0%} of the labels ask a token for {name}, {right:.0%} for the next one. {hint}",
                  next_token=right, other=shares[name])  # fmt: skip


def _check_padding_labels(found: Targets, right: float) -> LawResult:
    padded = found.asked & ~found.real.roll(-1, 1)
    padded[:, -1] = False
    if bool(padded.any()):
        row, token = divmod(int(padded.flatten().float().argmax()), padded.shape[1])
        return broken(
            ERROR, f"{int(padded.sum())} of {int(found.asked.sum())} labels ask for padding, first at token {token} of row {row}. "
            "Set the labels of padding to -100.", count=int(padded.sum()), row=row, token=token,
        )  # fmt: skip
    return held(f"{int(found.asked.sum())} labels, {right:.0%} of them the next token", labels=int(found.asked.sum()))


def check_stop_token(bench: TrialBench) -> LawResult:
    """Where the text before a stop token is learned, the stop token must be learned too."""
    stops = find_stop_tokens(bench.trainer)
    if not stops:
        raise NotApplicable("neither tokenizer nor model say which token ends a text")
    if bench.is_online:
        return _check_completions(bench, stops)
    seen = learned = ends = rows = 0
    example = None
    for found, size in _read_batches(bench):
        rows += size
        is_stop = torch.isin(found.ids, torch.tensor(sorted(stops), device=found.ids.device)) & found.real
        wanted = is_stop & found.asked.roll(1, 1).roll(1, 1)  # the token before it is a target
        wanted[:, :2] = False
        got = wanted & found.asked.roll(1, 1)
        seen, learned = seen + int(wanted.sum()), learned + int(got.sum())
        ends += int(is_stop.any(1).sum())
        if example is None and bool((wanted & ~got).any()):
            example = int(found.ids[wanted & ~got][0])
    values = {"stop_tokens": seen, "supervised": learned, "rows": rows}
    if not ends:
        return _judge_absent(bench, stops, values)
    if not seen:
        raise NotApplicable("no stop token of its rows follows a supervised token")
    if learned < seen / 2:
        token = show_token(bench.trainer, example if example is not None else min(stops))
        return broken(
            ERROR, f"The stop token {token} is supervised at {learned} of the {seen} places where the text before it is, so the "
            "model does not learn to stop. Is it masked as padding, or left out of the completion?", **values,
        )  # fmt: skip
    return held(f"{learned} of {seen} stop tokens are supervised", **values)


def _check_completions(bench: TrialBench, stops: set[int]) -> LawResult:
    """The stop token of a sampled completion must be in the loss, and nothing after it. Every second one is made to end."""
    batch = bench.sample(STOP_AT).batch
    ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
    is_stop = torch.isin(ids, torch.tensor(sorted(stops), device=ids.device))
    ended = is_stop.any(1)
    if not bool(ended.any()):
        raise NotApplicable(f"none of {len(ids)} completions ended within {ids.shape[1]} tokens")
    first = is_stop.int().argmax(1)
    learned = int(mask[ended, first[ended]].sum())
    after = int((mask & (torch.arange(ids.shape[1], device=ids.device) > first.unsqueeze(1)))[ended].sum())
    values = {"stop_tokens": int(ended.sum()), "supervised": learned, "after": after}
    if learned < int(ended.sum()):
        return broken(ERROR, f"The loss leaves out the stop token of {int(ended.sum()) - learned} of {int(ended.sum())} completions that "
                      "ended by themselves, so the policy does not learn to stop.", **values)  # fmt: skip
    if after:
        return broken(
            ERROR, f"The loss takes {after} tokens behind the stop token of completions, which are padding.", **values
        )
    return held(f"{learned} of {int(ended.sum())} stop tokens are in the loss, nothing behind them", **values)


def _judge_absent(bench: TrialBench, stops: set[int], values: dict[str, Any]) -> LawResult:
    """No row has a stop token: meant in pretraining on pieces of text, a fault where answers are learned."""
    learns_answers = any(any(_content_mask(row, name) for name in CONTENT) for row in bench.all_rows[:CHUNK])
    last = {int(row[IDS][-1]) for row in bench.all_rows[:CHUNK] if isinstance(row, Mapping) and len(row.get(IDS, ()))}
    ending = f"; rows end with {show_token(bench.trainer, last.pop())}" if len(last) == 1 else ""
    names = ", ".join(show_token(bench.trainer, token) for token in sorted(stops))
    return broken(
        WARNING if learns_answers else NOTE,
        f"None of {values['rows']} rows has a stop token ({names}){ending}: generation will not end by itself.", **values,
    )  # fmt: skip


def _content_mask(row: object, name: str) -> bool:
    """Whether a row says which of its tokens are learned, and not all are."""
    value = row.get(name) if isinstance(row, Mapping) else None
    return isinstance(value, list) and any(item in (0, MASKED) for item in value)


def check_prompt_tokens(bench: TrialBench) -> LawResult:
    """Tokens that a row marks as prompt must not be targets, and those that it marks as answer must be."""
    if bench.is_online:
        raise NotApplicable("its loss takes completions only: a prompt is not part of its targets")
    rows = _read_rows(bench)[: 2 * CHUNK]
    masks = [_prompt_tokens(row) for row in rows]
    if not any(any(mask) for mask in masks):
        return _check_unmarked(bench, rows)
    stops = torch.tensor(sorted(find_stop_tokens(bench.trainer)))  # which have a law of their own
    leaked = prompts = missed = answers = 0
    for row, mask in zip(rows, masks, strict=True):
        found = _find_targets(bench, bench.collate([row]))
        own = found.real[0].nonzero().flatten()[: len(mask)]
        asked = found.asked.roll(1, 1)[0, own]
        asked[:1] = False
        prompt = torch.tensor(mask[: len(own)], device=asked.device, dtype=torch.bool)
        leaked, prompts = leaked + int((asked & prompt).sum()), prompts + int(prompt.sum())
        if len(own) == len(mask) and not bench.collator_draws:
            answer = ~prompt & ~torch.isin(found.ids[0, own], stops.to(own.device))
            first = [start for start, _ in find_documents(row)]
            answer[first] = False  # nothing of the document comes before its first token
            missed, answers = missed + int((answer & ~asked).sum()), answers + int(answer.sum())
    values = {"supervised": leaked, "prompt_tokens": prompts, "missed": missed, "answer_tokens": answers}
    if leaked:
        return broken(
            ERROR,
            f"{leaked} of {prompts} prompt tokens are supervised, although the rows mark them as prompt.",
            **values,
        )
    if missed:
        return broken(
            WARNING,
            f"{missed} of {answers} tokens are not supervised, although the rows mark them as answers.",
            **values,
        )
    return held(f"none of {prompts} prompt tokens is supervised, all of {answers} answer tokens are", **values)


def _check_unmarked(bench: TrialBench, rows: list[Any]) -> LawResult:
    """Where rows mark no prompt, because a collator of the user's makes the labels, some tokens must be left out if that was asked for."""
    args: Any = bench.trainer.args
    if not (getattr(args, "completion_only_loss", False) or getattr(args, "assistant_only_loss", False)):
        raise NotApplicable("its rows do not mark prompt tokens")
    found = [_find_targets(bench, bench.collate([row])) for row in rows]
    left = sum(int((each.real[:, 1:] & ~each.asked[:, :-1]).sum()) for each in found)
    if left:
        return held(f"{left} tokens of {len(rows)} rows are left out of the labels", left_out=left)
    return broken(
        ERROR,
        "completion_only_loss or assistant_only_loss is set, but no row marks any token as prompt: all tokens are learned.",
    )


def _prompt_tokens(row: object) -> list[bool]:
    if not isinstance(row, Mapping) or not isinstance(row.get(IDS), list):
        return []
    for name, prompt in (("completion_mask", 0), ("assistant_masks", 0), ("labels", MASKED)):
        if isinstance(row.get(name), list) and len(row[name]) == len(row[IDS]):
            return [item == prompt for item in row[name]]
    return []


def _read_rows(bench: TrialBench) -> list[object]:
    """Returns whole rows of the dataset; short ones if a forward pass is needed to see what is asked."""
    return bench.rows if bench.is_online or has_own_loss(bench) else bench.all_rows


def _read_batches(bench: TrialBench) -> list[tuple[Targets, int]]:
    rows = _read_rows(bench)
    chunks = [rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK)]
    return [(_find_targets(bench, bench.collate(chunk)), len(chunk)) for chunk in chunks]


def _find_targets(bench: TrialBench, batch: object) -> Targets:
    """Returns what each position is asked for, from the labels, or from the loss of a user who computes it alone."""
    if bench.is_online or not isinstance(batch, Mapping) or IDS not in batch or "labels" not in batch:
        raise NotApplicable("its batches have no input_ids and labels")
    ids, labels = batch[IDS], batch["labels"]
    if not bench.is_causal or ids.shape != labels.shape:
        raise NotApplicable("its model does not predict the next token of its inputs")
    target = find_targets(bench, batch)
    mask = batch.get("attention_mask", torch.ones_like(ids))
    return Targets(ids, target, mask.bool() if mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool))
