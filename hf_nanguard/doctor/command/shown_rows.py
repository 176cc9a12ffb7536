"""`nanguard doctor --show N`: rows as the model sees them, with the tokens it learns from marked."""

from itertools import groupby

from rich.console import Console
from rich.text import Text

from ...hf.data.batch_limits import IGNORED_LABEL
from ...plain_text import printable
from ..data.sampled_rows import Sample, SampledRow

MAX_TOKENS = 2000
OPEN, CLOSE = ">>>", "<<<"  # around tokens that are learned, where there are no colors


def print_rows(console: Console, sample: Sample, num_rows: int) -> None:
    """Prints the first rows: learned tokens in green on a terminal, between `>>>` and `<<<` elsewhere, the others dim."""
    for row in sample.rows[:num_rows]:
        console.print(Text(f"row {row.number}", "bold"))
        console.print(_mark(row, sample, console.is_terminal), soft_wrap=True)


def _mark(row: SampledRow, sample: Sample, has_colors: bool) -> Text:
    ids, labels = row.field("input_ids"), row.field("labels")
    if ids is None or ids.ndim != 2 or sample.tokenizer is None:
        return Text(printable(row.error or repr(row.example), MAX_TOKENS))
    text = Text("  ")
    tokens = ids[0].tolist()[:MAX_TOKENS]
    learned = [False] * len(tokens)
    if labels is not None and labels.shape == ids.shape:
        learned = (labels[0] != IGNORED_LABEL).tolist()[:MAX_TOKENS]
        learned[:1] = [False] if sample.limits.shifted else learned[:1]  # no position predicts the first token
    for is_learned, group in groupby(zip(tokens, learned, strict=True), key=lambda pair: pair[1]):
        part = printable(str(sample.tokenizer.decode([token for token, _ in group])).replace("\n", "\\n"))
        if is_learned:
            text.append(part if has_colors else f"{OPEN}{part}{CLOSE}", "green")
        else:
            text.append(part, "dim")
    return text
