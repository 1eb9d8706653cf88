"""`Observed`: calls the observers of this process for one replica's commits and generations."""

from __future__ import annotations

import asyncio
import time

from weightlane.plugins import process_hooks
from weightlane.sync import CommitReport

from ..commit.token_clock import TokenClock
from ..contract.records import Completion

_GAP_WAIT_S = 0.5
"""Most seconds that the report of a commit waits for the next token of each request in flight."""


class Observed:
    """The observers of one replica, whose `clock` knows how long requests waited. All calls come from one event loop."""

    def __init__(self, replica: str, clock: TokenClock) -> None:
        self._replica, self._clock = replica, clock
        self._hooks = process_hooks()
        self._reports: set[asyncio.Task[None]] = set()
        """Reports of commits, which wait for tokens."""

    def generated(self, completion: Completion, prompt_tokens: int, seconds: float) -> None:
        """Report a completion; `seconds` is the time from its request to its last token."""
        self._hooks.generation_finished(
            facts={
                "replica": self._replica,
                "request": completion.request_id,
                "tokens": len(completion.token_ids),
                "prompt_tokens": prompt_tokens,
                "seconds": seconds,
                "version_min": min(completion.versions, default=0),
                "version_max": max(completion.versions, default=0),
                "finish_reason": completion.finish_reason,
            }
        )

    def committed(self, report: CommitReport, began: float) -> None:
        """Report a commit that began at `began` (``time.perf_counter``), once requests in flight have tokens again."""
        reporting = asyncio.create_task(self._report(report, began))
        self._reports.add(reporting)
        reporting.add_done_callback(self._reports.discard)

    async def drained(self) -> None:
        """Wait until the observers have been called for every commit."""
        await asyncio.gather(*self._reports, return_exceptions=True)

    async def _report(self, report: CommitReport, began: float) -> None:
        gap_s = await self._clock.gap_s(report.version, _GAP_WAIT_S)
        self._hooks.replica_committed(
            replica=self._replica,
            version=report.version,
            facts={
                "waited_s": report.waited_s,
                "blocked_s": report.blocked_s,
                "load_s": report.load_s,
                "in_flight": report.in_flight,
                "recomputed_tokens": report.recomputed_tokens,
                "max_token_gap_s": gap_s,
                "seconds": time.perf_counter() - began,
            },
        )
