"""`TokenClock`: measures, on the client's side, how long requests in flight wait for their next token during a commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_MOST_GAPS = 1000
"""Most versions whose gaps are kept: statistics have a copy of them."""


class TokenClock:
    """Arrival times of the tokens of all requests of one replica. All calls come from one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.tokens = 0
        self.recomputed_tokens = 0
        """Tokens that requests in flight prefilled again because of commits."""
        self.gaps_s: dict[int, float] = {}
        """Longest gap that spans the commit of each version; of the last `_MOST_GAPS` versions."""
        self.max_gap_s = 0.0
        """Longest gap that spans a commit, over all commits."""
        self._last: dict[str, float | None] = {}
        self._watched: dict[int, set[str]] = {}
        """The requests that have not resumed yet, for each version for which there are any. Every token looks at all of these."""
        self._committing: int | None = None
        """The version whose commit has begun and not ended. One that fails does not end."""
        self._changed = asyncio.Event()
        """Set when a request needs no further watching."""
        self._busy_since = 0.0
        self._busy_s = 0.0

    @property
    def in_flight(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self._last)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was in flight."""
        return self._busy_s + (self._now() - self._busy_since if self._last else 0.0)

    def begin(self, request_id: str) -> None:
        """Note that a request was accepted; it counts towards gaps from its first token on."""
        if not self._last:
            self._busy_since = self._now()
        self._last[request_id] = None

    def arrived(self, request_id: str, tokens: int) -> None:
        """Note that `tokens` more tokens of a request arrived together."""
        now, last = self._now(), self._last.get(request_id)
        self.tokens += tokens
        self._last[request_id] = now
        if last is not None:
            self._record_gap(request_id, now - last)

    def end(self, request_id: str) -> None:
        """Note that a request ended or failed."""
        self._last.pop(request_id, None)
        for watched in self._watched.values():
            watched.discard(request_id)
        self._drop_resumed()
        if not self._last:
            self._busy_s += self._now() - self._busy_since

    def commit_begins(self, version: int) -> int:
        """Watch every request that has tokens; returns the number of these requests."""
        if self._committing is not None:
            self._watched.pop(self._committing, None)
        self._committing = version
        self.gaps_s[version] = 0.0
        if len(self.gaps_s) > _MOST_GAPS:
            del self.gaps_s[next(iter(self.gaps_s))]
        self._watched[version] = {request_id for request_id, last in self._last.items() if last is not None}
        return len(self._watched[version])

    def commit_ends(self, version: int) -> None:
        """Note that generation resumed: `gaps_s` counts each watched request's gap when its next token arrives."""
        if version == self._committing:
            self._committing = None
        self._drop_resumed()

    async def gap_s(self, version: int, timeout_s: float) -> float:
        """The longest gap, over the watched requests, from before the commit of `version` to the first token after it.

        Must be called after `commit_ends`. Requests without a token within `timeout_s` seconds count with their gap so far, and
        stay watched: `gaps_s` gets the final figure.
        """
        end = self._now() + timeout_s
        while watched := self._watched.get(version):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, end - self._now()))
            except TimeoutError:
                now = self._now()
                waits = [now - last for request_id in watched if (last := self._last.get(request_id)) is not None]
                self._lengthen(version, max(waits, default=0.0))
                break
        return self.gaps_s.get(version, 0.0)

    def _record_gap(self, request_id: str, gap_s: float) -> None:
        # Tokens of the last step before the pause arrive after a commit has begun: only one after its end stops the watch.
        for version, watched in self._watched.items():
            if request_id in watched:
                self._lengthen(version, gap_s)
                if version != self._committing:
                    watched.discard(request_id)
        self._drop_resumed()

    def _lengthen(self, version: int, gap_s: float) -> None:
        self.gaps_s[version] = max(self.gaps_s.get(version, 0.0), gap_s)
        self.max_gap_s = max(self.max_gap_s, gap_s)

    def _drop_resumed(self) -> None:
        """Watch no longer for versions that all requests have resumed from."""
        for version in [each for each, watched in self._watched.items() if not watched and each != self._committing]:
            del self._watched[version]
            self._changed.set()
