"""Measures a process's peak memory above a start value.

The measured memory (Linux, ``/proc/self/status``) is private memory (``RssAnon``) and, in the sender, shared segments
(``RssShmem``). A receiver that maps a sender's segment does not count it again. Files in the page cache do not count. On a GPU
the memory that torch has allocated is added; memory that an engine has from the driver itself (``cuda_ipc``) is not.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, runtime_of

_STATUS = Path("/proc/self/status")
_PERIOD_S = 0.005


class PeakMemory:
    """Measures from its construction until `stop`, every few milliseconds: do not use it while something is timed.

    Shared segments count if `shared`. The memory of the device of `runtime` counts in addition to the host's.
    """

    def __init__(self, *, shared: bool, runtime: DeviceRuntime | None = None) -> None:
        self._runtime = runtime or runtime_of(HOST)
        self._fields = ("RssAnon:", "RssShmem:") if shared else ("RssAnon:",)
        self._before = self._peak = self._now()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weightlane-bench-memory", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop measuring and return by how many bytes the peak was above the start value."""
        self._stopped.set()
        self._thread.join()
        return max(self._peak, self._now()) - self._before

    def _watch(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        total = self._runtime.allocated_bytes()
        with contextlib.suppress(OSError):
            for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith(self._fields):
                    total += int(line.split()[1]) * 1024
        return total
