"""Bad rows that the data stage has found, written where a guarded run of the same data will leave them out."""

from pathlib import Path

from ...core.vocabulary import Signal
from ...errors import ArgumentError
from ...hf.data.dataset_fingerprint import find_contents, find_fingerprint
from ...hf.data.quarantine_file import quarantine_rows
from ...report.run_files import GUARD_FOLDER, new_run_id
from ..data.sampled_rows import Sample
from ..dataset_check import DatasetReport

# What a row of these checks would cause in a run. Rows of others are not proved to be bad each by itself.
SIGNALS = {
    "labels-masked": Signal.LABELS_MASKED,
    "ids": Signal.INPUT_OUT_OF_RANGE,
    "label-values": Signal.LABEL_OUT_OF_RANGE,
    "finite-inputs": Signal.INPUT_NONFINITE,
}


def quarantine_found(folder: Path, dataset: object, sample: Sample, report: DatasetReport) -> list[int]:
    """Appends the bad rows of a report on a sample to `quarantine.jsonl` of the run with this output directory, and returns
    those that are new."""
    found = {
        each.rule: set(each.rows) & set(report.bad_rows)
        for each in report.findings
        if each.rule in SIGNALS and each.rows
    }
    if not any(found.values()):
        return []
    fingerprint = find_fingerprint(dataset, sample.prepared.user_rows)
    if fingerprint is None:
        raise ArgumentError("--quarantine needs a dataset with numbered rows, got a stream.")
    run, added = new_run_id(), []
    for rule, rows in found.items():
        try:
            contents = find_contents(dataset, rows, sample.prepared.user_rows)
            given = (folder / GUARD_FOLDER, sorted(rows), fingerprint, SIGNALS[rule], 0, run)
            added += quarantine_rows(*given, contents=contents)
        except OSError as error:
            raise ArgumentError(f"--quarantine could not write to {folder} ({error.strerror}).") from error
    return sorted(added)
