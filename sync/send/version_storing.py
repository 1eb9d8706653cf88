"""`VersionStoring`: commits versions in an engine that stores versions, on a thread of its own.

A commit in a store may take long; one that hangs takes until its deadline. On its own thread it blocks neither the publisher's
control thread, nor a new session: the old session's link is closed after the commit.
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
"""How long `close` waits for commits, in seconds. A longer commit is interrupted, and readers do not find its version."""

Commit = Callable[[int, Deadline], None]
"""A function that commits a version by a deadline."""
_Task = tuple[int, Commit] | Callable[[], None]


class VersionStoring:
    """Commits the versions of one publisher, one after the other. Thread-safe; only `close` waits.

    Args:
        name: The publisher.
        deadline_s: Time limit for one commit, in seconds.
    """

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        """At most one commit that has not begun, and the calls of `afterwards`, in order."""
        self._running = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def commit(self, version: int, commit: Commit) -> None:
        """Have `version` committed. It replaces a version whose commit has not begun: storing is slower than publishing."""
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
        """Call `close`, which must not raise, after all commits requested so far; at once if there are none."""
        with self._changed:
            if self._running or self._tasks:
                self._tasks.append(close)
                self._changed.notify_all()
                return
        close()

    def close(self) -> None:
        """Wait for commits for at most `_CLOSE_S` seconds, and drop those that have not begun. Idempotent, never raises."""
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
