"""`Fleet`: the replicas during a run: which are alive, which may get requests, which start, and which leave."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    QuarantinedError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
)
from weightlane.sync import Outcome, ReplicaState, SyncReport

from .protocols import LoopParts, Rollout, RolloutFigures


@dataclass(frozen=True, slots=True)
class FleetState:
    """The replicas of a run by name, and how many there are to be."""

    wanted: int
    """Replicas when everything that has begun has ended. Those that died and that nobody replaces count."""
    serving: Sequence[str]
    joining: Sequence[str]
    """Replicas that have started and get no requests: they have no version yet, or are out of service."""
    starting: Sequence[str]
    leaving: Sequence[str]
    """Replicas that get no new requests, and finish those they have."""
    missing: Sequence[str]
    """Replicas that died and that nobody replaces."""
    failed: str = ""
    """Why a replica could not start since the last `Fleet.scale`; empty if none failed."""

    def to_plain(self) -> dict[str, Any]:
        """This state as JSON-representable data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Start:
    """A replica that starts."""

    instead_of: str
    """The dead replica that it replaces; empty if the fleet grows."""
    since: float
    """Time of that death, or of the call of `Fleet.scale`."""


class Fleet:
    """Watches the replicas of a run, and changes their number.

    The death of a replica is tolerated while `LoopParts.quorum` of the replicas that count are left. Those that the run began
    with count, and those that have started since. One that left does not, and neither does one that its successor has replaced.
    A dead replica that nobody replaces counts until the next `scale`.

    With `LoopParts.start_replica`, a successor is started in the place of a dead replica, and further replicas by `scale`. Each
    is passed to `on_ready`. The coordinator decides when it may get requests: not before it has committed the serving version.

    With `LoopParts.follows_room`, somebody else calls `scale` as room comes and goes. Dead replicas then stop counting at once
    and have no successors, and `LoopParts.min_replicas` have to be left.

    Args:
        parts: The replicas, the coordinator, which knows their states, and how further replicas are started.
        on_ready: Called with the name of the dead replica, or an empty name, and the replica that has started.
        on_change: Called when a replica has died, or begins to leave.
        leave: Removes a replica from the coordinator, between two syncs.
    """

    def __init__(
        self,
        parts: LoopParts,
        *,
        on_ready: Callable[[str, Rollout], None],
        on_change: Callable[[], None],
        leave: Callable[[str], Awaitable[None]],
    ) -> None:
        self._living = {rollout.name: rollout for rollout in parts.rollouts}
        self._parts, self._syncer, self._hooks = parts, parts.syncer, parts.hooks
        self._replacements_left = parts.max_replacements
        self._on_ready, self._on_change, self._leave = on_ready, on_change, leave
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._doom: BaseException | None = None
        self._doomed = asyncio.Event()
        self._starting: dict[str, _Start] = {}
        self._joining: dict[str, _Start] = {}
        """The replicas that have started, and have not committed a version yet."""
        self._leaving: dict[str, str] = {}
        """The replicas that get no new requests, each with the error of its death; empty while it lives."""
        self._missing: list[str] = []
        self._dead: dict[str, Rollout] = {}
        """Dead replicas that may still hold resources."""
        self._in_flight: Counter[str] = Counter()
        """Groups that each replica generates."""
        self._idler = asyncio.Event()
        """Set when a group is no longer in flight."""
        self._failed = ""
        self._number = len(parts.rollouts)
        """The number in the name of the next replica."""
        self._versions: dict[str, int] = {}
        self.departed: list[RolloutFigures] = []
        """The totals of replicas that have left."""
        self.losses = 0
        """Replicas that died."""
        self.successions = 0
        """Successors that serve."""
        self.additions = 0
        """Further replicas that serve, or did."""
        self.departures = 0
        """Replicas that have left."""

    @property
    def living(self) -> list[Rollout]:
        """Every replica that is not known to be dead, and has not left."""
        return list(self._living.values())

    def lives(self, rollout: Rollout) -> bool:
        """Whether a replica is not known to be dead, and has not left."""
        return self._living.get(rollout.name) is rollout

    def stays(self, rollout: Rollout) -> bool:
        """Whether a replica lives, and is not about to leave."""
        return self.lives(rollout) and rollout.name not in self._leaving

    def serves(self, rollout: Rollout) -> bool:
        """Whether a replica's answers can be trusted: it has a version. It may get new requests if it also `stays`."""
        return self.lives(rollout) and self._syncer.states().get(rollout.name) is ReplicaState.SERVING

    def serving(self, version: int | None = None) -> list[Rollout]:
        """The replicas that may get requests and serve `version`, or any."""
        able = [rollout for rollout in self._staying if self.serves(rollout)]
        return [rollout for rollout in able if version is None or self._versions.get(rollout.name) == version]

    @contextmanager
    def using(self, rollout: Rollout) -> Iterator[None]:
        """Note that a replica generates a group inside the block. It does not leave before, within `LoopParts.drain_s`."""
        self._in_flight[rollout.name] += 1
        try:
            yield
        finally:
            self._in_flight[rollout.name] -= 1
            self._idler.set()

    def state(self) -> FleetState:
        """The present state."""
        serving = [rollout.name for rollout in self.serving()]
        growing = [start for start in self._starting.values() if not start.instead_of]
        return FleetState(
            wanted=self._counted + len(growing),
            serving=serving,
            joining=[name for name in self._living if name not in serving and name not in self._leaving],
            starting=list(self._starting),
            leaving=list(self._leaving),
            missing=list(self._missing),
            failed=self._failed,
        )

    @property
    def _counted(self) -> int:
        """The replicas of which `LoopParts.quorum` is a share."""
        replaced = [start for start in self._starting.values() if start.instead_of]
        return len(self._staying) + len(self._missing) + len(replaced)

    @property
    def _staying(self) -> list[Rollout]:
        return [rollout for rollout in self.living if self.stays(rollout)]

    @property
    def _needed(self) -> int:
        """Fewer replicas end the run."""
        if self._parts.follows_room:
            return self._parts.min_replicas
        # As the coordinator counts. The tolerance keeps a rounding error of the product from making 4 of 0.3 * 10.
        return max(1, math.ceil(self._parts.quorum * self._counted - 1e-9))

    async def watch(self) -> NoReturn:
        """Raise the `WorkerDiedError` of the replica whose death leaves too few."""
        for rollout in self.living:
            self._begin(self._follow(rollout), f"watch-{rollout.name}")
        try:
            await self._doomed.wait()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert self._doom is not None
        raise self._doom

    def scale(self, wanted: int) -> None:
        """Begin to change the number of replicas to `wanted`: start further ones, or let some leave; see `state`.

        Replicas that start go first, then those that get no requests, then the newest. Dead ones that nobody replaces stop
        counting. Raises `ConfigError` if the number cannot change in this run.
        """
        if wanted < 1:
            raise ConfigError(f"a run needs at least one replica, and not {wanted}.", part="fleet")
        if self._parts.start_replica is None:
            raise ConfigError(
                "the number of replicas cannot change in this run.",
                part="fleet",
                hint="With trainer.colocate, the replicas share the devices of the trainer ranks.",
            )
        self._failed = ""
        there = len(self._staying) + len(self._starting)
        for name in list(reversed(self._starting))[: max(0, there - wanted)]:
            self._tasks[f"start-{name}"].cancel()
            self._start_ended(name)
        staying = self._staying[::-1]
        staying.sort(key=self.serves)  # which is stable: those that do not serve go first, then the newest
        for rollout in staying[: max(0, len(staying) + len(self._starting) - wanted)]:
            self._leaving[rollout.name] = ""
            self._begin(self._drain(rollout), f"drain-{rollout.name}")
        for _ in range(wanted - there):
            name, self._number = f"rollout-{self._number}", self._number + 1
            self._begin_start(name, self._missing.pop(0) if self._missing else "")
        while self._missing:
            self._forget(self._missing.pop())
        self._on_change()

    def committed(self, report: SyncReport) -> None:
        """Record which replicas have committed the version of `report`."""
        for name, part in report.replicas.items():
            if part.outcome is not Outcome.COMMITTED:
                continue
            self._versions[name] = report.version
            if name in self._joining and name in self._living:
                start = self._joining.pop(name)
                self.successions += bool(start.instead_of)
                self.additions += not start.instead_of
                seconds = time.perf_counter() - start.since
                facts = {"instead_of": start.instead_of, "version": report.version, "seconds": seconds}
                self._hooks.replica_joined(replica=name, facts=facts)

    def excuses(self, rollout: Rollout, error: WeightlaneError) -> bool:
        """Whether a request failed because its replica died or left service, so that another can answer it. Records a death."""
        if isinstance(error, WorkerDiedError):
            self.lost(rollout, error)
            return True
        return isinstance(error, QuarantinedError) or (isinstance(error, ClosedError) and not self.serves(rollout))

    def lost(self, rollout: Rollout, error: WeightlaneError) -> None:
        """Record the death of a replica. Further reports of it are ignored, and so are those of one that has left."""
        if not self.lives(rollout):
            return
        name = rollout.name
        self._dead[name] = self._living.pop(name)
        self._joining.pop(name, None)
        self._syncer.participant_lost(error, replica=name)
        self._on_change()
        if name in self._leaving:  # it is not missed
            self._leaving[name] = str(error)
            return
        self.losses += 1
        self._missing.append(name)
        left, needed, successor = self._left, self._needed, ""
        if left < needed:
            self._end(error)
        elif self._parts.follows_room:
            self._missing.remove(name)
            self._forget(name)
        elif self._parts.start_replica is not None and self._replacements_left > 0:
            self._replacements_left -= 1
            self._missing.remove(name)
            successor = _next_name(name)
            self._begin_start(successor, name)
        facts = {"error": str(error), "left": left, "needed": needed, "successor": successor}
        self._hooks.replica_lost(replica=name, facts=facts)

    @property
    def _left(self) -> int:
        """The replicas that count and live."""
        states = self._syncer.states()
        return sum(states.get(rollout.name) is not ReplicaState.LOST for rollout in self._staying)

    async def _follow(self, rollout: Rollout) -> None:
        try:
            await rollout.watch()
        except WeightlaneError as error:
            self.lost(rollout, error)

    def _begin_start(self, name: str, instead_of: str) -> None:
        self._starting[name] = _Start(instead_of, time.perf_counter())
        self._begin(self._start(name, instead_of), f"start-{name}")

    async def _start(self, name: str, instead_of: str) -> None:
        assert self._parts.start_replica is not None
        try:
            await self._close_dead(instead_of)
            newcomer = await self._parts.start_replica(name)
        except Exception as error:  # noqa: BLE001 - the others are enough to go on
            self._start_ended(name)
            self._failed = f"{name} could not start: {as_weightlane_error(error, name)}"
            facts = {"error": f"it could not start: {as_weightlane_error(error, name)}", "successor": ""}
            self._hooks.replica_lost(replica=name, facts={**facts, "left": self._left, "needed": self._needed})
            return
        self._joining[name] = self._starting.pop(name)
        self._living[name] = newcomer
        self._begin(self._follow(newcomer), f"watch-{name}")
        self._on_ready(instead_of, newcomer)

    def _start_ended(self, name: str) -> None:
        """Note that a replica does not start after all."""
        instead_of = self._starting.pop(name).instead_of
        if instead_of and self._parts.follows_room:
            self._forget(instead_of)
        elif instead_of:
            self._missing.append(instead_of)

    def _forget(self, dead: str) -> None:
        """Stop counting a dead replica, here and in the coordinator."""

        async def forget() -> None:
            await self._leave(dead)
            await self._close_dead(dead)

        self._begin(forget(), f"forget-{dead}")

    async def _close_dead(self, name: str) -> None:
        """Close a dead replica, whose process may have outlived its engine and hold a GPU."""
        if (dead := self._dead.pop(name, None)) is not None:
            await dead.close()

    async def _drain(self, rollout: Rollout) -> None:
        """Let a replica finish its groups, then remove it from the run, and end it. Others generate what it has not finished."""
        name, began = rollout.name, time.perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._parts.drain_s):
                while self._in_flight[name]:
                    self._idler.clear()
                    await self._idler.wait()
        with suppress(WeightlaneError):  # of one that has died
            self.departed.append(await rollout.stats())
        await self._leave(name)
        handed_over = self._in_flight[name]
        self._living.pop(name, None)
        self._dead.pop(name, None)
        self._joining.pop(name, None)
        self._on_change()
        await rollout.close()
        self.departures += 1
        facts = {"seconds": time.perf_counter() - began, "handed_over": handed_over, "error": self._leaving.pop(name)}
        self._hooks.replica_left(replica=name, facts={**facts, "replicas": len(self._living)})

    def _begin(self, work: Awaitable[None], name: str) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - nobody else would hear of it
                self._end(error)

        task = asyncio.create_task(guarded(), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def _end(self, error: BaseException) -> None:
        self._doom = self._doom or error
        self._doomed.set()


def _next_name(name: str) -> str:
    """``rollout-0`` is followed by ``rollout-0.1``, that by ``rollout-0.2``."""
    place, _, number = name.partition(".")
    return f"{place}.{int(number or 0) + 1}"
