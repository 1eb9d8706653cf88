"""Commits that begin while their version is still being sent: those of replicas that take it in place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from weightlane.ckpt_engines import WeightlaneError

from .report import CommitOutcome, Outcome, ReplicaReport
from .roster import Member, ReplicaState

Result = CommitOutcome | WeightlaneError


class EarlyCommits:
    """Those of one version. `begin` is called on the thread that sends it, everything else while nobody sends.

    Args:
        version: The version.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._under_way: dict[str, tuple[Member, Future[Result]]] = {}
        self.reports: dict[str, ReplicaReport] = {}
        """Of replicas that had the version before an attempt failed for others."""
        self.before: dict[str, int] = {}
        """What these served until then."""

    @property
    def members(self) -> list[Member]:
        """Whose commits are under way."""
        return [member for member, _ in self._under_way.values()]

    def begin(
        self,
        member: Member,
        commit: Coroutine[Any, Any, Result],
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[WeightlaneError], None],
    ) -> None:
        """Have `loop` run the commit of `member`, and call `failed` there if that is what it does."""

        def tell(ended: Future[Result]) -> None:
            if not ended.cancelled() and isinstance(error := ended.result(), WeightlaneError):
                failed(error)

        ended = asyncio.run_coroutine_threadsafe(commit, loop)
        self._under_way[member.name] = member, ended
        ended.add_done_callback(tell)

    def pop(self, member: Member) -> Future[Result] | None:
        """The commit of `member`, for the caller to wait for; None if it has not begun."""
        _, ended = self._under_way.pop(member.name, (member, None))
        return ended

    async def end(self, settle: Callable[[Member, WeightlaneError], Awaitable[object]]) -> None:
        """Wait for all that are under way, which have no more to wait for, and `settle` what becomes of those that failed."""
        for member in self.members:
            ended = self.pop(member)
            assert ended is not None, "it is under way"
            result = await asyncio.wrap_future(ended)
            if isinstance(result, WeightlaneError):
                await settle(member, result)
                continue
            self.before[member.name] = member.version
            member.state, member.version, member.error = ReplicaState.SERVING, self._version, None
            self.reports[member.name] = ReplicaReport(Outcome.COMMITTED, blocked_s=result.blocked_s)
