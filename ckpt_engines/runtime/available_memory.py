"""The memory that a process can still allocate before the kernel kills a process for lack of memory."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes of RAM still available on the machine, or in the container if it has less; None when unknown.

    Page cache that can be dropped counts as available, on the machine as in the container.
    """
    of_machine = _field(meminfo, "MemAvailable:", 1024)
    known = [nbytes for nbytes in (of_machine, _of_container(cgroups)) if nbytes is not None]
    return min(known, default=None)


def _of_container(cgroups: Path) -> int | None:
    """Return the bytes available in the cgroup v2 that a container sees as its root. Groups inside it are not considered."""
    limit, used = _number(cgroups / "memory.max"), _number(cgroups / "memory.current")
    if limit is None or used is None:
        return None
    droppable = _field(cgroups / "memory.stat", "inactive_file", 1) or 0
    return max(0, limit - used + droppable)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _field(path: Path, name: str, unit_bytes: int) -> int | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            key, value, *_ = line.split()
            if key == name:
                return int(value) * unit_bytes
    except (OSError, ValueError):
        pass
    return None
