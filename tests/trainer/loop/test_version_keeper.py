"""The version keeper publishes the newest version, none during a step, and aborted ones again."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines import StorageError, SyncAbortedError
from weightlane.sync import Outcome, ReplicaReport, ReplicaState, SyncReport
from weightlane.trainer.loop.protocols import Newcomer
from weightlane.trainer.loop.version_keeper import VersionKeeper


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.version_keeper._CATCH_UP_S", 0.01)
    monkeypatch.setattr("weightlane.trainer.loop.version_keeper._PAUSE_S", 0.001)


NEWCOMER = cast("Newcomer", SimpleNamespace(name="rollout-0.1"))


class Kept:
    """A keeper, and its trainers and syncer: notes what is published; syncs end when and how the test says."""

    def __init__(self, max_failures: int = 0) -> None:
        self.published: list[int] = []
        self.syncs = asyncio.Queue[tuple[int, asyncio.Future[None]]]()
        self.replicas: dict[str, ReplicaState] = {"rollout-0": ReplicaState.SERVING}
        self.calls: list[str] = []
        self.commits: list[int] = []
        self.aborts: list[int] = []
        self.keeper = VersionKeeper(
            self,
            self,
            on_commit=self._committed,
            on_abort=lambda version, error: self.aborts.append(version),
            max_failures=max_failures,
        )

    async def publish(self, version: int) -> float:
        self.published.append(version)
        return 0.25

    async def sync(self, version: int) -> SyncReport:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.syncs.put_nowait((version, end))
        await end
        self.replicas = dict.fromkeys(self.replicas, ReplicaState.SERVING)
        return SyncReport(version, 1.0, 0, dict.fromkeys(self.replicas, ReplicaReport(Outcome.COMMITTED)))

    def states(self) -> Mapping[str, ReplicaState]:
        return self.replicas

    def add(self, replica: Newcomer) -> None:
        self.calls.append(f"add {replica.name}")
        self.replicas[replica.name] = ReplicaState.JOINING

    def remove(self, name: str) -> None:
        self.calls.append(f"remove {name}")
        del self.replicas[name]

    async def _committed(self, report: SyncReport) -> None:
        self.commits.append(report.version)

    async def quiet(self) -> None:
        """Wait until nothing is on its way."""
        while (task := self.keeper._task) is not None and not task.done():  # noqa: ASYNC110 - a later task may follow
            await asyncio.sleep(0.005)

    async def begun(self) -> tuple[int, asyncio.Future[None]]:
        """The next sync that begins, and what ends it."""
        return await asyncio.wait_for(self.syncs.get(), HANG_S)

    async def commit(self) -> int:
        """Let the next sync that begins end well; its version."""
        version, end = await self.begun()
        end.set_result(None)
        return version

    async def abort(self) -> int:
        """Let the next sync that begins fail; its version."""
        version, end = await self.begun()
        end.set_exception(SyncAbortedError.because(version, StorageError("the disk is full.", part="disk")))
        return version


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs an asynchronous test."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), HANG_S))

    return run


@in_loop
async def test_versions_finished_during_a_sync_are_skipped_for_the_newest() -> None:
    kept = Kept()
    async with kept.keeper.between_steps(1):
        version, end_of_1 = await kept.begun()
    assert version == 1
    for step in (2, 3):  # the trainer goes on; a sync under way is not waited for
        async with kept.keeper.between_steps(step):
            await asyncio.sleep(0)
    assert kept.published == [1]
    async with kept.keeper.between_steps(4):
        end_of_1.set_result(None)
        await kept.commit()
    await kept.keeper.drain(4)
    assert (kept.published, kept.commits) == ([1, 4], [1, 4])
    assert kept.keeper.times.committed == [1, 4]


@in_loop
async def test_nothing_is_published_while_a_step_may_be_changing_the_parameters() -> None:
    kept = Kept()
    async with kept.keeper.between_steps(1):
        _, end = await kept.begun()
    end.set_result(None)  # the sync ends while the trainer is inside step 2
    await kept.quiet()
    assert (kept.commits, kept.published) == ([1], [1])
    async with kept.keeper.between_steps(2):
        assert await kept.commit() == 2
    await kept.keeper.drain(2)
    assert kept.commits == [1, 2]


@in_loop
async def test_an_aborted_version_is_offered_again_and_one_abort_in_a_row_too_many_ends_the_run_at_the_next_step() -> (
    None
):
    kept = Kept(max_failures=1)
    for version in (1, 2):  # a commit clears the count of failures
        async with kept.keeper.between_steps(version):
            assert await kept.abort() == version
            assert await kept.commit() == version
        await kept.keeper.drain(version)
    assert (kept.commits, kept.aborts, kept.published) == ([1, 2], [1, 2], [1, 1, 2, 2])

    async def step() -> None:
        async with kept.keeper.between_steps(3):
            for _ in range(2):
                await kept.abort()
            await kept.quiet()

    with pytest.raises(SyncAbortedError, match="the disk is full"):
        await step()
    assert (kept.commits, kept.aborts) == ([1, 2], [1, 2, 3, 3])
    with pytest.raises(SyncAbortedError):
        kept.keeper.raise_if_failed()
    with pytest.raises(SyncAbortedError, match="the disk is full"):  # who waits for groups learns it, too
        await kept.keeper.watch()


@in_loop
async def test_a_replica_that_joins_is_sent_the_version_that_serves_when_no_newer_one_is_due() -> None:
    kept = Kept()
    publishing = asyncio.create_task(kept.keeper.publish_blocking(3))
    await kept.commit()
    await publishing
    kept.keeper.join("rollout-0", NEWCOMER)
    assert await kept.commit() == 3  # while the trainer is inside a step
    assert kept.calls == ["remove rollout-0", "add rollout-0.1"]
    await kept.quiet()
    assert kept.published == [3], "nothing was published for it"
    assert kept.commits == [3, 3]
    assert kept.keeper.times.committed == [3], "but once"


@in_loop
async def test_a_replica_that_joins_during_a_sync_is_added_after_it_and_takes_the_next_version() -> None:
    kept = Kept()
    async with kept.keeper.between_steps(1):
        _, end_of_1 = await kept.begun()
        kept.keeper.join("rollout-0", NEWCOMER)
        await asyncio.sleep(0)
        assert kept.calls == []
    async with kept.keeper.between_steps(2):
        end_of_1.set_result(None)
        assert await kept.commit() == 2
        assert kept.calls == ["remove rollout-0", "add rollout-0.1"]
    await kept.keeper.drain(2)
    assert kept.commits == [1, 2]


@in_loop
async def test_a_quarantined_replica_is_healed_once_by_the_version_that_serves_even_if_the_trainer_waits() -> None:
    kept = Kept()
    async with kept.keeper.between_steps(1):
        await kept.commit()
        await asyncio.sleep(0)
        kept.replicas |= {"rollout-1": ReplicaState.QUARANTINED, "rollout-2": ReplicaState.LOST}
        kept.keeper.catch_up()
        assert await kept.abort() == 1  # which is no failure of the run: somebody serves
        version, end = await kept.begun()
        kept.replicas.pop("rollout-2")
        end.set_result(None)
        await kept.quiet()
    async with kept.keeper.between_steps(2):
        assert (version, await kept.commit()) == (1, 2), "everybody has version 1: it is not sent once more"
    await kept.keeper.drain(2)
    assert (kept.commits, kept.aborts, kept.keeper.times.aborted) == ([1, 1, 2], [1], [])


@in_loop
async def test_when_nobody_serves_and_nobody_can_be_healed_the_run_ends() -> None:
    kept = Kept(max_failures=1)
    async with kept.keeper.between_steps(1):
        await kept.commit()
    await kept.quiet()
    kept.replicas = {"rollout-0": ReplicaState.QUARANTINED}
    watching = asyncio.create_task(kept.keeper.watch())
    kept.keeper.catch_up()
    await kept.abort()
    await kept.abort()
    with pytest.raises(SyncAbortedError, match="the disk is full"):
        await watching
