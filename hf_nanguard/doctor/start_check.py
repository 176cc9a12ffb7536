"""Rules and a small sample of the data at the start of every guarded run, in seconds."""

import logging

from ..boundary import attempt
from ..core.ranks import Ranks
from ..errors import ArgumentError
from ..hf.compat.trainer_protocol import HostTrainer
from ..plain_text import printable, quote_error, show
from .data.sampled_rows import is_repeatable, take_sample
from .dataset_check import judge_sample
from .facts.trainer_inspection import find_trainer_facts
from .rules.finding import Examination
from .rules.rule_set import judge

logger = logging.getLogger("hf_nanguard")
NUM_ROWS = 64


def check_start(trainer: HostTrainer, text: bool = True) -> Examination:
    """Returns what rules find, and what checks find in a few rows if reading them leaves no trace.

    Otherwise (a stream, a dataset or collator of the user's) the batches are judged as they pass, by the guard's own checks.
    """
    result = judge(find_trainer_facts(trainer))
    if trainer.train_dataset is not None and is_repeatable(trainer):
        result.add(judge_sample(take_sample(trainer, NUM_ROWS), text=text).examination)
    return result


def report_start(trainer: HostTrainer, mode: str, ranks: Ranks, text: bool = True) -> None:
    """Logs everything above a note, one line each, without `text` of the data if it must not be shown; in mode `strict` raises on
    every rank if there is anything on one."""
    if mode == "off":
        return

    def could_not(error: Exception) -> list[str]:
        why = show(quote_error(error), text)
        logger.warning("hf_nanguard: the settings could not be checked at the start of the run (%s).", why)
        return []

    # Model, dataset and collator may be anything; a check must not end the run.
    problems = attempt(
        lambda: [printable(each.format_line()) for each in check_start(trainer, text).problems], could_not
    )
    if mode == "strict" and ranks.any(bool(problems)):
        found = " ".join(f"({number}) {line}" for number, line in enumerate(problems, 1)) or "found on another rank."
        raise ArgumentError(
            f"nanguard_doctor='strict' refuses to start this run: {found} Set nanguard_doctor='warn' to start it."
        )
    for line in problems if ranks.rank == 0 else ():
        logger.warning("hf_nanguard: %s", line)
