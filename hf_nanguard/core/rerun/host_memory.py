"""How much host memory is free."""

import os
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/proc/meminfo")
# The limit of a container and how much of it is used, in both versions of cgroups.
GROUPS = Path("/sys/fs/cgroup")
CGROUPS = (
    (GROUPS / "memory.max", GROUPS / "memory.current"),
    (GROUPS / "memory/memory.limit_in_bytes", GROUPS / "memory/memory.usage_in_bytes"),
)


def find_free_memory() -> int | None:
    """Returns how many bytes are free on this machine, or in its container if these are fewer; `None` if that is not known."""
    try:
        lines = MEMORY.read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return None
    return max(min([free, *_free_in_cgroups()]), 0)


def find_free_share() -> int | None:
    """Returns how many of them each of the processes of a launcher on this machine may use."""
    free = find_free_memory()
    return None if free is None else free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _free_in_cgroups() -> Iterator[int]:
    for limit, used in CGROUPS:
        try:
            yield int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii"))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
