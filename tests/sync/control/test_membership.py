"""Replicas and trainers come, go, freeze, die and return; whoever is well is not stopped."""

from __future__ import annotations

import asyncio
import threading
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hop_run import MakeRun, expected, outcomes_of
from sessions import soon
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import (
    ClosedError,
    ManifestError,
    ProtocolError,
    QuorumError,
    SyncAbortedError,
    WorkerDiedError,
    error_from_wire,
)
from weightlane.sync import Expectation, Rendezvous, ReplicaState, Subscriber
from weightlane.sync.control.coordinator.version_sync import VersionSync
from weightlane.sync.control.messages import COORDINATOR, Connect, Failed, Hello, Joined, Reset


def test_a_replica_that_is_killed_or_a_trainer_that_is_started_anew_does_not_stop_the_others(make_run: MakeRun) -> None:
    run = make_run("gloo", replicas=2)
    run.serve(1)
    run.lose_replica(1)
    for version in (2, 3):
        if version == 3:
            run.restart_trainer()
        run.publish_next(version)
        report = run.sync(version)
        assert outcomes_of(report) == {"rollout-0": "committed", "rollout-1": "lost"}
        assert "its process was killed" in str(report.replicas["rollout-1"].error)
        assert run.coordinator.states()["rollout-1"] is ReplicaState.LOST
        assert run.rank(0).call("live_digest") == expected(version)


def test_a_replica_that_freezes_is_left_behind_and_gets_the_next_version_when_it_wakes(make_run: MakeRun) -> None:
    run = make_run(replicas=2)
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
    run.coordinator.weights_lost("rollout-1")
    assert [*run.coordinator.states().values()] == [ReplicaState.SERVING, ReplicaState.JOINING]
    assert outcomes_of(run.sync(2)) == {"rollout-1": "committed"}, "once more, although it had that"


@pytest.mark.parametrize(
    ("who", "part", "step"),
    [
        pytest.param("trainer-0", "_queue", "collect", id="trainer, while trainers answer"),
        pytest.param("trainer-0", "_session", "_await_hellos", id="trainer, while replicas answer"),
        pytest.param("rollout-1/0", "_session", "_connect", id="replica, while all connect"),
        pytest.param("trainer-0", "_session", "_offer", id="trainer, while a version is offered"),
        pytest.param("rollout-1/0", "_session", "_offer", id="replica, while a version is offered"),
    ],
)
def test_whoever_is_started_anew_while_a_session_begins_or_a_version_is_offered_takes_part_without_a_retry(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, who: str, part: str, step: str
) -> None:
    run = make_run(replicas=2, sync={"retries": 0})
    offered = step == "_offer"
    if offered:
        run.serve(1)
    owner, restarted = attrgetter(part)(run.coordinator), threading.Event()
    goes_on, queue = getattr(owner, step), run.coordinator._queue

    def is_noted() -> bool:
        queue.catch_up()
        return who in queue.gone

    def restart() -> None:
        restarted.set()
        if who == "trainer-0":
            run.restart_trainer()
            run.publish_next(2)
        else:
            run.restart_replica(1)
        if offered:
            wait_until(is_noted, "news of the new one")
        elif step == "_await_hellos":
            queue.catch_up()  # the coordinator hears of it before it waits for replicas

    def meanwhile(*arguments: Any, **more: Any) -> Any:
        if offered or restarted.is_set():
            answer = goes_on(*arguments, **more)
            if not restarted.is_set():
                restart()
            return answer
        restart()
        return goes_on(*arguments, **more)

    monkeypatch.setattr(owner, step, meanwhile)
    run.publish_next(2)
    report = run.sync(2)
    assert restarted.is_set()
    assert set(outcomes_of(report).values()) == {"committed"}
    assert all(failure.excluded == () for failure in report.failures), "somebody was left out"
    assert run.live() == [expected(2)] * 2


def test_a_subscriber_that_waits_for_a_sender_that_never_comes_hears_that_it_is_to_start_over(
    rendezvous: Rendezvous, tmp_path: Path
) -> None:
    rendezvous.listen(COORDINATOR)  # the test is in the coordinator's place
    subscriber = Subscriber("r/0", rendezvous.address, "filesystem", {"path": str(tmp_path)}, Expectation({}))
    joined = rendezvous.receive(soon())
    assert isinstance(joined, Joined)
    connecting: list[threading.Thread | None] = [None]
    for session in ("first", "second"):
        rendezvous.post(joined.inbox, Reset(session=session))
        hello = rendezvous.receive(soon())
        assert isinstance(hello, Hello)
        assert hello.session == session
        sides = {"publishers": ["t-0"], "needs": {"r/0": ""}}
        rendezvous.post(joined.inbox, Connect(session=session, deadline_s=NEVER_S, **sides))
        wait_until(lambda: subscriber._connecting is not connecting[-1], "thread that connects")
        connecting.append(subscriber._connecting)
    message = Connect(session="first", deadline_s=NEVER_S, **sides)
    with pytest.raises(ClosedError, match="closed while connecting"):  # not with the transport of the second session
        subscriber._connect_links(message, soon())
    stranger = Connect(session="second", deadline_s=NEVER_S, publishers=["t-0"], needs={})
    with pytest.raises(ProtocolError, match="session second has no plan for r/0"):  # its empty memory is no version
        subscriber._connect_links(stranger, soon())
    subscriber.close()
    wait_until(lambda: not any(thread and thread.is_alive() for thread in connecting), "end of those that connect")


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
    run.coordinator.remove("rollout-0")
    run.coordinator.add(run.replicas[0])  # whose subscriber says only once that it has joined
    run.serve(4)


def test_a_process_that_has_gone_since_its_commit_serves_nothing_and_the_report_of_its_death_is_no_sign_of_life(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(replicas=2)
    wait, coordinator = VersionSync.wait, run.coordinator

    async def wait_for_its_successor(sync: VersionSync, timeout_s: float) -> None:
        await wait(sync, timeout_s)
        if "rollout-1/0" not in coordinator._queue.gone:
            run.restart_replica(1)
            wait_until(lambda: coordinator._queue.catch_up() or "rollout-1/0" in coordinator._queue.gone, "the new one")

    with monkeypatch.context() as patch:
        patch.setattr(VersionSync, "wait", wait_for_its_successor)
        run.publish_next(1)
        assert run.outcomes(1) == {"rollout-0": "committed", "rollout-1": "behind"}
    assert coordinator.states()["rollout-1"] is ReplicaState.JOINING
    died = WorkerDiedError("it was killed.", part="rollout-1").to_wire()
    coordinator._roster.mark_lost(coordinator._roster.entries["rollout-1"], error_from_wire(died))
    coordinator._queue.post_to_self(
        Failed(name="rollout-1/0", session=coordinator._queue.session, version=1, error=died)
    )
    coordinator._queue.catch_up()
    assert coordinator.states()["rollout-1"] is ReplicaState.LOST
