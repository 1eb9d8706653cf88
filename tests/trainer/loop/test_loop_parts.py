"""The loop's own rules, each on its own: staleness, overlap, what is published when, and the run's directory."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S, MovableClock

from weightlane.ckpt_engines import ConfigError, StorageError, SyncAbortedError
from weightlane.sync import Outcome, ReplicaReport, ReplicaState, SyncReport
from weightlane.trainer.loop.overlap import OverlapClock
from weightlane.trainer.loop.protocols import Newcomer
from weightlane.trainer.loop.staleness_budget import StalenessBudget
from weightlane.trainer.loop.summary import Quantiles
from weightlane.trainer.loop.version_keeper import VersionKeeper
from weightlane.trainer.run_files.observers import FailuresFile, MetricsFile, _what_counts
from weightlane.trainer.run_files.run_dir import RunDir

# -- staleness ----------------------------------------------------------------------------------------------------------


@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    first_version=st.integers(0, 3),
    syncs=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_no_group_the_budget_admits_is_too_stale_and_the_trainer_never_starves(
    max_staleness: int, groups_per_step: int, first_version: int, syncs: list[bool]
) -> None:
    """Groups are trained in the order in which they were admitted, and a sync may or may not end before the next step."""
    budget = StalenessBudget(max_staleness, groups_per_step, first_version)
    waiting: list[int] = []
    step = first_version
    for synced in syncs:
        while budget.room > 0:
            budget.admit()
            waiting.append(budget.committed)
        if len(waiting) >= groups_per_step:
            batch, waiting = waiting[:groups_per_step], waiting[groups_per_step:]
            assert not any(budget.is_too_stale(step, version) for version in batch)
            step += 1
        else:
            assert budget.committed < step, "only a sync that is behind may keep the trainer waiting"
        assert step - budget.committed <= max_staleness + 1
        if synced:
            budget.committed = step


def test_at_zero_staleness_a_step_of_groups_waits_for_the_step_before_or_takes_the_place_of_one_given_back() -> None:
    budget = StalenessBudget(0, 2)
    assert budget.room == 2
    budget.admit()
    budget.admit()
    assert budget.room == 0
    budget.give_back()
    assert budget.room == 1
    budget.admit()
    budget.committed = 1
    assert budget.room == 2
    assert budget.is_too_stale(2, 1)
    assert not budget.is_too_stale(1, 1)


# -- overlap ------------------------------------------------------------------------------------------------------------


def test_only_time_in_which_two_activities_are_busy_counts_as_overlap() -> None:
    now = MovableClock()
    clock = OverlapClock(now)
    now.advance(1.0)  # nothing: 1 s
    with pytest.raises(RuntimeError), clock.busy("training"):
        raise RuntimeError  # it is not busy any more
    with clock.busy("generation"):
        now.advance(2.0)  # generation alone: 2 s
        with clock.busy("generation"), clock.busy("training"):
            now.advance(4.0)  # both: 4 s
        now.advance(1.0)  # generation alone again
    assert clock.wall_s() == 8.0
    assert clock.share_together() == 4.0 / 8.0
    assert (clock.seconds("generation"), clock.seconds("training")) == (7.0, 4.0)


def test_a_restarted_clock_forgets_the_past_but_not_who_is_busy() -> None:
    now = MovableClock()
    clock = OverlapClock(now)
    assert clock.share_together() == 0.0
    with clock.busy("generation"):
        now.advance(5.0)
        clock.restart()
        with clock.busy("training"):
            now.advance(3.0)
    assert clock.share_together() == 1.0
    assert clock.seconds("generation") == 3.0


# -- publishing ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.version_keeper._CATCH_UP_S", 0.01)
    monkeypatch.setattr("weightlane.trainer.loop.version_keeper._PAUSE_S", 0.001)


NEWCOMER = cast("Newcomer", SimpleNamespace(name="rollout-0.1"))


class Kept:
    """A keeper, and its trainers and syncer: notes what is published; syncs end when and how the test says.

    `replicas` are in the state that the test says.
    """

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
async def test_an_aborted_version_is_offered_again_and_a_commit_clears_the_count_of_failures() -> None:
    kept = Kept(max_failures=1)
    for version in (1, 2):
        async with kept.keeper.between_steps(version):
            assert await kept.abort() == version
            assert await kept.commit() == version
        await kept.keeper.drain(version)
    assert (kept.commits, kept.aborts, kept.published) == ([1, 2], [1, 2], [1, 1, 2, 2])


@in_loop
async def test_one_abort_in_a_row_too_many_ends_the_run_at_the_next_step() -> None:
    kept = Kept(max_failures=1)

    async def step() -> None:
        async with kept.keeper.between_steps(1):
            for _ in range(2):
                await kept.abort()
            await kept.quiet()

    with pytest.raises(SyncAbortedError, match="the disk is full"):
        await step()
    assert (kept.commits, kept.aborts) == ([], [1, 1])
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
    version, end = await kept.begun()  # while the trainer is inside a step
    assert version == 3
    assert kept.calls == ["remove rollout-0", "add rollout-0.1"]
    end.set_result(None)
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
async def test_a_quarantined_replica_is_healed_by_the_version_that_serves_even_if_the_trainer_waits() -> None:
    kept = Kept()
    async with kept.keeper.between_steps(1):
        await kept.commit()
        await asyncio.sleep(0)
        kept.replicas |= {"rollout-1": ReplicaState.QUARANTINED, "rollout-2": ReplicaState.LOST}
        kept.keeper.catch_up()
        assert await kept.abort() == 1  # which is no failure of the run: somebody serves
        version, end = await kept.begun()
        assert version == 1
        kept.replicas.pop("rollout-2")
        end.set_result(None)
        await kept.quiet()
        await asyncio.sleep(
            0.1
        )  # the event loop calls timers in their order: one of the keeper's would have been called
        await kept.quiet()
    assert (kept.commits, kept.aborts, kept.keeper.times.aborted) == ([1, 1], [1], [])
    assert kept.syncs.empty(), "everybody has it: it is not sent once more"


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


@in_loop
async def test_draining_retries_the_last_version_until_it_serves_or_the_limit_is_reached() -> None:
    for max_failures in (0, 1):
        kept = Kept(max_failures)
        drain = asyncio.create_task(kept.keeper.drain(7))
        await kept.abort()
        if max_failures:
            await kept.commit()
            await drain
        else:
            with pytest.raises(SyncAbortedError, match="the disk is full"):
                await drain
        assert kept.commits == [7] * max_failures


@in_loop
async def test_the_trainer_is_blocked_for_publish_plus_the_first_fence_after_it() -> None:
    kept = Kept()
    kept.keeper.note_fence(9.0)  # before anything was published
    async with kept.keeper.between_steps(1):
        _, end = await kept.begun()
    kept.keeper.note_fence(0.5)
    kept.keeper.note_fence(0.0)  # a step later the snapshot is long done
    end.set_result(None)
    await kept.keeper.drain(1)
    assert kept.keeper.times.trainer_blocked_s() == [0.75]


@in_loop
async def test_the_blocking_way_waits_for_the_commit_and_passes_an_abort_on() -> None:
    kept = Kept(max_failures=5)
    publishing = asyncio.create_task(kept.keeper.publish_blocking(3))
    _, end = await kept.begun()
    assert not publishing.done()
    end.set_result(None)
    assert await publishing > 0.0
    assert (kept.commits, kept.keeper.times.committed) == ([3], [3])
    publishing = asyncio.create_task(kept.keeper.publish_blocking(4))
    await kept.abort()
    with pytest.raises(SyncAbortedError):
        await publishing


@in_loop
async def test_a_version_that_is_timed_counts_as_a_failure_when_it_is_aborted_and_no_more() -> None:
    kept = Kept(max_failures=1)
    timing = asyncio.create_task(kept.keeper.time_blocking(3))
    await kept.abort()
    assert await timing is None
    timing = asyncio.create_task(kept.keeper.time_blocking(3))
    await kept.abort()
    with pytest.raises(SyncAbortedError):
        await timing
    assert (kept.aborts, kept.keeper.times.aborted) == ([3, 3], [3, 3])


@in_loop
async def test_whoever_keeps_the_trainer_busy_can_wait_until_a_version_is_handed_over() -> None:
    kept = Kept()
    await asyncio.wait_for(kept.keeper.handed_over(7), HANG_S)  # nothing is under way
    async with kept.keeper.between_steps(1):
        _, end_of_1 = await kept.begun()
    async with kept.keeper.between_steps(2):
        waiting = asyncio.create_task(kept.keeper.handed_over(2))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done(), "version 1 is still on its way, and 2 behind it"
        end_of_1.set_result(None)
        await waiting
        assert kept.published == [1, 2]
        await kept.commit()
    await kept.keeper.drain(2)


# -- files --------------------------------------------------------------------------------------------------------------


def test_a_run_directory_keeps_the_two_newest_states_and_resumes_from_the_last(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run", resume=False)
    for step in (2, 4, 10):
        trainer = run_dir.begin_state(step)
        trainer.mkdir()
        (trainer / "shard").write_text(str(step))
        run_dir.finish_state(step, {"step": step})
    assert sorted(path.name for path in (tmp_path / "run" / "state").iterdir()) == ["latest.json", "step-10", "step-4"]
    for forgotten in (30, 40):  # of a run that went on from an older state, by hand
        run_dir.begin_state(forgotten).mkdir()
    run_dir.begin_state(10).mkdir()
    (run_dir.trainer_state(10) / "shard").write_text("10")
    run_dir.finish_state(10, {"step": 10})
    assert sorted(path.name for path in (tmp_path / "run" / "state").iterdir()) == ["latest.json", "step-10"]
    run_dir.begin_state(12).mkdir()
    again = RunDir(tmp_path / "run", resume=True)
    assert list(again.begin_state(12).parent.iterdir()) == [], "a half-written state is no state, and makes room"
    assert again.latest_step() == 10
    assert again.loop_state(10) == {"step": 10}
    assert (again.trainer_state(10) / "shard").read_text() == "10"


def test_a_run_that_could_not_start_does_not_use_its_directory_up(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunDir(path, resume=False).write_text("config.toml", "")
    (path / "logs").mkdir()
    RunDir(path, resume=False)
    (path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"holds files, but no saved state.*--set run\.dir="):
        RunDir(path, resume=False)
    with pytest.raises(ConfigError, match=r"holds files, but no saved state.*--set run\.dir="):
        RunDir(path, resume=True)


def test_a_directory_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        RunDir(tmp_path / "file", resume=False)
    with pytest.raises(ConfigError, match="Not a directory"):
        RunDir(tmp_path / "file" / "run", resume=False)
    run_dir = RunDir(tmp_path / "run", resume=False)
    (tmp_path / "run" / "state" / "latest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"latest\.json is damaged"):
        RunDir(tmp_path / "run", resume=True)
    with pytest.raises(StorageError, match="cannot write"):
        run_dir.write_json("nowhere/summary.json", {})
    assert not list(tmp_path.rglob("*.partial"))


def test_metrics_are_lines_of_json_that_survive_from_run_to_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).training_step(step=1, facts={"reward": 0.5})
    MetricsFile(path).version_aborted(version=2, facts={"error": "no\nroom"})
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["event"], first["step"], first["reward"]) == ("training_step", 1, 0.5)
    assert (second["event"], second["version"], second["error"]) == ("version_aborted", 2, "no\nroom")
    FailuresFile(path).item_failed(kind="reward", facts={"error": "no number", "count": 1})
    assert json.loads(path.read_text().splitlines()[2])["kind"] == "reward"
    with pytest.raises(StorageError, match="cannot write"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl").evaluated(step=0, facts={})


def test_curves_show_what_was_trained_and_not_what_was_lost_before_a_resume(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        file.run_started(facts={"step": start, "steps": 4})
        for step in steps:
            file.training_step(step=step, facts={"reward": 0.1 * start})
            file.version_committed(version=step, facts={"latency_s": 0.1})
    counted = _what_counts([json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()])
    steps = [(event["step"], event["reward"]) for event in counted if event["event"] == "training_step"]
    assert steps == [(1, 0.0), (2, 0.0), (3, 0.2), (4, 0.2)]
    assert [event["version"] for event in counted if event["event"] == "version_committed"] == [1, 2, 3, 4]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_quantiles_are_values_of_the_series_in_order(values: list[float]) -> None:
    quantiles = Quantiles.of(values)
    assert {quantiles.p50, quantiles.p95, quantiles.max} <= set(values)
    assert min(values) <= quantiles.p50 <= quantiles.p95 <= quantiles.max == max(values)
