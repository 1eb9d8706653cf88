"""Ends vLLM's child processes when the process that started them is gone.

vLLM stops its children when it is shut down, but not when the process that owns the engine is killed: the engine core then waits
for requests for ever. Each child therefore watches its parent.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

from ..contract.named_segments import mapped_segments, unlink

WATCH_ENV = "WEIGHTLANE_PARENT_WATCH"
"""Set by the local replica to its own process id; vLLM children inherit it. Without it nothing is watched."""

POLL_S = 0.5
"""Seconds between two looks at the parent's id: the memory of a killed replica is soon needed by the next one."""
_THREAD_NAME = "weightlane-parent-watch"


def watch_parent() -> bool:
    """Start to watch the parent if this is a child process of a local replica's engine; returns whether it is watched.

    A second call does nothing: vLLM loads plugins more than once.
    """
    owner = os.environ.get(WATCH_ENV, "")
    parent = multiprocessing.parent_process()
    if not owner or owner == str(os.getpid()) or parent is None or parent.pid is None:
        return False
    if all(thread.name != _THREAD_NAME for thread in threading.enumerate()):
        threading.Thread(target=_end_with, args=(parent.pid,), name=_THREAD_NAME, daemon=True).start()
    return True


def _end_with(parent_pid: int) -> None:
    # PR_SET_PDEATHSIG would fire when the parent's starting *thread* ends, and macOS has no pidfd.
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    unlink(mapped_segments())
    os._exit(1)  # The engine may hang in a collective that lost its peer: no clean-up may run here.
