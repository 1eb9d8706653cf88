"""Ends vLLM's child processes when the process that started them is gone.

vLLM tells its children to stop when it is shut down, but not when the process that owns the engine is killed outright: the
engine core then waits for requests for ever. A replica must leave nothing behind, so each child watches its parent.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

from .shared_memory import mapped_segments, unlink

WATCH_ENV = "WEIGHTLANE_PARENT_WATCH"
"""Set by the rollout worker to its own process id; vLLM children inherit it. Without it nothing is watched."""

POLL_S = 0.5
_THREAD_NAME = "weightlane-parent-watch"


def watch_parent() -> bool:
    """Start watching if this is a child process of a rollout worker's engine; returns whether it is watched.

    Calling it again does nothing: vLLM loads plugins more than once.
    """
    owner = os.environ.get(WATCH_ENV, "")
    parent = multiprocessing.parent_process()
    if not owner or owner == str(os.getpid()) or parent is None or parent.pid is None:
        return False
    if all(thread.name != _THREAD_NAME for thread in threading.enumerate()):
        threading.Thread(target=_wait_for_orphanage, args=(parent.pid,), name=_THREAD_NAME, daemon=True).start()
    return True


def _wait_for_orphanage(parent_pid: int) -> None:
    # A polled parent id, not PR_SET_PDEATHSIG: that signal fires when the starting *thread* ends, and not pidfd: macOS.
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    unlink(mapped_segments())
    os._exit(1)  # The engine may hang in a collective that lost its peer: no clean-up may run here.
