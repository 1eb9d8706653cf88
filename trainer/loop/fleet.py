"""`Fleet`: the replicas during a run: which are alive, which may get requests, and which replace a dead one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from weightlane.ckpt_engines import ClosedError, QuarantinedError, WeightlaneError, WorkerDiedError, as_weightlane_error
from weightlane.sync import Outcome, ReplicaState, SyncReport

from .protocols import LoopParts, Rollout, StartReplacement


class Fleet:
    """Watches the replicas of a run.

    The death of a replica is tolerated while `LoopParts.quorum` of the replicas that the run began with are left. With
    `LoopParts.start_replacement`, a successor is started in its place and passed to `on_ready`. The coordinator decides when
    the successor may get requests: not before it has committed the serving version.

    Args:
        parts: The replicas, the coordinator, which knows their states, and how successors are started.
        on_ready: Called with the name of the dead replica and its successor.
        on_change: Called when a replica has died.
    """

    def __init__(
        self, parts: LoopParts, *, on_ready: Callable[[str, Rollout], None], on_change: Callable[[], None]
    ) -> None:
        self._living = {rollout.name: rollout for rollout in parts.rollouts}
        self._syncer, self._hooks, self._start_replacement = parts.syncer, parts.hooks, parts.start_replacement
        # As the coordinator counts. The tolerance keeps a rounding error of the product from making 4 of 0.3 * 10.
        self._needed = max(1, math.ceil(parts.quorum * len(parts.rollouts) - 1e-9))
        self._replacements_left = parts.max_replacements
        self._on_ready, self._on_change = on_ready, on_change
        self._tasks: set[asyncio.Task[None]] = set()
        self._doom: BaseException | None = None
        self._doomed = asyncio.Event()
        self._joining: dict[str, tuple[str, float]] = {}
        """The replica that each successor replaces, and the time of its death, by the successor's name."""
        self._versions: dict[str, int] = {}
        self.losses = 0
        """Replicas that died."""
        self.successions = 0
        """Successors that serve."""

    @property
    def living(self) -> list[Rollout]:
        """Every replica that is not known to be dead."""
        return list(self._living.values())

    def lives(self, rollout: Rollout) -> bool:
        """Whether a replica is not known to be dead."""
        return self._living.get(rollout.name) is rollout

    def serves(self, rollout: Rollout) -> bool:
        """Whether a replica may get requests."""
        return self.lives(rollout) and self._syncer.states().get(rollout.name) is ReplicaState.SERVING

    def serving(self, version: int | None = None) -> list[Rollout]:
        """The replicas that serve `version`, or any."""
        able = [rollout for rollout in self.living if self.serves(rollout)]
        return [rollout for rollout in able if version is None or self._versions.get(rollout.name) == version]

    async def watch(self) -> NoReturn:
        """Raise the `WorkerDiedError` of the replica whose death leaves too few."""
        for rollout in self.living:
            self._begin(self._follow(rollout), f"watch-{rollout.name}")
        try:
            await self._doomed.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._doom is not None
        raise self._doom

    def committed(self, report: SyncReport) -> None:
        """Record which replicas have committed the version of `report`."""
        for name, part in report.replicas.items():
            if part.outcome is not Outcome.COMMITTED:
                continue
            self._versions[name] = report.version
            if name in self._joining and name in self._living:
                dead, since = self._joining.pop(name)
                self.successions += 1
                facts = {"instead_of": dead, "version": report.version, "seconds": time.perf_counter() - since}
                self._hooks.replica_joined(replica=name, facts=facts)

    def excuses(self, rollout: Rollout, error: WeightlaneError) -> bool:
        """Whether a request failed because its replica died or left service, so that another can answer it. Records a death."""
        if isinstance(error, WorkerDiedError):
            self.lost(rollout, error)
            return True
        return isinstance(error, QuarantinedError) or (isinstance(error, ClosedError) and not self.serves(rollout))

    def lost(self, rollout: Rollout, error: WeightlaneError) -> None:
        """Record the death of a replica. Further reports of it are ignored."""
        if not self.lives(rollout):
            return
        name = rollout.name
        del self._living[name]
        self._joining.pop(name, None)
        self.losses += 1
        self._syncer.participant_lost(error, replica=name)
        states = self._syncer.states()
        left = [other for other in self._living if states.get(other) is not ReplicaState.LOST]
        successor = ""
        if len(left) < self._needed:
            self._end(error)
        elif self._start_replacement is not None and self._replacements_left > 0:
            self._replacements_left -= 1
            successor = _next_name(name)
            self._begin(self._replace(self._start_replacement, name, successor), f"start-{successor}")
        self._hooks.replica_lost(
            replica=name, facts={"error": str(error), "left": len(left), "needed": self._needed, "successor": successor}
        )
        self._on_change()

    async def _follow(self, rollout: Rollout) -> None:
        try:
            await rollout.watch()
        except WeightlaneError as error:
            self.lost(rollout, error)

    async def _replace(self, start_replacement: StartReplacement, name: str, successor: str) -> None:
        since = time.perf_counter()
        try:
            newcomer = await start_replacement(name, successor)
        except Exception as error:  # noqa: BLE001 - the others are enough to go on
            told = as_weightlane_error(error, successor)
            facts = {"error": f"it could not start: {told}", "left": len(self._living), "needed": self._needed}
            self._hooks.replica_lost(replica=successor, facts={**facts, "successor": ""})
            return
        self._joining[successor] = (name, since)
        self._living[successor] = newcomer
        self._begin(self._follow(newcomer), f"watch-{successor}")
        self._on_ready(name, newcomer)

    def _begin(self, work: Awaitable[None], name: str) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - nobody else would hear of it
                self._end(error)

        task = asyncio.create_task(guarded(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, error: BaseException) -> None:
        self._doom = self._doom or error
        self._doomed.set()


def _next_name(name: str) -> str:
    """``rollout-0`` is followed by ``rollout-0.1``, that by ``rollout-0.2``."""
    place, _, number = name.partition(".")
    return f"{place}.{int(number or 0) + 1}"
