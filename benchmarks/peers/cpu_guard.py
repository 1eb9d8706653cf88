"""How much CPU time others used meanwhile: a measurement beside somebody's build says nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CLEAN_SHARE = 0.05
_TICKS_OF_SLACK = 3
"""Clocks count in ticks of some milliseconds; a short round is off by that much."""


def busy_s() -> float:
    """CPU seconds spent on this machine, in user and system code and stolen by others, but not in interrupts."""
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = (
        int(word) for word in Path("/proc/stat").read_text().split(None, 9)[1:9]
    )
    return (user + nice + system + steal) / _TICKS_PER_S


def descendants(root: int) -> list[int]:
    """The live processes that `root` started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def family_s(root: int) -> dict[int, float]:
    """CPU seconds of `root` and each of its descendants, by process, with those of children that have ended."""
    used = {}
    for pid in [root, *descendants(root)]:
        if fields := _stat(pid):
            used[pid] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    return used


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on (proc(5), field 3); none when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class CpuGuard:
    """Measures, between `start` and `stop`, what processes outside this one's family used of the CPU."""

    def start(self) -> None:
        """The measured piece of work begins."""
        self._family = family_s(os.getpid())
        self._busy, self._began = busy_s(), time.monotonic()

    def stop(self) -> tuple[float, bool]:
        """It has ended: CPU seconds of others, and whether they are few enough for the measurement to count."""
        busy, wall = busy_s() - self._busy, time.monotonic() - self._began
        own = sum(used - self._family.get(pid, 0.0) for pid, used in family_s(os.getpid()).items())
        foreign = max(0.0, busy - own)
        slack = _TICKS_OF_SLACK / _TICKS_PER_S
        return foreign, foreign <= slack + _CLEAN_SHARE * wall * (os.cpu_count() or 1)


def wait_until_quiet(limit_s: float) -> bool:
    """Wait until the machine is nearly idle for a second, at most `limit_s`. Whether it became so."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        before = busy_s()
        time.sleep(1.0)
        if busy_s() - before < 0.05 * (os.cpu_count() or 1):
            return True
    return False
