"""Scans checkpoints on disk: every tensor of every file, once, mapped into memory and on every core.

Numbers are judged in `tensor_check`, files are opened in `tensor_files`. A scan imports nothing that a file names, and turns
whatever is wrong with a file into a finding.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..plain_text import printable
from .checkpoint_files import (
    find_missing,
    find_missing_beside,
    find_used_folders,
    is_state_file,
    list_checkpoints,
    list_indices,
    list_tensor_files,
    read_index,
)
from .distributed_folder import read_shards
from .good_record import digest_folder, read_good
from .scan_result import UNUSABLE, Problem, ScanFinding, ScanResult
from .tensor_check import NARROW, Checks, as_plain, can_check, has_floats, judge
from .tensor_extents import Progress, build_pool, find_extents
from .tensor_files import DamagedFileError, OpenedFile, open_tensors
from .tied_head import find_untied, is_tied

CASTS = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, *NARROW)}
# Classes that libraries write beside their tensors: DeepSpeed anywhere, others in training state.
EXTRA_STATE = "_extra_state"  # which is no tensor in most modules
ENGINE_OBJECTS = ("deepspeed.",)
STATE_OBJECTS = (*ENGINE_OBJECTS, "numpy.", "transformers.", "accelerate.", "torch.")


def scan_checkpoint(path: str | Path, deep: bool = False, as_dtype: str | None = None) -> ScanResult:
    """Scans a file, a model folder, a checkpoint or a whole run for NaN, inf and damaged files.

    Nothing in a file is executed. An inf that is a mask by design, zero biases, a LoRA matrix that begins at zero, integers
    and quantized weights are not findings.

    Args:
        path (`str` or `Path`):
            The file or folder. Of a run, all checkpoints are scanned.
        deep (`bool`, *optional*, defaults to `False`):
            Also count denormal numbers and look for rows that look uninitialized, in further passes.
        as_dtype (`str`, *optional*):
            Also report what would overflow or vanish in this dtype, e.g. `"float16"`.

    Returns:
        `ScanResult`: with `findings`, `is_good` and `exit_code`.

    Raises:
        ArgumentError: if there is no such path, or the dtype is not a known one.

    Example:

    ```python
    result = scan_checkpoint("runs/mine/checkpoint-100")
    print(result.is_good, *result.findings, sep="\\n")
    ```
    """
    inner = [
        (result, "" if result.path == Path(path) else f"{result.path.name}/")
        for result in scan_paths([path], make_checks(deep, as_dtype))
    ]
    return ScanResult(
        Path(path),
        findings=[replace(found, file=folder + found.file) for result, folder in inner for found in result.findings],
        notes=[folder + note for result, folder in inner for note in result.notes],
        num_files=sum(result.num_files for result, _ in inner),
        num_tensors=sum(result.num_tensors for result, _ in inner),
        num_bytes=sum(result.num_bytes for result, _ in inner),
    )


def make_checks(deep: bool, as_dtype: str | None) -> Checks:
    """Returns what to look for; refuses an unknown dtype."""
    if as_dtype is not None and as_dtype not in CASTS:
        raise ArgumentError(f"The dtype must be one of {', '.join(CASTS)}, got {as_dtype!r}.")
    return Checks(deep, None if as_dtype is None else CASTS[as_dtype])


def scan_paths(paths: Iterable[str | Path], checks: Checks, progress: Progress | None = None) -> Iterator[ScanResult]:
    """Yields a result for each file, folder and checkpoint of a run, in the given order, checkpoints in that of their steps."""
    with build_pool() as pool:
        for target in find_targets(paths):
            yield _Scan(target, checks, pool, progress or (lambda num_bytes: None)).run()


def find_targets(paths: Iterable[str | Path]) -> list[Path]:
    """Returns what is scanned one by one: files, folders, and the checkpoints of runs."""
    targets: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ArgumentError(f"No such file or folder: {printable(str(path))}.")
        checkpoints = list_checkpoints(path)[::-1] if path.is_dir() else []
        own = [path] if not checkpoints or list_tensor_files(path) else []
        targets += [*checkpoints, *own]
    return targets


class _Scan:
    """The scan of one file or folder."""

    def __init__(self, path: Path, checks: Checks, pool: ThreadPoolExecutor, progress: Progress):
        self.path = path
        self.checks = checks
        self.pool = pool
        self.progress = progress
        self.result = ScanResult(path)

    def run(self) -> ScanResult:
        folder = self.path if self.path.is_dir() else self.path.parent
        files = list_tensor_files(self.path) if self.path.is_dir() else [self.path]
        if self.path.is_dir():
            for text in find_missing(self.path):
                self._add(Problem.INCOMPLETE, self.path, None, text)
            for text in find_missing_beside(self.path):
                self.result.notes.append(f"{text}; the model does not need it")
            if not files and not self.result.findings:
                self._add(Problem.DAMAGED, self.path, None, "holds no file of tensors")
        weights: dict[str, Tensor] = {}
        names: dict[Path, set[str]] = {}  # of the weights in each folder, also of those that are not checked
        sizes: list[int] = []  # number of tensors of each file of weights
        for file in (each for each in files if each.suffix != ".distcp"):
            opened = self._open(file)
            if opened is not None:
                self._check(file, opened)
                sizes += [] if is_state_file(file) else [len(opened.tensors) + len(opened.unreadable)]
                weights |= {} if is_state_file(file) or file.parent != folder else opened.tensors
                names.setdefault(file.parent, set()).update(opened.tensors, opened.unreadable)
        parts = sorted({each.parent for each in files if each.suffix == ".distcp"})
        for part in parts:
            self._check_shards(part)
        if self.path.is_dir() and sizes and not any(sizes) and not parts:
            self._add(Problem.INCOMPLETE, self.path, None, "has no tensors in its files of weights")
        self._check_tie(folder, weights)
        self._check_indices(names)
        self._compare_record()
        return self.result

    def _check_indices(self, names: Mapping[Path, Collection[str]]) -> None:
        """Compares the tensors that an index names with those of the shards: the host makes up what is in none."""
        if not self.path.is_dir() or any(finding.problem in UNUSABLE for finding in self.result.findings):
            return
        used = find_used_folders(self.path)
        for index in (each for each in list_indices(self.path) if each.parent in used):
            there = names.get(index.parent, ())
            missing = [name for name in read_index(index) if name not in there and not name.endswith(EXTRA_STATE)]
            if missing:
                more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
                text = f"names {printable(missing[0], 200)}{more}, which no shard holds"
                self._add(Problem.INCOMPLETE, index, None, text)

    def _compare_record(self) -> None:
        """Takes what the run has recorded into account: tensors that are non-finite by design, and the digest."""
        record = read_good(self.path.parent) if self.path.is_dir() else None
        if record is None:
            return
        self.result.accept(record.accepted)
        if record.path == self.path.name and record.digest != digest_folder(self.path):
            self.result.notes.append("it has changed since it was saved: the digest in good.json is another")
            zero = [finding for finding in self.result.findings if finding.problem is Problem.ALL_ZERO]
            if zero:  # blocks that a machine without power had not written yet
                text = f"has changed since it was saved, and now {len(zero)} matrices are zero"
                self._add(Problem.DAMAGED, self.path / zero[0].file, zero[0].tensor, text)

    def _open(self, file: Path) -> OpenedFile | None:
        try:
            opened = open_tensors(file)
        except DamagedFileError as error:
            self._add(Problem.DAMAGED, file, None, str(error))
            return None
        self.result.count_file()
        return opened

    def _check_shards(self, folder: Path) -> None:
        try:
            for name, opened in read_shards(folder):
                named = {f"{name}.{key}" if key else name: tensor for key, tensor in opened.tensors.items()}
                self._check(folder, replace(opened, tensors=named))
            self.result.count_file()
        except DamagedFileError as error:
            self._add(Problem.DAMAGED, folder, None, str(error))

    def _check(self, file: Path, opened: OpenedFile) -> None:
        """Checks the tensors of a file, in the order of the file, and what else it contains."""
        is_state = is_state_file(file)
        plain = {name: as_plain(tensor) for name, tensor in opened.tensors.items()}
        floats = {name: tensor for name, tensor in plain.items() if tensor is not None}
        with torch.no_grad():
            for name, extent in find_extents(floats, self.pool, self.progress, self.checks.need_extents).items():
                for problem, message in judge(name, floats[name], extent, is_state, self.checks):
                    self._add(problem, file, name, message)
        for name in opened.nan_numbers:
            self._add(Problem.NAN, file, name, "is NaN")
        self._check_foreign(file, opened.foreign, is_state)
        odd = [name for name, tensor in opened.tensors.items() if has_floats(tensor) and not can_check(tensor)]
        if unchecked := [*opened.unreadable, *odd]:
            text = (
                f"{len(unchecked)} tensors have a dtype or layout that torch cannot compute with and were not checked"
            )
            self.result.notes.append(printable(f"{file.name}: {text}, e.g. {unchecked[0]}"))
        self.result.count_tensors(len(opened.tensors), sum(map(_count_bytes, opened.tensors.values())))

    def _check_foreign(self, file: Path, names: list[str], is_state: bool) -> None:
        expected = STATE_OBJECTS if is_state else ENGINE_OBJECTS
        foreign = [name for name in names if not name.startswith(expected)]
        if foreign:
            text = f"names {', '.join(foreign[:3])}, which loading it without weights_only would import"
            self._add(Problem.FOREIGN_OBJECTS, file, None, text)

    def _check_tie(self, folder: Path, weights: dict[str, Tensor]) -> None:
        pair = find_untied(weights) if is_tied(folder) else None
        if pair is not None:
            text = f"differs from {pair[1]}, although config.json says that they are tied; loading keeps only one"
            self._add(Problem.UNTIED_HEAD, folder, pair[0], text)

    def _add(self, problem: Problem, file: Path, tensor: str | None, message: str) -> None:
        place = Path(file.name) if file == self.path else file.relative_to(self.path)
        self.result.findings.append(ScanFinding(problem, printable(str(place)), tensor and printable(tensor, 200), message))  # fmt: skip


def _count_bytes(tensor: Tensor) -> int:
    held = tensor if tensor.layout is torch.strided else as_plain(tensor)
    return 0 if held is None else held.nbytes
