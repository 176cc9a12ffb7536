"""Tokens see only what they may: nothing of other documents of the same row, and nothing that comes after them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...hf.compat.model_config import find_config
from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.moved_output import find_moved, measure_move
from ..trial.special_tokens import find_special_tokens, find_stop_tokens
from ..trial.trial_bench import Inputs, TrialBench
from ..trial.trial_rows import IDS, LENGTHS, MAX_DOCUMENTS, Row, change_document, cut_document, find_documents, shorten

ROUNDING = 64  # equal shapes and masked entries of exactly 0: hardly more than the rounding of a sum
Document = tuple[int, tuple[int, int]]  # row, begin and end


def check_isolation(bench: TrialBench) -> LawResult:
    """Changes the first and the last document of a batch, one at a time, and compares the outputs of all others."""
    if bench.is_online:
        raise NotApplicable("each of its completions has a row of its own")
    rows, documents = _choose_documents(bench)
    bench.need_steady()
    inputs, owners = _find_owners(bench, rows, documents)
    bound = ROUNDING * bench.eps + 10 * bench.noise
    before, moves = bench.forward(inputs), []
    for changed in (0, len(documents) - 1):
        others = bench.find_inputs(bench.collate(_change(bench, rows, documents[changed])))
        places = (owners >= 0) & (owners != changed)
        moves.append((measure_move(before, bench.forward(others), places), changed, others, places))
    worst, changed, others, places = max(moves, key=lambda move: move[0])
    if worst > bound:
        return _describe_leak(bench, inputs, others, places, owners, (worst, bound, changed))
    return _compare_alone(bench, rows, documents, inputs, before) or _check_first_targets(inputs, documents) or held(
        f"{len(documents)} documents in one row; changing one moves the others by {worst:.1e} of the logits' spread",
        move=worst, bound=bound,
    )  # fmt: skip


def _compare_alone(
    bench: TrialBench, rows: list[Row], documents: list[Document], inputs: Inputs, packed: Tensor
) -> LawResult | None:
    """Compares the outputs of the last document with those it has in a row of its own; a token counted from the head of the packed row
    has another position there."""
    at, (start, stop) = documents[-1]
    alone = bench.find_inputs(bench.collate([cut_document(rows[at], (start, stop))]))
    ids, size = alone[IDS].flatten(), alone[IDS].numel()
    whole = inputs[IDS].flatten()
    begin = next((i for i in range(len(whole) - size, 0, -1) if torch.equal(whole[i : i + size], ids)), None)
    output = bench.forward(alone)
    if begin is None or output.shape[:2].numel() != size or packed.shape[:2].numel() != len(whole):
        return None
    one, other = output.flatten(0, 1), packed.flatten(0, 1)[begin : begin + size]
    move, bound = measure_move(one, other), bench.allow()
    if move <= bound:
        return None
    return broken(ERROR, f"A document has other logits in a packed row than in a row of its own (by {move:.1e} of their spread, rounding explains "
                  f"{bound:.0e}), though it sees nothing of the others: its positions are counted from the head of the row.",
                  move=move, bound=bound)  # fmt: skip


def _choose_documents(bench: TrialBench) -> tuple[list[Row], list[Document]]:
    """Returns rows and their documents such that several documents share a row of the batch."""
    rows = bench.rows
    if not isinstance(rows[0], Mapping) or IDS not in rows[0]:
        raise NotApplicable("its rows have no input_ids")
    packed = next((row for row in bench.all_rows if len(find_documents(row)) > 1), None)
    if packed is not None:
        packed = shorten(packed, bench.limit)
        return [packed], [(0, span) for span in find_documents(packed)][:MAX_DOCUMENTS]
    if (
        getattr(bench.trainer.args, "packing", False) and LENGTHS not in rows[0]
    ):  # as "wrapped": rows do not say where documents end
        split = _split_at_stops(bench, rows)
        if len(split[1]) > 1:
            return split
    rows = rows[1:]
    batch = bench.collate(rows)
    ids = batch[IDS] if isinstance(batch, Mapping) and IDS in batch else None
    if ids is None or len(ids) >= len(rows):
        raise NotApplicable("each row of a batch holds one document")
    return rows, [(i, (0, len(row[IDS]))) for i, row in enumerate(rows)]


def _split_at_stops(bench: TrialBench, rows: list[Row]) -> tuple[list[Row], list[Document]]:
    """Returns a packed row without boundaries, cut where documents end: after each stop token."""
    stops = find_stop_tokens(bench.trainer)
    row = max(rows, key=lambda row: sum(token in stops for token in row[IDS]))
    ends = [i + 1 for i, token in enumerate(row[IDS]) if token in stops and 3 <= i < len(row[IDS]) - 4]
    spans = list(zip([0, *ends], [*ends, len(row[IDS])], strict=True))[:MAX_DOCUMENTS]
    return [row], [(0, span) for span in spans]


def _change(bench: TrialBench, rows: list[Row], document: Document) -> list[Row]:
    at, span = document
    kept = find_special_tokens(bench.trainer)
    return [change_document(row, span, kept) if i == at else row for i, row in enumerate(rows)]


def _find_owners(bench: TrialBench, rows: list[Row], documents: list[Document]) -> tuple[Inputs, Tensor]:
    """Returns the model's inputs, and for each of their tokens the document it is from: where the inputs change if the
    document does. -1 for tokens that never change."""
    inputs = bench.find_inputs(bench.collate(rows))
    owners = torch.full(inputs[IDS].shape, -1, device=inputs[IDS].device)
    for number, document in enumerate(documents):
        ids = bench.find_inputs(bench.collate(_change(bench, rows, document)))[IDS]
        if ids.shape != owners.shape:
            raise NotApplicable("its collator makes batches of another shape of equally long rows")
        owners[ids != inputs[IDS]] = number
    return inputs, owners


def _describe_leak(
    bench: TrialBench, inputs: Inputs, others: Inputs, places: Tensor, owners: Tensor, found: tuple[float, float, int]
) -> LawResult:
    move, bound, changed = found
    before, after = bench.forward(inputs), bench.forward(others)
    spread = (before - after).abs().amax(-1).masked_fill(~places, 0)
    row, token = divmod(int(spread.argmax()), spread.shape[1])
    module = find_moved(bench, inputs, others, places, bound)
    asked = getattr(bench.trainer.args, "packing_strategy", None) == "wrapped"
    message = (
        f"Changing document {changed} of a packed row moves the logits of document {int(owners[row, token])} by {move:.1e} of "
        f"their spread (rounding explains {bound:.0e}), most at token {token} of row {row}"
        + (f"; the first module that lets it through is {module}" if module else "")
    )
    if asked:
        message += '. packing_strategy="wrapped" does not separate documents; "bfd" does'
    return broken(
        NOTE if asked else ERROR, f"{message}.", move=move, bound=bound, row=row, token=token, module=module,
        position_ids=_show(inputs.get("position_ids"), row),
    )  # fmt: skip


def _show(positions: object, row: int) -> list[int] | None:
    return positions[min(row, len(positions) - 1)].flatten()[:64].tolist() if isinstance(positions, Tensor) else None


def _check_first_targets(inputs: Inputs, documents: list[Document]) -> LawResult | None:
    """The first token of a document must not be the target of the document before it."""
    labels = inputs.get("labels")
    sizes = [stop - start for _, (start, stop) in documents]
    starts = [sum(sizes[:i]) for i in range(1, len(sizes))]
    if (
        not isinstance(labels, Tensor)
        or labels.shape != inputs[IDS].shape
        or len(labels) != 1
        or labels.shape[1] < sum(sizes)
    ):
        return None
    asked = [start for start in starts if int(labels[0, start]) == int(inputs[IDS][0, start])]
    if not asked:
        return None
    return broken(
        WARNING,
        f"The first token of a document (token {asked[0]}) is a label, so the document before it learns to predict it. Set the "
        "labels of first tokens to -100.",
        token=asked[0], count=len(asked),
    )  # fmt: skip


def check_causality(bench: TrialBench) -> LawResult:
    """Changes the last token of every row and compares the outputs of all tokens before it."""
    inputs = bench.find_inputs()
    ids, mask = inputs.get(IDS), inputs.get("attention_mask")
    if not bench.is_generator or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 3:
        raise NotApplicable("its model does not predict the next token of its inputs")
    if getattr(find_config(bench.bare), "use_bidirectional_attention", False):
        raise NotApplicable("its config asks for attention in both directions")
    bench.need_steady()
    is_real = (
        mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    )
    order = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(is_real, order, -1).amax(1)  # the last real token of each row
    plain = sorted({int(token) for token in ids[is_real].flatten()} - find_special_tokens(bench.trainer))
    if len(plain) < 2:
        raise NotApplicable("its rows have too few different tokens to change one")
    changed = ids.clone()
    for row, at in enumerate(last.tolist()):
        if at >= 0:
            changed[row, at] = next(token for token in plain if token != int(ids[row, at]))
    places = is_real & (order < last.unsqueeze(1))
    others, bound = {**inputs, IDS: changed}, ROUNDING * bench.eps + 10 * bench.noise
    before, after = bench.forward(inputs), bench.forward(others)
    if before.shape[:2] != ids.shape:
        raise NotApplicable("its outputs cannot be matched with tokens")
    move = measure_move(before, after, places)
    if move <= bound:
        return held(
            f"changing the last token of a row moves those before it by {move:.1e} of the logits' spread",
            move=move,
            bound=bound,
        )
    off = (before - after).abs().amax(-1).masked_fill(~places, 0)
    row, token = divmod(int(off.argmax()), off.shape[1])
    module = find_moved(bench, inputs, others, places, bound)
    return broken(
        ERROR, f"Changing the last token of a row moves the logits of tokens before it by {move:.1e} of their spread (rounding "
        f"explains {bound:.0e}), most at token {token} of row {row}"
        + (f"; the first module that lets it through is {module}" if module else "") + ". The model sees what it is asked to predict.",
        move=move, bound=bound, row=row, token=token, module=module,
    )  # fmt: skip
