"""`VersionStoring`: commits versions in an engine that stores, on a thread of its own.

Storing may take long, and a store that hangs takes until its deadline. The publisher's control thread reads messages meanwhile.
A new session does not interrupt a commit either: the old session's link is closed afterwards.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from weightlane.ckpt_engines import Deadline, WeightlaneError
from weightlane.ckpt_engines.runtime.at_exit import start_thread

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
"""How long closing waits for commits; a longer one is interrupted, and readers do not find its version."""

Commit = Callable[[int, Deadline], None]
"""Commits a version by a deadline."""
_Task = tuple[int, Commit] | Callable[[], None]


class VersionStoring:
    """Commits the versions of one publisher, one after the other. Thread-safe; only `close` waits.

    Args:
        name: The publisher.
        deadline_s: Longest time for one commit, in seconds.
    """

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        """Commits, at most one, and what is to be called after the commits before it."""
        self._running = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def commit(self, version: int, commit: Commit) -> None:
        """Have `version` committed. One that still waits is left out: storing is slower than publishing."""
        with self._changed:
            waiting = next((task for task in self._tasks if isinstance(task, tuple)), None)
            if waiting is not None:
                self._tasks.remove(waiting)
            self._tasks.append((version, commit))
            if self._thread is None:
                self._thread = start_thread(f"weightlane-store-{self._name}", self._run)
            self._changed.notify_all()
        if waiting is not None:
            _log.warning(
                "%s: version %d served but is not stored: storing the one before takes longer than a version.",
                self._name,
                waiting[0],
            )

    def afterwards(self, close: Callable[[], None]) -> None:
        """Call `close`, which must not raise, after all commits that were asked for until now; at once if there are none."""
        with self._changed:
            if self._running or self._tasks:
                self._tasks.append(close)
                self._changed.notify_all()
                return
        close()

    def close(self) -> None:
        """Wait for commits, but not for long, and interrupt them then. Idempotent, never raises."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running and not self._tasks, _CLOSE_S)
            self._closed = True
            closing = [task for task in self._tasks if not isinstance(task, tuple)]
            self._tasks.clear()
            self._changed.notify_all()
        for close in closing:
            close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._tasks)
                if not self._tasks:
                    return
                task, self._running = self._tasks.popleft(), True
            if isinstance(task, tuple):
                self._commit(*task)
            else:
                task()

    def _commit(self, version: int, commit: Commit) -> None:
        try:
            commit(version, Deadline.after(self._deadline_s))
        except WeightlaneError as error:
            _log.warning(
                "%s: version %d serves but could not be committed in the store: %s", self._name, version, error
            )
        except Exception:  # noqa: BLE001 - without this thread nothing would ever be stored again
            _log.exception("%s: version %d serves but could not be committed in the store", self._name, version)
