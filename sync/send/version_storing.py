"""`VersionStoring`: commits versions in an engine that stores versions, on a thread of its own.

A commit in a store may take long; one that hangs takes until its deadline. On its own thread it blocks neither the publisher's
control thread, nor a new session: the old session's link is closed after the commit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

from weightlane.ckpt_engines import ClosedError, Deadline, WeightlaneError, as_weightlane_error
from weightlane.ckpt_engines.runtime.threads import DaemonThreads

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
"""How long `close` waits for commits, in seconds. A longer commit is interrupted, and readers do not find its version."""

Commit = Callable[[int, Deadline], None]
"""A function that commits a version by a deadline."""


class VersionStoring:
    """Commits the versions of one publisher, one after the other. Thread-safe; only `wait` and `close` wait."""

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._lock = threading.Lock()
        self._requested = threading.Condition(self._lock)
        """Notified of every request for a commit, of every version that is not stored, and when it is closed."""
        self._closed = False
        self._not_stored = -1
        """The newest version that serves and needs no commit."""
        self._threads = DaemonThreads(1, f"weightlane-store-{name}")
        self._newest: tuple[int, Future[None]] | None = None
        """The newest version, and its commit."""
        self._closing: dict[Future[None], Callable[[], None]] = {}
        """Calls of `afterwards` that wait for a commit."""

    def commit(self, version: int, commit: Commit) -> None:
        """Have `version` committed. It replaces a version whose commit has not begun: storing is slower than publishing."""
        with self._lock:
            if self._newest is not None and self._newest[1].cancel():
                _log.warning(
                    "%s: version %d served but is not stored: storing the one before takes longer than a version.",
                    self._name,
                    self._newest[0],
                )
            try:
                self._newest = version, self._threads.submit(self._commit, version, commit)
            except RuntimeError as error:  # after `close`, or when the interpreter ends
                _log.warning("%s: version %d serves but is not stored: %s", self._name, version, error)
            self._requested.notify_all()

    def skip(self, version: int) -> None:
        """Note that `version` serves and is not stored, so that nobody waits for it."""
        with self._requested:
            self._not_stored = max(self._not_stored, version)
            self._requested.notify_all()

    def wait(self, version: int, deadline: Deadline) -> None:
        """Wait until `version`, whose commit may not have been requested yet, is committed, or a later one in its place.

        Raises the error of the commit, `DeadlineExceededError` or `ClosedError`.
        """

        def requested() -> bool:
            newest = -1 if self._newest is None else self._newest[0]
            return self._closed or max(newest, self._not_stored) >= version

        while True:
            with self._requested:
                if not self._requested.wait_for(requested, deadline.remaining_s):
                    raise deadline.error(f"version {version} to serve", part=self._name)
                if self._newest is None or self._newest[0] < version:
                    if self._not_stored >= version:
                        return
                    raise ClosedError("it was closed before the version was stored.", part=self._name)
                commit = self._newest[1]
            wait([commit], deadline.remaining_s)
            if not commit.done():
                raise deadline.error(f"version {version} to be stored", part=self._name)
            if not commit.cancelled():
                commit.result()
                return
            if self._newest[1] is commit:  # no later version takes its place
                raise ClosedError("it was closed while a version was being stored.", part=self._name)

    def afterwards(self, close: Callable[[], None]) -> None:
        """Call `close`, which must not raise, after all commits requested so far; at once if there are none."""
        with self._lock, suppress(RuntimeError):
            self._closing = {future: waiting for future, waiting in self._closing.items() if not future.done()}
            if self._newest is not None and not self._newest[1].done():
                self._closing[self._threads.submit(close)] = close
                return
        close()

    def close(self) -> None:
        """Wait for commits for at most `_CLOSE_S` seconds, and drop those that have not begun. Idempotent, never raises."""
        with self._lock:
            self._closed = True
            self._requested.notify_all()
            if self._newest is not None:
                wait([self._newest[1], *self._closing], _CLOSE_S)
            self._threads.shutdown(cancel_futures=True)
            left = [close for future, close in self._closing.items() if future.cancelled()]
            self._closing.clear()
        for close in left:
            close()

    def _commit(self, version: int, commit: Commit) -> None:
        try:
            commit(version, Deadline.after(self._deadline_s))
        except WeightlaneError as error:
            _log.warning(
                "%s: version %d serves but could not be committed in the store: %s", self._name, version, error
            )
            raise
        except Exception as error:
            _log.exception("%s: version %d serves but could not be committed in the store", self._name, version)
            raise as_weightlane_error(error, self._name) from error
