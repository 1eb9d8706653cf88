"""The commits of one version on its replicas, from their beginning to what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any

from weightlane.ckpt_engines import CommitError, PeerLostError, QuarantinedError, WeightlaneError

from ..report import CommitOutcome, Outcome, ReplicaReport
from .roster import ReplicaState, RosterEntry

Result = CommitOutcome | WeightlaneError


class Commits:
    """The commits of one version on all replicas.

    A replica that takes it in place begins while it is still being sent: `begin` is called on the thread that sends then,
    everything else while nobody sends.

    Args:
        version: The version.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self._under_way: dict[str, tuple[RosterEntry, Future[Result]]] = {}
        self.reports: dict[str, ReplicaReport] = {}
        """One for each replica that has taken the version."""
        self.before: dict[str, int] = {}
        """The version that each of these served until then."""

    @property
    def members(self) -> list[RosterEntry]:
        """The replicas whose commits have begun and are not settled."""
        return [member for member, _ in self._under_way.values()]

    def begin(
        self,
        member: RosterEntry,
        commit: Coroutine[Any, Any, Result],
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[WeightlaneError], None] = lambda _: None,
    ) -> None:
        """Have `loop` run the commit of `member`, and call `failed` there if that is what it does."""

        def tell(ended: Future[Result]) -> None:
            if not ended.cancelled() and isinstance(error := ended.result(), WeightlaneError):
                failed(error)

        ended = asyncio.run_coroutine_threadsafe(commit, loop)
        self._under_way[member.name] = member, ended
        ended.add_done_callback(tell)

    async def wait(self, timeout_s: float) -> None:
        """Return when all that have begun have ended, in whatever way, or after so long. They go on if this is cancelled."""
        if futures := [asyncio.wrap_future(ended) for _, ended in self._under_way.values()]:
            await asyncio.wait(futures, timeout=timeout_s)

    async def end(self, settle: Callable[[RosterEntry, WeightlaneError], Awaitable[object]], patience_s: float) -> None:
        """Wait for all, and `settle` what becomes of those that failed; of those that have not ended by then, too."""
        await self.wait(patience_s)
        for name, (member, ended) in list(self._under_way.items()):
            if self._under_way.pop(name, None) is None:
                continue  # settled meanwhile, by whoever waits here, too
            if ended.cancel() or ended.cancelled():
                await settle(member, _interrupted(self._version, name))
                continue
            result = ended.result()
            if isinstance(result, WeightlaneError):
                await settle(member, result)
                continue
            self.before[name] = member.version
            member.state, member.version, member.error = ReplicaState.SERVING, self._version, None
            self.reports[name] = ReplicaReport(Outcome.COMMITTED, blocked_s=result.blocked_s)


def _interrupted(version: int, replica: str) -> QuarantinedError:
    return QuarantinedError(f"its commit of version {version} was interrupted.", part="coordinator", peer=replica)


def named_failure(version: int, failures: Mapping[str, WeightlaneError]) -> WeightlaneError:
    """The error of the only replica that failed in a commit, or one that lists all."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    named = "; ".join(f"{name}: {error}" for name, error in failures.items())
    return CommitError(
        f"version {version} was staged but not taken by {len(failures)} replicas: {named}.",
        part="coordinator",
        peer=", ".join(failures),
        hint="Each has its own log.",
    )


def not_there(name: str) -> WeightlaneError:
    """Why a replica has not taken a version that it was never asked to take."""
    return PeerLostError("it took no part: its subscribers have not joined yet.", part="coordinator", peer=name)
