"""An observer that notes when things happened to each version in its process, on the clock that all processes share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from weightlane.plugins import hookimpl


class Moments:
    """`time.monotonic` of what the hooks tell, by version."""

    def __init__(self) -> None:
        self._noted: dict[int, dict[str, float]] = {}

    def of(self, version: int) -> dict[str, float]:
        """What is known of `version`: ``snapshot_ended``, ``snapshot_s``, ``send_began``, ``send_ended``, ``staged``."""
        return dict(self._noted.get(version, {}))

    @hookimpl
    def snapshot_taken(self, version: int, facts: Mapping[str, Any]) -> None:
        """The sender's parameters may change."""
        self._note(version, snapshot_ended=time.monotonic(), snapshot_s=facts["seconds"])

    @hookimpl
    def bucket_sent(self, version: int, facts: Mapping[str, Any]) -> None:
        """The engine had a bucket for ``facts["seconds"]``."""
        now = time.monotonic()
        before = self._noted.get(version, {})
        self._note(version, send_began=before.get("send_began", now - facts["seconds"]), send_ended=now)

    @hookimpl
    def version_staged(self, version: int) -> None:
        """Everything has arrived here."""
        self._note(version, staged=time.monotonic())

    def _note(self, version: int, **moments: float) -> None:
        noted = self._noted.setdefault(version, {})
        noted.update(moments)
        for old in sorted(self._noted)[:-4]:  # nobody asks for them any more
            del self._noted[old]
