"""`VersionOutcomes`: the outcomes of versions, for threads of a participant that wait for them."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from typing import Any

from weightlane.ckpt_engines import ConfigError, Deadline, WeightlaneError


def checked_version(version: Any, part: str) -> int:
    """Convert `version`, which may be a NumPy integer, to int. Raises `ConfigError` unless it is an integer from 0 on."""
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if number < 0 or isinstance(version, bool):
        raise ConfigError(
            f"a version is a whole number from 0, not {version!r}.",
            part=part,
            hint="The number of the optimizer step will do.",
        )
    return number


class VersionOutcomes:
    """The outcomes of versions, as reported by the coordinator. Keeps the newest commit and later failures. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._committed = -1
        self._begun: Counter[int] = Counter()
        """Number of attempts at each version that were begun here."""
        self._verdicts: Counter[int] = Counter()
        """Number of aborts of each version by the coordinator."""
        self._failed: dict[int, WeightlaneError] = {}
        self._closed: WeightlaneError | None = None

    def begin(self, version: int, *, told: bool = False) -> None:
        """Note that an attempt at `version` begins, and forget the failure of an earlier attempt.

        A failure of the same attempt is kept: the coordinator may abort it before a slow participant has begun it. With `told`, a
        message of the coordinator begins the attempt. Its abort is a later message, so any failure is of an earlier attempt.
        """
        with self._changed:
            self._begun[version] += 1
            if told or self._verdicts[version] < self._begun[version]:
                self._failed.pop(version, None)

    def succeed(self, version: int) -> None:
        """Note that `version` serves."""
        with self._changed:
            self._committed = max(self._committed, version)
            self._failed = {newer: error for newer, error in self._failed.items() if newer > version}
            for counts in (self._begun, self._verdicts):
                for old in [each for each in counts if each <= version]:
                    del counts[old]
            self._changed.notify_all()

    def fail(self, version: int, error: WeightlaneError) -> None:
        """Note that `version` was aborted."""
        with self._changed:
            self._verdicts[version] += 1
            self._failed[version] = error
            self._changed.notify_all()

    def fail_all(self, error: WeightlaneError) -> None:
        """Note that no version can be committed any more, because of `error`."""
        with self._changed:
            self._closed = self._closed or error
            self._changed.notify_all()

    def failure(self, version: int) -> WeightlaneError | None:
        """Why `version` failed, or why no version can be committed any more; None otherwise."""
        with self._changed:
            return self._failed.get(version) or self._closed

    def wait(self, version: int, deadline: Deadline, part: str) -> None:
        """Wait until `version`, or a later one, serves. Raises its failure, or `DeadlineExceededError`."""

        def ended() -> bool:
            return self._committed >= version or version in self._failed or self._closed is not None

        with self._changed:
            self._changed.wait_for(ended, deadline.remaining_s)
            if self._committed >= version:
                return
            if failure := self._failed.get(version) or self._closed:
                raise failure
        raise deadline.error(f"version {version} to be committed", part=part)
