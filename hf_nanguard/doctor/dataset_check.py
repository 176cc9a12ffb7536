"""`check_dataset`: a sample of the training data, through the trainer's own preparation and collator, judged by checks."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import cast

from transformers import Trainer

from ..errors import ArgumentError
from ..hf.compat.trainer_protocol import HostTrainer
from .data.label_checks import (
    check_masked,
    check_missing_labels,
    check_removed,
    check_stop_token,
    has_answers,
    has_token_labels,
)
from .data.learned_text import (
    check_answers,
    check_decoder_start,
    check_missing_images,
    check_new_tokens,
    check_padding_labels,
    check_two_classes,
)
from .data.row_checks import (
    IMAGES,
    check_attention,
    check_collation,
    check_duplicates,
    check_empty,
    check_finite,
    check_ids,
    check_images,
    check_label_values,
    check_long,
)
from .data.sampled_rows import Report, Sample, take_sample
from .data.text_checks import (
    check_classes,
    check_collator_cut,
    check_messages,
    check_pairs,
    check_start_token,
    has_classes,
    has_messages,
    has_pairs,
    has_start_token,
)
from .rules.finding import DOCS, Examination, Examined, Finding, Severity

SAMPLE = 2000


@dataclass(frozen=True)
class DataCheck:
    """A check of sampled rows: its name, what it is about, whether it applies, and the function that returns a finding."""

    name: str
    about: str
    check: Callable[[Sample], Finding | None]
    applies: Callable[[Sample], bool] = lambda sample: True


DATA_CHECKS = (
    DataCheck("collation", "dataset and collator work", check_collation),
    DataCheck(
        "labels-masked",
        "every row has a label",
        check_masked,
        lambda s: has_token_labels(s) and not s.collator_draws,
    ),
    DataCheck("rows-removed", "rows removed by the trainer", check_removed, lambda s: s.prepared.user_rows is not None),
    DataCheck(
        "labels-missing", "batches have labels", check_missing_labels, lambda s: s.needs_labels and s.limits.known
    ),
    DataCheck(
        "stop-token", "the stop token is learned", check_stop_token, lambda s: has_answers(s) and bool(s.stop_ids)
    ),
    DataCheck("answers", "answers are learned", check_answers, lambda s: has_answers(s) and has_messages(s)),
    DataCheck(
        "padding-labels",
        "no padding is learned",
        check_padding_labels,
        lambda s: has_answers(s) and s.facts.pad_id is not None,
    ),
    DataCheck(
        "decoder-start", "one start token of the decoder", check_decoder_start, lambda s: s.decoder_start is not None
    ),
    DataCheck("new-tokens", "added tokens are trained", check_new_tokens, lambda s: s.first_new_id is not None),
    DataCheck("images-missing", "images reach the model", check_missing_images, lambda s: bool(s.limits.placeholders)),
    DataCheck("regression", "classes are classes", check_two_classes, lambda s: s.limits.is_regression),
    DataCheck("messages", "messages are in the tokens", check_messages, has_messages),
    DataCheck("start-token", "one start token", check_start_token, has_start_token),
    DataCheck("collator-cut", "the collator keeps all tokens", check_collator_cut, lambda s: _has(s, "input_ids")),
    DataCheck("pairs", "pairs differ", check_pairs, has_pairs),
    DataCheck("classes", "labels of several classes", check_classes, has_classes),
    DataCheck("ids", "token ids are inside the embedding", check_ids, lambda s: s.limits.num_ids is not None),
    DataCheck("label-values", "labels are in range", check_label_values, lambda s: s.limits.num_labels is not None),
    DataCheck("finite-inputs", "inputs are finite", check_finite),
    DataCheck("attention-mask", "attention masks leave a token", check_attention, lambda s: _has(s, "attention_mask")),
    DataCheck("empty-rows", "no empty rows", check_empty),
    DataCheck("long-rows", "lengths", check_long, lambda s: _has(s, "input_ids")),
    DataCheck("duplicates", "no repeated rows", check_duplicates),
    DataCheck("constant-images", "images have content", check_images, lambda s: any(_has(s, name) for name in IMAGES)),
)


def _has(sample: Sample, name: str) -> bool:
    return any(row.field(name) is not None for row in sample.rows)


@dataclass
class DatasetReport(Examined):
    """The result of [`check_dataset`]."""

    num_rows: int | None  # of the dataset; `None` for a stream
    num_checked: int
    examination: Examination = field(default_factory=Examination)  # findings, sound checks, checks that do not apply

    @property
    def bad_rows(self) -> list[int]:
        """The rows that no run should train on: those of every error, and those without a label."""
        bad = [found for found in self.findings if found.severity is Severity.ERROR or found.rule == "labels-masked"]
        return sorted({row for found in bad for row in found.rows})


def check_dataset(
    trainer: Trainer, sample: int | None = SAMPLE, skip: Collection[str] = (), report: Report | None = None
) -> DatasetReport:
    """Checks training data as the trainer will see it: after its preparation, through a copy of its collator.

    Nothing of the trainer changes, random state included. A dataset or collator of your own that counts how often it is asked does
    count this.

    Args:
        trainer (`Trainer`):
            Any trainer, built and not yet trained.
        sample (`int`, *optional*, defaults to `2000`):
            How many rows to check, evenly spread over the dataset, or the first ones of a stream. `None` for all.
        skip (`Collection[str]`, *optional*):
            Names of checks to leave out.
        report (`Callable`, *optional*):
            Called with the number of rows done and of all.

    Returns:
        `DatasetReport`: `.findings`, each with the rows it is about; `.is_sound`; `.bad_rows`.

    Example:

    ```python
    report = check_dataset(SFTTrainer(model, args=args, train_dataset=dataset))
    print([found.what for found in report.findings])
    ```
    """
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"check_dataset() must be given a Trainer, got {type(trainer).__name__}.")
    if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int) or sample < 1):
        raise ArgumentError(f"sample must be an integer of at least 1, or None for all rows, got {sample!r}.")
    if trainer.train_dataset is None:
        raise ArgumentError(
            "check_dataset() must be given a trainer with training data, got none. Pass train_dataset to it."
        )
    return judge_sample(take_sample(cast(HostTrainer, trainer), sample, report), skip)


def judge_sample(sample: Sample, skip: Collection[str] = (), text: bool = True) -> DatasetReport:
    """Applies every check that applies to these rows. Without `text`, findings contain no text of the data."""
    result = DatasetReport(sample.num_rows, len(sample.rows))
    for each in DATA_CHECKS:
        if each.name in skip:
            continue
        if not sample.rows or not each.applies(sample):
            result.examination.unchecked.append(each.name)
        elif (found := each.check(sample)) is None:
            result.examination.sound.append(each.name)
        else:
            found = replace(found.shown(text), rule=each.name, reference=f"{DOCS}#data")
            result.examination.findings.append(found)
    return result
