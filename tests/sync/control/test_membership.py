"""Replicas and trainers come, go, freeze, die and return; whoever is well is not stopped."""

from __future__ import annotations

import asyncio
import threading
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hop_run import MakeRun, expected, outcomes_of
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import ClosedError, Deadline, ManifestError, QuorumError, SyncAbortedError, Topology
from weightlane.sync import Expectation, Rendezvous, ReplicaState, Subscriber
from weightlane.sync.control.hub.frames import COORDINATOR
from weightlane.sync.control.inbox import Inbox
from weightlane.sync.control.messages import Connect, Hello, Joined, Reset


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.exhaustive)])
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


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.exhaustive)])
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


def test_one_that_joins_late_gets_the_current_version_unless_it_refuses_and_the_others_do_not_notice(
    make_run: MakeRun,
) -> None:
    run = make_run("filesystem", trainers=2)
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


@pytest.mark.parametrize(
    ("who", "part", "step", "noted"),
    [
        pytest.param("trainer", "_session._replies", "collect", False, id="trainers answer"),
        pytest.param("replica", "_session", "_await_hellos", False, id="replicas answer"),
        pytest.param("trainer", "_session", "_await_hellos", True, id="heard before replicas answer"),
        pytest.param("replica", "_session", "_connect", False, id="all connect"),
        pytest.param("trainer", "_session", "_connect", True, id="heard before all connect"),
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
