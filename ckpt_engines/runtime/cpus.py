"""`usable_cpus`: how many cores this process may use, also in a container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup") / "cpu.max"
"""A container's share of the cores (cgroups, version 2): microseconds per period or ``max``, and the period in microseconds."""


def usable_cpus() -> int:
    """Return how many cores this process may use: those it is bound to, or its container's quota if that is less, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no quota: there is no such file, or its first word is "max"
        quota, period = map(int, CPU_QUOTA.read_text(encoding="ascii").split())
        return min(cores, max(1, -(-quota // period)))
    return cores
