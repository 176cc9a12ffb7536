"""An epoch takes every row of the dataset once. Only row numbers are read, no row and no batch."""

from collections import Counter
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, WeightedRandomSampler

from ..trial.law_result import ERROR, NOTE, WARNING, LawResult, NotApplicable, broken, held
from ..trial.trial_bench import TrialBench

MAX_ROWS = 1_000_000


def check_epoch(bench: TrialBench) -> LawResult:
    """Counts how often the sampler of the training data takes each row in one epoch."""
    if bench.is_online:
        raise NotApplicable("it takes each prompt several times by design")
    loader = bench.loader
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        raise NotApplicable("its training data are a stream")
    size = len(loader.dataset)
    if size > MAX_ROWS:
        raise NotApplicable(f"its dataset has more than {MAX_ROWS:,} rows")
    taken = Counter(islice(_list_rows(loader), 2 * size + 1))
    repeated = sorted(row for row, count in taken.items() if count > 1)
    missing = size - len(taken)
    batches = loader.batch_sampler
    if bench.trainer.args.dataloader_drop_last or getattr(batches, "drop_last", loader.drop_last):
        missing = max(missing - (getattr(batches, "batch_size", loader.batch_size) or 1) + 1, 0)
    if not repeated and not missing:
        return held(f"one epoch takes each of {size} rows once", rows=size)
    values = {"rows": size, "missing": missing, "repeated": len(repeated), "first_repeated": repeated[:20]}
    message = f"One epoch takes {len(taken)} of the {size} rows of the dataset, {len(repeated)} of them more than once"
    if _is_meant(loader):
        return broken(NOTE, f"{message}: its sampler draws with replacement.", **values)
    if repeated:
        return broken(ERROR, f"{message}, first row {repeated[0]}. Does its sampler repeat rows?", **values)
    return broken(WARNING, f"{message}: {missing} are never trained on.", **values)


def _list_rows(loader: Any) -> Iterator[int]:
    sampler = loader.batch_sampler
    if sampler is None:
        yield from map(int, loader.sampler)
        return
    for batch in sampler:
        yield from map(int, batch)


def _is_meant(loader: Any) -> bool:
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    return any(isinstance(each, WeightedRandomSampler) or getattr(each, "replacement", False) for each in samplers)
