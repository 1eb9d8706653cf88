"""CPU seconds of a run of the tests, by test file: of pytest's processes and of everything that they start.

`CpuTime` looks at the processes below this one once a second. What a worker of pytest-xdist has used since the last look
counts for the test that it runs, which its title names; what another process has used counts for the test that ran when it
started. The last second of a process that ends in between is missed by this, but not by `CpuTime.total_s`.
"""

from __future__ import annotations

import os
import re
import resource
import threading
from collections import Counter
from collections.abc import Mapping

POLL_S = 1.0
"""Seconds between two looks. A look costs a few ms of CPU time on a machine with 150 processes."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NO_TEST = "(pytest)"
"""Stands for a file where no test runs: pytest itself, and the first fork server."""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a Path takes as long as the rest
            return file.read()
    except OSError:
        return b""


class CpuTime:
    """Adds up CPU seconds by test file, in a thread, until `stop`."""

    def __init__(self) -> None:
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
        self._look()
        while not self._stopped.wait(POLL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        parents: dict[int, int] = {}
        found: dict[int, tuple[tuple[int, int], float]] = {}
        for entry in os.listdir("/proc"):  # noqa: PTH208 - every second
            if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
                fields = stat[stat.rindex(b")") + 2 :].split()
                pid = int(entry)
                parents[pid] = int(fields[1])
                found[pid] = (pid, int(fields[19])), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        titles = {pid: self._title(pid) for pid, parent in parents.items() if os.getpid() in {pid, parent}}
        for pid, (key, seconds) in found.items():
            test = titles.get(pid) or self._tests.get(key) or self._test_above(parents[pid], parents, found, titles)
            if test is not None:
                self.by_file[test] += seconds - self._seconds.get(key, 0.0)
                self._seconds[key] = seconds
                if test != _NO_TEST:
                    self._tests[key] = test

    def _test_above(
        self,
        ancestor: int,
        parents: Mapping[int, int],
        found: Mapping[int, tuple[tuple[int, int], float]],
        titles: Mapping[int, str | None],
    ) -> str | None:
        """The test that the nearest known ancestor runs, or was started for; None if the process is not of this run."""
        test: str | None = None
        while ancestor in found and test in {None, _NO_TEST}:
            test = titles.get(ancestor) or self._tests.get(found[ancestor][0]) or test
            ancestor = parents[ancestor]
        return test

    def _title(self, pid: int) -> str | None:
        """The test file that this process or a worker of pytest-xdist runs; None for another process."""
        if pid == os.getpid():
            return os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0] or _NO_TEST
        title = re.match(rb"\[pytest-xdist (?:running|idle)\] ?([^:\0]*)", _read(f"/proc/{pid}/cmdline"))
        return (title[1].decode() or _NO_TEST) if title else None
