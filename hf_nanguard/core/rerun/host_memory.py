"""How much host memory is free for this process."""

import os
from pathlib import Path

MEMORY = Path("/proc/meminfo")
GROUP_LIMIT, GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def find_free_memory() -> int | None:
    """Returns how many bytes each of the processes of a launcher on this machine may use; `None` if that is not known."""
    free = _find_free()
    return None if free is None else free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _find_free() -> int | None:
    if not MEMORY.is_file():
        return None
    lines = MEMORY.read_text(encoding="ascii").splitlines()
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if available is None:
        return None
    free = int(available) * 1024
    if GROUP_LIMIT.is_file() and GROUP_USE.is_file():  # a container
        limit, used = GROUP_LIMIT.read_text(encoding="ascii").strip(), GROUP_USE.read_text(encoding="ascii")
        free = min(free, max(int(limit) - int(used), 0)) if limit.isdigit() else free
    return free
