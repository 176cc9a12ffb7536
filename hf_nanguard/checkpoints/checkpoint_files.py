"""Which files belong to a checkpoint, and whether all of them are there."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..plain_text import first_line, printable
from ..safe_files import read_file
from .tensor_files import SAFETENSORS, TORCH_FILES

QUARANTINE = "_bad_checkpoints"  # a name that push_to_hub leaves out
CHECKPOINT = re.compile(r"checkpoint-(\d+)$")
# Written by transformers while it saves on a preemption; nothing in transformers reads it.
SENTINEL = "checkpoint-is-incomplete.txt"
PIPELINE = "model_index.json"  # which names the sub-folders of its models
TRAINER_STATE = "trainer_state.json"
INDEX_SUFFIX = ".index.json"
CONFIGS = ("config.json", "adapter_config.json")  # which the host reads when it resumes
MAX_JSON = 256 * 2**20  # a log history of many steps may be large
DISTRIBUTED_METADATA = ".metadata"
ENGINE_FOLDER = "global_step*"
SHARD = re.compile(r"zero_pp_rank_(\d+)_")
NAMED_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)$")
MODELS = ("model", "pytorch_model")  # whose shards the host finds by an index only
MAX_NAME = 4096
OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_*", ENGINE_FOLDER)
SCHEDULER = ("scheduler.pt", ENGINE_FOLDER)
RANDOM_STATE = ("rng_state*.pth",)
MODEL_STATES = ("*model_states.pt",)  # which DeepSpeed writes at every stage
STATE_FILES = re.compile(r"optim|scheduler|scaler|rng_state")
IGNORED = {"training_args.bin"}  # an object of the user's run, not tensors
IGNORED_FOLDERS = re.compile(r"nanguard$|\.|_")


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; a `ValueError` says why it cannot be had."""
    try:
        return json.loads(read_file(path, MAX_JSON))
    except (OSError, RecursionError) as error:
        raise ValueError(first_line(error)) from error


def is_state_file(path: Path) -> bool:
    """Returns whether a file has the state of an optimizer, a scheduler or a random generator, not weights."""
    return STATE_FILES.search(path.name) is not None or path.parent.name.startswith("optimizer")


def list_tensor_files(folder: Path) -> list[Path]:
    """Returns the files of tensors below a folder, other checkpoints and folders of the guard left out."""
    paths = (path for path in _list_files(folder) if path.name not in IGNORED)
    return [path for path in paths if path.suffix in (*SAFETENSORS, *TORCH_FILES, ".distcp") and path.is_file()]


def list_indices(folder: Path) -> list[Path]:
    """Returns the indices of shards below a folder, which may have several models (`unet/`, `text_encoder/`)."""
    return [path for path in _list_files(folder) if path.name.endswith(INDEX_SUFFIX)]


def _list_files(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not IGNORED_FOLDERS.match(name) and not CHECKPOINT.fullmatch(name)
        )
        yield from (Path(directory, name) for name in sorted(files))


def list_checkpoints(run: Path) -> list[Path]:
    """Returns the checkpoints of a run, the newest first. One that somebody removes meanwhile is left out."""
    try:
        folders = [path for path in run.iterdir() if CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True)


def is_interrupted(folder: Path) -> bool:
    """Returns whether the save of a checkpoint was interrupted: the state of the trainer, which is written last, is not there, or
    does not say how many steps were taken."""
    try:
        return (folder / SENTINEL).exists() or not isinstance(read_json(folder / TRAINER_STATE)["global_step"], int)
    except (ValueError, KeyError, TypeError):
        return True


def find_missing(folder: Path) -> Iterator[str]:
    """Yields what is missing in a folder, as the rest of a sentence that begins with the folder.

    In a folder `checkpoint-N` the state of the trainer must be there, which transformers writes last; optimizer, scheduler
    and random state must be there all or none (`save_only_model`).
    """
    if (folder / SENTINEL).exists():
        yield f"was not saved to the end: {SENTINEL} is in it"
    yield from _find_missing_shards(folder, used=True)
    yield from _check_configs(folder)
    if CHECKPOINT.fullmatch(folder.name):
        yield from _check_training_state(folder)
    for part in sorted({path.parent for path in folder.glob("*/*.distcp")}):
        if not (part / DISTRIBUTED_METADATA).is_file():
            yield f"has no {part.name}/{DISTRIBUTED_METADATA}, without which its shards cannot be read"


def find_missing_beside(folder: Path) -> Iterator[str]:
    """Yields what is missing in sub-folders that the model in a folder does not need, in the same words."""
    return _find_missing_shards(folder, used=False)


def find_used_folders(folder: Path) -> set[Path]:
    """Returns the folders whose shards must be complete: all of a pipeline, and of a folder without weights of its own; else a
    sub-folder is a copy in another format (`original/`), or an export."""
    below = {path.parent for path in _list_files(folder)}
    own = (path for path in [*list_tensor_files(folder), *list_indices(folder)] if path.parent == folder)
    is_model = any(not is_state_file(path) for path in own) and not (folder / PIPELINE).exists()
    return {folder} if is_model else {folder, *below}


def _find_missing_shards(folder: Path, used: bool) -> Iterator[str]:
    folders = find_used_folders(folder)
    for index in list_indices(folder):
        if (index.parent in folders) is used:
            yield from _check_index(index, folder)
    yield from _check_shard_names(
        folder, [path for path in list_tensor_files(folder) if (path.parent in folders) is used]
    )


def _check_configs(folder: Path) -> Iterator[str]:
    for config in (folder / name for name in CONFIGS if (folder / name).exists()):
        try:
            read_json(config)
        except ValueError as error:
            yield f"has a {config.name} that cannot be read ({first_line(error)})"


def read_index(index: Path) -> dict[str, str]:
    """Returns the shard of each tensor that an index names; a `ValueError` says why it cannot be had."""
    try:
        shards = read_json(index)["weight_map"]
        return {str(name): str(shard) for name, shard in shards.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(first_line(error)) from error


def _check_index(index: Path, folder: Path) -> Iterator[str]:
    shown = printable(str(index.relative_to(folder)), 200)
    try:
        shards = sorted(set(read_index(index).values()))
    except ValueError as error:
        yield f"has an index that cannot be read: {shown} ({first_line(error)})"
        return
    for shard in shards:
        if Path(shard).name != shard or not (index.parent / shard).is_file():
            yield f"has no {printable(shard, 100)}, which {shown} names"


def _check_shard_names(folder: Path, files: Iterable[Path]) -> Iterator[str]:
    """Shards count themselves, so one that is missing is known without an index too."""
    found: dict[tuple[Path, str, str, str], set[int]] = {}
    for path in files:
        if match := NAMED_SHARD.match(path.name):
            found.setdefault((path.parent, match[1], match[3], match[4]), set()).add(int(match[2]))
    for (parent, stem, total, suffix), numbers in found.items():
        if (parent / f"{stem}{suffix}{INDEX_SUFFIX}").exists():
            continue
        shown = printable(str((parent / stem).relative_to(folder)), 100)
        missing = int(total) - len(numbers)
        if missing > 0:
            yield f"has only {len(numbers)} of {int(total)} shards {shown}-*{suffix}"
        elif stem in MODELS:
            yield f"has no {shown}{suffix}{INDEX_SUFFIX}, without which its shards are not found"


def _check_training_state(folder: Path) -> Iterator[str]:
    if is_interrupted(folder) and not (folder / SENTINEL).exists():
        there = (folder / TRAINER_STATE).exists()
        yield f"has {'a truncated' if there else 'no'} {TRAINER_STATE}, which is written last: the save was interrupted"
    if all(map(is_state_file, list_tensor_files(folder))):
        yield "has no weights"
    if any(path.is_dir() for path in folder.glob(ENGINE_FOLDER)):
        yield from _check_engine_folder(folder)
    parts = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER, "random": RANDOM_STATE}
    missing = [name for name, patterns in parts.items() if not has_any(folder, patterns)]
    if 0 < len(missing) < len(parts):
        yield f"has no {' and no '.join(missing)} state, but other training state"


def _check_engine_folder(folder: Path) -> Iterator[str]:
    """DeepSpeed loads the folder that the file `latest` names, and a shard for each rank; it writes `latest` last."""
    try:
        name = read_file(folder / "latest", MAX_NAME).decode(errors="replace").strip()
    except (OSError, ValueError):
        yield "has no file latest, which DeepSpeed writes last: the save was interrupted"
        return
    if Path(name).name != name or not (folder / name).is_dir():
        yield f"has no {printable(name, 100)}, which the file latest names"
        return
    if not has_any(folder / name, MODEL_STATES):
        yield f"has no model states in {name}"
    shards: dict[str, set[int]] = {}  # the ranks that have a file of each kind
    for path in (folder / name).iterdir():
        if match := SHARD.search(path.name):
            shards.setdefault(path.name.replace(match[0], "", 1), set()).add(int(match[1]))
    every = set(range(max((max(ranks) for ranks in shards.values()), default=-1) + 1))
    if missing := {rank for ranks in shards.values() for rank in every - ranks}:
        yield f"has not all shards of rank {min(missing)} in {name}"


def has_any(folder: Path, patterns: tuple[str, ...]) -> bool:
    """Returns whether a folder has a file of one of these names, or a folder with files."""
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return any(path.is_file() or next(path.glob("[!.]*"), None) is not None for path in found)


def has_optimizer(folder: Path) -> bool:
    return has_any(folder, OPTIMIZER)
