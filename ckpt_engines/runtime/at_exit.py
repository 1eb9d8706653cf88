"""Closes what a program has left open when it ends, in whatever way that is.

A thread that waits in native code while the interpreter goes down aborts the process, and the program's own exit status is lost.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger(__name__)


class Closable(Protocol):
    """Has threads, or memory that outlives the process."""

    def close(self) -> None:
        """End them. Idempotent."""


_PATIENCE_S = 5.0
"""How long threads have to come out of native calls, all together, once everything is closed. A stuck one hurts nobody."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_opened: list[tuple[int, weakref.ref[Closable]]] = []
"""The process that opened each, in this order; what is open is kept by its own threads."""


def close_at_exit(opened: Closable) -> None:
    """Close `opened` when this process ends, before what was opened earlier; a process that is forked from it leaves it alone."""
    _opened[:] = [(process, each) for process, each in _opened if each() is not None]
    _opened.append((os.getpid(), weakref.ref(opened)))


def start_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a daemon thread that may be in a native call when the program ends."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    thread.start()
    _threads.add(thread)  # started: a process that is forked just now must not wait for one that never was
    return thread


@atexit.register
def _close_all() -> None:
    for process, each in reversed(_opened):
        opened = each()
        if opened is None or process != os.getpid():
            continue
        try:
            opened.close()
        except Exception as trouble:  # noqa: BLE001 - the others are to be closed, too
            _log.debug("could not be closed at exit: %s", trouble)
    end = time.monotonic() + _PATIENCE_S
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
