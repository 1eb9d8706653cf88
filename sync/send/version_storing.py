"""`VersionStoring`: has an engine that stores mark versions as committed, on a thread of its own.

Storing may take long, and a store that hangs takes until its deadline. The publisher's control thread goes on reading messages
meanwhile, and a new session does not interrupt it: the engine's half of the old one is closed afterwards.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from weightlane.ckpt_engines import Deadline, WeightlaneError
from weightlane.ckpt_engines.runtime.at_exit import start_thread

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
"""How long closing waits for the newest version to be stored; what takes longer is interrupted, and the version is not found."""

Commit = Callable[[int, Deadline], None]
"""Marks a version as committed."""


class VersionStoring:
    """Stores the versions of one publisher. Every method may be called from any thread, and only `close` waits.

    Args:
        name: The publisher.
        deadline_s: How long storing one version may take, seconds.
    """

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name, self._deadline_s = name, deadline_s
        self._changed = threading.Condition()
        self._last = 0
        """Number of the newest commit that was asked for."""
        self._waiting: tuple[int, int, Commit] | None = None
        """Number, version and commit of the newest one, which is to be stored once the one before is."""
        self._running = 0
        """Number of the commit that is under way; 0 if none is."""
        self._closed = False
        self._afterwards: list[tuple[int, Callable[[], None]]] = []
        """What is to be called, and after which commits: those up to a number."""
        self._thread: threading.Thread | None = None

    def commit(self, version: int, commit: Commit) -> None:
        """Have `version` stored. One that still waits for its turn is left out: storing is slower than versions come."""
        with self._changed:
            self._last += 1
            left_out, self._waiting = self._waiting, (self._last, version, commit)
            if self._thread is None:
                self._thread = start_thread(f"weightlane-store-{self._name}", self._run)
            self._changed.notify_all()
        if left_out is not None:
            _log.warning(
                "%s: version %d served but is not stored: storing the one before takes longer than a version.",
                self._name,
                left_out[1],
            )

    def afterwards(self, close: Callable[[], None]) -> None:
        """Call `close`, which must not raise, when no commit is left that was asked for until now; at once if none is."""
        with self._changed:
            if not self._is_stored(self._last):
                self._afterwards.append((self._last, close))
                return
        close()

    def _is_stored(self, number: int) -> bool:
        """Whether no commit up to `number` is under way or waits."""
        waiting = self._waiting[0] if self._waiting is not None else number + 1
        return waiting > number and not 0 < self._running <= number

    def close(self) -> None:
        """Wait for what is being stored, but not for long, and interrupt it then. Idempotent, never raises."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running and self._waiting is None, _CLOSE_S)
            self._closed, self._waiting = True, None
            closing, self._afterwards = self._afterwards, []
            self._changed.notify_all()
        for _, close in closing:
            close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = 0
                closing = [close for number, close in self._afterwards if self._is_stored(number)]
                self._afterwards = [each for each in self._afterwards if not self._is_stored(each[0])]
                self._changed.notify_all()
            for close in closing:
                close()
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._waiting is None:
                    return
                (self._running, version, commit), self._waiting = self._waiting, None
            try:
                commit(version, Deadline.after(self._deadline_s))
            except WeightlaneError as error:
                _log.warning(
                    "%s: version %d serves but could not be marked as committed: %s", self._name, version, error
                )
            except Exception:  # noqa: BLE001 - without this thread nothing would ever be stored again
                _log.exception("%s: version %d serves but could not be marked as committed", self._name, version)
