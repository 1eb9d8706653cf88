"""CPU seconds of a run of the tests, by test file: of pytest's processes and of everything that they start.

`CpuTime` looks at the processes below this one four times a second. What a worker of pytest-xdist has used since the last look
counts for the test that it runs, which its title names; what another process has used counts for the test that ran when it
started. The last quarter of a second of a process that ends in between is missed by this, but not by `CpuTime.total_s`.
"""

from __future__ import annotations

import os
import re
import resource
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.25
"""Seconds between two looks. A look costs about 3 ms of CPU time on a machine with 150 processes."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


class CpuTime:
    """Adds up CPU seconds by test file, in a thread, until `stop`.

    Args:
        current_test: Returns the test that this process runs, which matters without pytest-xdist.
    """

    def __init__(self, current_test: Callable[[], str]) -> None:
        self._current_test = current_test
        self._seconds: dict[tuple[int, int], float] = {}
        self._tests: dict[tuple[int, int], str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-time", daemon=True)
        self.by_file: Counter[str] = Counter()
        self._thread.start()

    @property
    def total_s(self) -> float:
        """User and system time of this process and of all that have ended below it and were waited for."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    def stop(self) -> None:
        """Look a last time."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        parents: dict[int, int] = {}
        found: dict[int, tuple[tuple[int, int], float]] = {}
        for entry in os.listdir("/proc"):  # noqa: PTH208 - four times a second
            if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
                fields = stat[stat.rindex(b")") + 2 :].split()
                pid = int(entry)
                parents[pid] = int(fields[1])
                found[pid] = (pid, int(fields[19])), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        for pid, (key, seconds) in found.items():
            title = self._title(pid)
            if title is None and key not in self._tests:
                ancestor, test = parents[pid], None
                while test is None and ancestor in found:
                    test = self._title(ancestor) or self._tests.get(found[ancestor][0])
                    ancestor = parents[ancestor]
                if test is None:
                    continue  # not of this run
                self._tests[key] = test
            self.by_file[title or self._tests[key]] += seconds - self._seconds.get(key, 0.0)
            self._seconds[key] = seconds

    def _title(self, pid: int) -> str | None:
        """The test file of one of pytest's own processes; None for every other process."""
        if pid == os.getpid():
            return self._current_test().partition("::")[0] or "(pytest)"
        title = re.match(rb"\[pytest-xdist (?:running|idle)\] ?([^:\0]*)", _read(f"/proc/{pid}/cmdline"))
        return (title[1].decode() or "(pytest)") if title else None
