"""An observer that records when events of each version happened in its process, on the clock that all processes share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from weightlane.plugins import hookimpl

_KEPT_VERSIONS = 4
"""Nobody reads older versions; two may be in progress."""


class Moments:
    """Records `time.monotonic` of the hooks' events by version."""

    def __init__(self) -> None:
        self._recorded: dict[int, dict[str, float]] = {}

    def of(self, version: int) -> dict[str, float]:
        """Return the moments of `version`: ``snapshot_ended``, ``snapshot_s``, ``send_started``, ``send_ended``, ``staged``."""
        return dict(self._recorded.get(version, {}))

    @hookimpl
    def snapshot_taken(self, version: int, facts: Mapping[str, Any]) -> None:
        """Record that the sender's parameters may change."""
        self._record(version, snapshot_ended=time.monotonic(), snapshot_s=facts["seconds"])

    @hookimpl
    def bucket_sent(self, version: int, facts: Mapping[str, Any]) -> None:
        """Record when the engine sent a bucket, which took ``facts["seconds"]``."""
        now = time.monotonic()
        before = self._recorded.get(version, {})
        self._record(version, send_started=before.get("send_started", now - facts["seconds"]), send_ended=now)

    @hookimpl
    def version_staged(self, version: int) -> None:
        """Record that the version is complete in this receiver."""
        self._record(version, staged=time.monotonic())

    def _record(self, version: int, **moments: float) -> None:
        self._recorded.setdefault(version, {}).update(moments)
        for old in sorted(self._recorded)[:-_KEPT_VERSIONS]:
            self._recorded.pop(old, None)  # another thread may have done so
