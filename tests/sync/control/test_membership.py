"""Replicas and trainers come, go, freeze, die and return; whoever is well is not stopped, and nobody serves a wrong weight."""

from __future__ import annotations

import asyncio
import threading
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hop_run import MakeRun, Replica, Run, expected, outcomes_of
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    ManifestError,
    PeerLostError,
    QuarantinedError,
    QuorumError,
    StorageError,
    SyncAbortedError,
    Topology,
    UntouchedError,
    WeightlaneError,
)
from weightlane.sync import Expectation, Rendezvous, ReplicaState, Subscriber, SyncReport
from weightlane.sync.control.hub.frames import COORDINATOR
from weightlane.sync.control.inbox import Inbox
from weightlane.sync.control.messages import Connect, Hello, Joined, Reset
from weightlane.sync.control.version_outcomes import VersionOutcomes

every_engine = pytest.mark.parametrize("backend", ["gloo", "shm", "filesystem"])


@every_engine
def test_a_replica_that_is_killed_or_a_trainer_that_is_started_anew_does_not_stop_the_others(
    make_run: MakeRun, backend: str
) -> None:
    run = make_run(backend, replicas=2)
    run.serve(1)
    run.lose_replica(1)
    for version in (2, 3, 4):
        if version == 4:
            run.restart_trainer()
        run.publish_next(version)
        report = run.sync(version)
        assert outcomes_of(report) == {"rollout-0": "committed", "rollout-1": "lost"}
        assert "its process was killed" in str(report.replicas["rollout-1"].error)
        assert run.coordinator.states()["rollout-1"] is ReplicaState.LOST
        assert run.rank(0).call("live_digest") == expected(version)


@every_engine
def test_a_replica_that_freezes_is_left_behind_and_gets_the_next_version_when_it_wakes(
    make_run: MakeRun, backend: str
) -> None:
    run = make_run(backend, replicas=2)
    run.serve(1)
    run.configure(deadline_s=NEVER_S)
    with run.rank(1).frozen(), run.deadlines_pass(lambda names: names == ["rollout-1/0"]):
        run.publish_next(2)
        outcomes = run.outcomes(2)
    assert outcomes == {"rollout-0": "committed", "rollout-1": "lost"}
    assert run.rank(1).call("live_digest") == expected(1)
    run.nobody_is_lost()
    run.serve(3)


@pytest.mark.parametrize("backend", ["shm", "filesystem"])
def test_one_that_joins_late_gets_the_current_version_unless_it_refuses_and_the_others_do_not_notice(
    make_run: MakeRun, backend: str
) -> None:
    run = make_run(backend, trainers=2)
    run.serve(1)
    run.add_replica()
    run.add_replica(shapes={"head": [40, 24]})
    assert [*run.coordinator.states().values()] == [ReplicaState.SERVING, ReplicaState.JOINING, ReplicaState.JOINING]
    run.step(100)  # the trainer goes on meanwhile
    report = run.sync(1)
    assert outcomes_of(report) == {"rollout-1": "committed", "rollout-2": "behind"}
    assert isinstance(report.replicas["rollout-2"].error, ManifestError)
    assert "head has shape [41, 24], expected [40, 24]" in str(report.replicas["rollout-2"].error)
    with pytest.raises(SyncAbortedError) as caught:
        run.rank(2).call("wait", 1, HANG_S)
    assert caught.value.args[0]["reason"]["type"] == "ManifestError"
    assert run.coordinator.states()["rollout-1"] is ReplicaState.SERVING
    assert run.coordinator.states()["rollout-2"] is ReplicaState.JOINING, "it never had a version: no requests"
    run.coordinator.remove("rollout-2")
    assert run.rank(1).call("live_digest") == expected(1)
    run.serve(2)


@pytest.mark.parametrize("who", ["trainer-0", "rollout-1/0"])
def test_whoever_is_started_anew_while_a_version_is_offered_takes_part_on_another_connection_without_a_retry(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    run = make_run(replicas=2, sync={"retries": 0})
    run.serve(1)
    session, queue = run.coordinator._session, run.coordinator._queue
    offer, joined_anew = session._offer, threading.Event()

    def is_noted() -> bool:
        queue.catch_up()
        return who in queue.gone

    def meanwhile(version: int, deadline: Deadline) -> Any:
        offered = offer(version, deadline)
        if not joined_anew.is_set():
            if who == "trainer-0":
                run.restart_trainer()
                run.publish_next(2)
            else:
                run.restart_replica(1)
            wait_until(is_noted, "news of the new one")
            joined_anew.set()
        return offered

    monkeypatch.setattr(session, "_offer", meanwhile)
    run.publish_next(2)
    report = run.sync(2)
    assert joined_anew.is_set()
    assert set(outcomes_of(report).values()) == {"committed"}
    (failure,) = report.failures
    assert failure.excluded == (), "nobody was left out"
    assert run.live() == [expected(2)] * 2


@pytest.mark.parametrize("who", ["trainer", "replica"])
@pytest.mark.parametrize(
    ("part", "step", "noted"),
    [
        pytest.param("_session._replies", "collect", False, id="trainers answer"),
        pytest.param("_session", "_await_hellos", False, id="replicas answer"),
        pytest.param("_session", "_await_hellos", True, id="heard before replicas answer"),
        pytest.param("_session", "_connect", False, id="all connect"),
        pytest.param("_session", "_connect", True, id="heard before all connect"),
    ],
)
def test_whoever_is_started_anew_while_a_session_begins_is_asked_again_without_a_retry(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, who: str, part: str, step: str, noted: bool
) -> None:
    run = make_run(sync={"retries": 0})
    owner, anew = attrgetter(part)(run.coordinator), threading.Event()
    goes_on = getattr(owner, step)

    def meanwhile(*arguments: Any, **more: Any) -> Any:
        if not anew.is_set():
            anew.set()
            if who == "trainer":
                run.restart_trainer()
                run.publish_next(1)
            else:
                run.restart_replica(0)
            if noted:  # while it waited for others, before this step
                run.coordinator._queue.catch_up()
        return goes_on(*arguments, **more)

    monkeypatch.setattr(owner, step, meanwhile)
    run.serve(1)
    assert anew.is_set()
    assert run.live() == [expected(1)]


def joined(path: Path) -> tuple[Rendezvous, Inbox, str, Subscriber]:
    """A subscriber that has joined where the test is in the coordinator's place: both inboxes, too."""
    rendezvous = Rendezvous.host()
    inbox = rendezvous.inbox(COORDINATOR)
    subscriber = Subscriber("r/0", rendezvous.address, "filesystem", {"path": str(path)}, Expectation({}))
    message = inbox.get(Deadline.after(HANG_S))
    assert isinstance(message, Joined)
    return rendezvous, inbox, message.inbox, subscriber


def test_one_that_waits_for_a_sender_that_never_comes_hears_that_it_is_to_begin_anew(tmp_path: Path) -> None:
    rendezvous, inbox, theirs, subscriber = joined(tmp_path)
    connecting: list[threading.Thread] = []

    def is_new(thread: threading.Thread | None) -> bool:
        return thread is not None and thread not in connecting and thread.is_alive()

    for session in ("first", "second", "third"):
        rendezvous.post(theirs, Reset(session=session))
        hello = inbox.get(Deadline.after(HANG_S))
        assert isinstance(hello, Hello)
        assert hello.session == session
        nowhere = {"meeting": {}, "engine": {}}
        message = Connect(
            session=session,
            publishers=["t-0"],
            senders={"t-0": nowhere},
            receivers={"r/0": nowhere},
            deadline_s=NEVER_S,
        )
        rendezvous.post(theirs, message)
        wait_until(lambda: is_new(subscriber._connecting), "thread that connects")
        connecting.append(subscriber._connecting)  # type: ignore[arg-type]
    late = message.model_copy(update={"session": "first"})
    with pytest.raises(ClosedError, match="closed while connecting"):  # not with the transport of the third
        subscriber._connect_half(late, Topology("first", late.senders, late.receivers), Deadline.after(HANG_S))
    subscriber.close()
    for thread in connecting:
        thread.join(HANG_S)
        assert not thread.is_alive(), "it still waits"


def test_a_transport_that_is_opened_while_its_participant_closes_is_closed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous, _, theirs, subscriber = joined(tmp_path)
    opening, closed = threading.Event(), threading.Event()
    opened = []
    open_half, close_half = Subscriber._open_half, Subscriber._close_half

    def slowly(self: Subscriber) -> object:
        opening.set()
        assert closed.wait(HANG_S), "`close` closes what there is"
        answer = open_half(self)
        opened.append(self._stored_link)
        return answer

    def close(self: Subscriber) -> None:
        close_half(self)
        if self._closed.is_set():
            closed.set()

    monkeypatch.setattr(Subscriber, "_open_half", slowly)
    monkeypatch.setattr(Subscriber, "_close_half", close)
    rendezvous.post(theirs, Reset(session="first"))
    assert opening.wait(HANG_S)
    subscriber.close()
    (receiver,) = opened
    with pytest.raises(ClosedError):
        receiver.connect(Topology("first", {}, {}), Deadline.after(HANG_S))


def test_nobody_waits_for_a_sync_under_way_to_let_a_replica_come_or_go(make_run: MakeRun) -> None:
    run = make_run(replicas=2)
    run.serve(1)

    async def change_meanwhile() -> None:
        syncing = asyncio.create_task(run.coordinator.sync(2))  # which nobody has published yet
        await asyncio.to_thread(wait_until, run.coordinator._turn.locked, "sync under way")
        run.coordinator.remove("rollout-1")  # if that waited, it would wait for what is published only afterwards
        assert "rollout-1" in run.coordinator.states(), "a version under way keeps the replicas it began with"
        run.step(2)
        await asyncio.to_thread(run.publish, 2)
        report = await syncing
        assert report.replicas["rollout-1"].outcome.value == "committed", "it was still there when the version began"
        assert "rollout-1" not in run.coordinator.states()

    asyncio.run(change_meanwhile())


def test_a_replica_that_leaves_does_not_count_any_more(make_run: MakeRun) -> None:
    run = make_run(replicas=2, sync={"quorum": 1.0})
    run.serve(1)
    run.rank(1).call("close")
    assert isinstance(run.fails(2, "rollout-1 is lost").reason, QuorumError)
    run.coordinator.remove("rollout-1")
    run.serve(3)


def test_a_replica_that_cannot_begin_a_commit_serves_on_and_one_that_cannot_prove_its_state_is_quarantined(
    make_run: MakeRun,
) -> None:
    run = make_run(replicas=2)
    run.serve(1)
    run.replicas[1].refuses_with = UntouchedError("it is not staged here.", part="rollout-1")
    run.publish_next(2)
    report = run.sync(2)
    assert report.replicas["rollout-1"].outcome.value == "behind"
    assert "not staged here" in str(report.replicas["rollout-1"].error)
    assert run.coordinator.states()["rollout-1"] is ReplicaState.SERVING
    assert run.live() == [expected(2), expected(1)]
    half_way = QuarantinedError("a rank stopped half-way.", part="rollout-1")
    unexpected = WeightlaneError("unexpected KeyError: 'x'", part="rollout-1")
    unlisted = StorageError("no space left after the first tensor.", part="rollout-1")
    its_own: Any = TimeoutError("the read operation timed out")
    for version, failure in ((3, half_way), (4, unexpected), (5, unlisted), (6, its_own)):
        run.replicas[1].fails_with = failure
        run.publish_next(version)
        assert run.outcomes(version) == {"rollout-0": "committed", "rollout-1": "quarantined"}
        told = run.replicas[1].quarantined_by[-1]
        assert type(told) is (WeightlaneError if failure is its_own else type(failure))
        assert str(failure) in str(told)
        assert run.coordinator.states()["rollout-1"] is ReplicaState.QUARANTINED
        run.step(100)
        # The version it missed is still there for it; so is any newer one.
        assert run.outcomes(version) == {"rollout-1": "committed"}
        assert run.coordinator.states()["rollout-1"] is ReplicaState.SERVING
        assert run.live() == [expected(version)] * 2


def test_a_version_that_too_few_replicas_take_is_taken_back_everywhere_or_serves_nobody(make_run: MakeRun) -> None:
    run = make_run(replicas=3, sync={"quorum": 0.9})
    run.replicas[2].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-2")
    run.fails(1)
    assert set(run.coordinator.states().values()) == {ReplicaState.QUARANTINED}, "there is nothing to go back to"
    assert "the version before 1 is not kept here" in str(run.replicas[0].quarantined_by[0])
    run.serve(2)
    run.replicas[2].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-2")
    assert isinstance(run.fails(3).reason, QuarantinedError)
    assert run.live()[:2] == [expected(2), expected(2)], "two versions serve at once"
    assert run.coordinator.states() == {
        "rollout-0": ReplicaState.SERVING,
        "rollout-1": ReplicaState.SERVING,
        "rollout-2": ReplicaState.QUARANTINED,
    }
    for participant in run.participants():
        with pytest.raises(SyncAbortedError) as caught:
            participant.call("wait", 3, HANG_S)
        assert caught.value.args[0]["reason"]["type"] == "QuarantinedError"
    run.serve(4)


@pytest.mark.parametrize(
    ("backend", "rollout", "state"),
    [
        # Room for the staged version alone, or for another one where that lies in the sender's memory.
        ("gloo", {"staging_limit_bytes": 20_000}, ReplicaState.QUARANTINED),
        ("shm", {"staging_limit_bytes": 20_000}, ReplicaState.SERVING),
        ("shm", {"staging_limit_bytes": 4096}, ReplicaState.QUARANTINED),
        ("shm", {"commit": "in_place"}, ReplicaState.QUARANTINED),
    ],
)
def test_a_version_can_be_taken_back_where_memory_allows_to_keep_the_one_before(
    make_run: MakeRun, backend: str, rollout: dict[str, Any], state: ReplicaState
) -> None:
    run = make_run(backend, replicas=2, sync={"quorum": 1.0, "retries": 0}, rollout=rollout)
    run.serve(1)
    run.replicas[1].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-1")
    run.fails(2)
    assert run.coordinator.states()["rollout-0"] is state
    assert run.live()[0] == expected(1 if state is ReplicaState.SERVING else 2)
    run.serve(3)


# -- syncs that are cancelled, and errors that nobody foresaw -----------------------------------------------------------


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
        await asyncio.to_thread(wait_until, lambda: run.waits_for("to offer version 2"), "sync that waits for an offer")
        following = asyncio.create_task(run.coordinator.sync(3))  # it waits for its turn
        await cancelled(syncing)
        await asyncio.to_thread(run.publish_next, 3)
        return await following

    report = asyncio.run(cancel_then_sync())
    assert outcomes_of(report) == {"rollout-0": "committed", "rollout-1": "committed"}
    assert run.live() == [expected(3)] * 2


def test_a_version_that_failed_is_waited_for_anew_when_it_comes_again_however_often_it_was_said_to_have_failed() -> (
    None
):
    board = VersionOutcomes()
    for _ in range(2):
        board.begin(5, told=True)
        assert board.failure(5) is None
        for _ in range(2):
            board.fail(5, PeerLostError("gone.", part="trainer-0"))
    late = VersionOutcomes()
    late.fail(5, PeerLostError("gone.", part="trainer-0"))
    late.begin(5)
    assert late.failure(5) is not None, "it came for this very try"


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
            monkeypatch.setattr("weightlane.sync.control.coordinator.coordinator._CANCELLED_S", 0.5)
        await cancelled(syncing)

    asyncio.run(cancel_in_commit())
    states = run.coordinator.states()
    assert states["rollout-0"] is ReplicaState.SERVING
    assert run.rank(0).call("live_digest") == expected(1)
    assert states["rollout-1"] is (ReplicaState.SERVING if ends else ReplicaState.QUARANTINED)
    assert "was interrupted" in "".join(map(str, run.replicas[1].quarantined_by)) or ends
    everybody_heard(run, 2, "the sync of version 2 was cancelled")
    run.serve(3)


def test_a_sync_that_is_cancelled_when_every_commit_has_ended_counts(make_run: MakeRun) -> None:
    run = make_run(replicas=2)
    run.serve(1)
    run.publish_next(2)
    run.replicas[1].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-1")

    async def cancel_at_the_end() -> None:
        held = run.replicas[1].holds_quarantines()
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


@pytest.mark.parametrize("error", [TimeoutError("of something else"), KeyError("x"), OSError(28, "No space left")])
@pytest.mark.parametrize("where", ["ensure_connected", "stream", "catch_up"])
def test_an_error_that_nobody_foresaw_is_an_abort_on_every_side(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    run = make_run(replicas=2)
    run.serve(1)
    owner: Any = run.coordinator._queue if where == "catch_up" else run.coordinator._session

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, fail)
        aborted = run.fails(2, f"unexpected {type(error).__name__}")
    assert repr(aborted.__cause__) == repr(error)
    everybody_heard(run, 2, type(error).__name__)
    assert run.live() == [expected(1)] * 2
    run.serve(3)


def test_to_connect_can_be_cancelled_too(make_run: MakeRun) -> None:
    run = make_run()
    run.coordinator.add(Replica("rollout-1", {"rollout-1/0": run.rank(0)}))  # nobody subscribes under that name

    async def cancel_then_connect() -> None:
        connecting = asyncio.create_task(run.coordinator.connect())
        await asyncio.to_thread(wait_until, lambda: run.waits_for("to join"), "coordinator that waits")
        await cancelled(connecting)
        run.coordinator.remove("rollout-1")
        await run.coordinator.connect()

    asyncio.run(cancel_then_connect())
    run.serve(1)


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
