"""The memory that this process holds, and the memory that it can still allocate before the kernel kills a process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

_CGROUPS = Path("/sys/fs/cgroup")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""The value that lets the kernel's peak of a process begin anew: see proc_pid_clear_refs(5)."""


class MemoryUse(NamedTuple):
    """Bytes of one process: on its accelerator, or else in the machine's memory."""

    held_bytes: int
    """On an accelerator the bytes that all processes together hold there."""
    peak_bytes: int
    """Most since the call before; on an accelerator of the bytes that torch had reserved in this process."""


def memory_use(device: torch.device) -> MemoryUse:
    """Return this process's memory on `device`, and let the peak begin anew."""
    if device.type != "cpu":
        from .devices import runtime_of  # noqa: PLC0415 - imports torch, without which this module can be used

        return MemoryUse(*runtime_of(device).memory_use())
    held, peak = _field(_STATUS, "VmRSS:", 1024) or 0, _field(_STATUS, "VmHWM:", 1024) or 0
    with contextlib.suppress(OSError):  # a kernel that refuses tells the peak of the whole life
        _RESET.write_text(_RESET_PEAK, encoding="ascii")
    return MemoryUse(held, peak)


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
            key, *values = line.split()
            if key == name:
                return int(values[0]) * unit_bytes
    except (OSError, ValueError, IndexError):
        pass
    return None
