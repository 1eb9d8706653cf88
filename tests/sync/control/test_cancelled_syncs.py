"""Syncs that are cancelled, and errors that nobody foresaw, end on every side, and the next sync begins."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from hop import Held
from hop_run import MakeRun, Run, expected, outcomes_of
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import DeadlineExceededError, QuarantinedError, SyncAbortedError, UntouchedError
from weightlane.sync import ReplicaState, SyncReport


async def cancelled(syncing: asyncio.Task[Any]) -> None:
    """Cancel a sync, and wait until it has ended."""
    syncing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await syncing


def everybody_heard(run: Run, version: int, says: str) -> None:
    for participant in run.participants():
        with pytest.raises(SyncAbortedError, match=says):
            participant.call("wait", version, HANG_S)


def test_a_sync_that_is_cancelled_while_it_is_sent_lets_the_next_one_begin_at_once(make_run: MakeRun) -> None:
    run = make_run(replicas=2)
    run.serve(1)

    async def cancel_then_sync() -> SyncReport:
        syncing = asyncio.create_task(run.coordinator.sync(2))  # which nobody publishes
        await asyncio.to_thread(wait_until, run.coordinator._turn.locked, "sync under way")
        following = asyncio.create_task(run.coordinator.sync(3))  # it waits for its turn
        await cancelled(syncing)
        await asyncio.to_thread(run.publish_next, 3)
        return await following

    report = asyncio.run(cancel_then_sync())
    assert outcomes_of(report) == {"rollout-0": "committed", "rollout-1": "committed"}
    assert run.live() == [expected(3)] * 2


@pytest.mark.parametrize("ends", [True, False])
def test_a_sync_that_is_cancelled_in_its_commit_is_taken_back_where_it_serves_and_ends_the_service_elsewhere(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    run = make_run(replicas=2)
    run.serve(1)
    run.publish_next(2)

    async def cancel_in_commit() -> None:
        ending, held = (replica.holds_commits() for replica in run.replicas)
        syncing = asyncio.create_task(run.coordinator.sync(2))
        for commit in (ending, held):
            await asyncio.wait_for(commit.begun.wait(), HANG_S)
        ending.go_on.set()
        if ends:
            asyncio.get_running_loop().call_soon(held.go_on.set)
        else:
            monkeypatch.setattr("weightlane.sync.control.coordinator.coordinator._CANCELLED_S", 3.0)
        await cancelled(syncing)

    asyncio.run(cancel_in_commit())
    states = run.coordinator.states()
    assert states["rollout-0"] is ReplicaState.SERVING
    assert run.rank(0).call("live_digest") == expected(1)
    assert states["rollout-1"] is (ReplicaState.SERVING if ends else ReplicaState.QUARANTINED)
    assert "was interrupted" in "".join(map(str, run.replicas[1].quarantined_by)) or ends
    everybody_heard(run, 2, "the sync of version 2 was cancelled")
    run.serve(3)


def test_a_sync_that_is_cancelled_when_every_commit_has_ended_counts(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(replicas=2)
    run.serve(1)
    run.publish_next(2)
    run.replicas[1].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-1")
    held = Held()
    monkeypatch.setattr(run.replicas[1], "quarantine", lambda _: held())

    async def cancel_at_the_end() -> None:
        syncing = asyncio.create_task(run.coordinator.sync(2))
        await asyncio.wait_for(held.begun.wait(), HANG_S)
        asyncio.get_running_loop().call_soon(held.go_on.set)
        await cancelled(syncing)

    asyncio.run(cancel_at_the_end())
    for participant in (*run.trainers, run.rank(0)):
        participant.call("wait", 2, HANG_S)
    assert run.rank(0).call("live_digest") == expected(2)
    run.serve(3)


def test_a_sync_waits_for_the_one_before_within_its_own_deadline_and_disturbs_it_not(make_run: MakeRun) -> None:
    run = make_run()
    run.serve(1)

    async def two_at_once() -> SyncReport:
        first = asyncio.create_task(run.coordinator.sync(2))
        await asyncio.to_thread(wait_until, run.coordinator._turn.locked, "sync under way")
        run.configure(deadline_s=0.2)
        with pytest.raises(SyncAbortedError, match="the sync before to end") as caught:
            await run.coordinator.sync(3)
        assert isinstance(caught.value.reason, DeadlineExceededError)
        await asyncio.to_thread(run.publish_next, 2)
        return await first

    assert outcomes_of(asyncio.run(two_at_once())) == {"rollout-0": "committed"}


def test_an_unforeseen_error_is_an_abort_on_every_side(make_run: MakeRun) -> None:
    run = make_run(replicas=2)
    run.serve(1)
    queue, session = run.coordinator._queue, run.coordinator._session
    for version, (owner, method, error) in enumerate(
        [
            (session, "ensure_connected", TimeoutError("of something else")),
            (session, "stream", KeyError("x")),
            (queue, "catch_up", OSError(28, "No space left")),
        ],
        start=2,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, Mock(side_effect=error))
            aborted = run.fails(version, f"unexpected {type(error).__name__}")
        assert repr(aborted.__cause__) == repr(error)
        everybody_heard(run, version, type(error).__name__)
        assert run.live() == [expected(1)] * 2
    run.serve(5)


def test_an_abort_that_comes_before_a_rank_has_published_is_what_it_hears(make_run: MakeRun) -> None:
    run = make_run(trainers=2)
    run.serve(1)
    run.configure(deadline_s=0.5)
    first, late = run.trainers
    for trainer in run.trainers:
        trainer.call("step", 2)
    first.call("publish", 2)
    run.aborts(2)
    late.call("publish", 2)
    with pytest.raises(SyncAbortedError, match="version 2 was aborted"):
        late.call("wait", 2, NEVER_S)
    run.configure()
    run.publish(2)  # once more, and both in time
    assert run.outcomes(2) == {"rollout-0": "committed"}
    for trainer in run.trainers:
        trainer.call("wait", 2, HANG_S)
    run.replicas[0].refuses_with = UntouchedError("not now.", part="rollout-0")
    run.fails(3, "not now")
    for version, early, other in ((4, first, late), (5, late, first)):
        run.step(version)  # and it is published as version 3, with other weights than before
        early.call("publish", 3)
        run.configure(deadline_s=0.5)
        run.aborts(3)  # one rank has published it again, and the other has not
        run.configure()
        other.call("publish", 3)
    run.sync(3)
    assert run.live() == [expected(5)]
