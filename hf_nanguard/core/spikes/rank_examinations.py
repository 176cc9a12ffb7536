"""The examinations of a spike on several ranks as one."""

from dataclasses import asdict, replace

from ..event import JsonObject
from ..ranks import Ranks
from .spike_examination import SampleReading, SpikeExamination, SpikeVerdict


def share_examination(found: SpikeExamination, ranks: Ranks) -> SpikeExamination:
    """Returns the examinations of all ranks as one, the same on every rank. Every rank must call it."""
    if ranks.size == 1:
        return found
    return merge_examinations([_read(each) for each in ranks.gather(_write(found))])


def _write(found: SpikeExamination) -> JsonObject:
    """Returns an examination as JSON values, for the other ranks."""
    return {**asdict(found), "verdict": None if found.verdict is None else str(found.verdict)}


def _read(values: JsonObject) -> SpikeExamination:
    lists = {name: [SampleReading(**each) for each in values[name]] for name in ("blamed", "readings")}
    verdict = None if values["verdict"] is None else SpikeVerdict(values["verdict"])
    pairs = {name: None if values[name] is None else tuple(values[name]) for name in ("without", "usual")}
    return SpikeExamination(**{**values, **lists, **pairs, "verdict": verdict})


def merge_examinations(found: list[SpikeExamination]) -> SpikeExamination:
    """Returns the examinations of all ranks as one: that with rows, as suspects if any is, else the first with a verdict, with the samples of all."""
    order = (
        SpikeVerdict.LABELS,
        SpikeVerdict.ROWS,
        SpikeVerdict.STATE,
        SpikeVerdict.LEARNING_RATE,
        SpikeVerdict.BATCH,
        None,
    )
    ranked = sorted(found, key=lambda each: order.index(each.verdict))
    blaming = [each for each in found if each.blamed]
    merged = replace(
        ranked[0],
        blamed=[reading for each in blaming for reading in each.blamed],
        readings=[reading for each in found for reading in each.readings],
        num_runs=sum(each.num_runs for each in found),
    )
    if len(blaming) > 1:
        merged = replace(merged, why="; ".join(each.why for each in blaming))
    return merged
