"""Objects that are closed when the program ends without having closed them.

A thread that is in native code while the interpreter shuts down aborts the process, and the program's exit status is lost.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_log = logging.getLogger(__name__)


class Closable(Protocol):
    """An object with threads, or with memory that outlives the process."""

    def close(self) -> None:
        """End the threads and free the memory. Idempotent."""


_PATIENCE_S = 5.0
"""Longest wait, in seconds, for all threads to end once every object is closed. A thread that is stuck does no harm."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_opened: list[tuple[int, weakref.ref[Closable]]] = []
"""Process id and object, in the order of opening. The references are weak: an open object is kept alive by its own threads."""


def close_at_exit(opened: Closable) -> None:
    """Close `opened` when this process ends, before objects that were opened earlier. A forked process does not close it."""
    _opened.append((os.getpid(), weakref.ref(opened)))
    for gone in [entry for entry in _opened if entry[1]() is None]:
        with suppress(ValueError):  # one by one: a new list would lose what another thread appends meanwhile
            _opened.remove(gone)


def start_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a daemon thread that may be in a native call when the program ends."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    thread.start()
    _threads.add(thread)  # after its start: a process that is forked before then must not wait for it
    return thread


@atexit.register
def _close_all() -> None:
    for process, each in reversed(_opened):
        opened = each()
        if opened is None or process != os.getpid():
            continue
        try:
            opened.close()
        except Exception as trouble:  # noqa: BLE001 - the other objects are to be closed, too
            _log.debug("an object could not be closed at exit: %s", trouble)
    end = time.monotonic() + _PATIENCE_S
    for thread in [each for each in threading.enumerate() if each in _threads]:  # a thread may start another meanwhile
        thread.join(max(0.0, end - time.monotonic()))
