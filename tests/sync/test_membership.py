"""Replicas and trainers come, go, freeze, die and return; whoever is well is not stopped, and nobody serves a wrong weight."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hop_run import Run, expected

from weightlane.ckpt_engines import (
    ClosedError,
    CommitError,
    ConfigError,
    Deadline,
    ManifestError,
    QuarantinedError,
    QuorumError,
    SyncAbortedError,
    Topology,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.sync import Expectation, ExpectedTensor, Rendezvous, ReplicaState, Subscriber
from weightlane.sync.messages import Connect, Hello, Joined, Reset
from weightlane.sync.rendezvous import COORDINATOR

IMPATIENT = {"rejoin_s": 0.5, "stall_s": 0.7}
every_engine = pytest.mark.parametrize("backend", ["gloo", "shm", "filesystem"])


def publish_next(run: Run, version: int) -> None:
    run.step(version)
    run.publish(version)


@every_engine
def test_a_replica_that_is_killed_does_not_stop_the_others(make_run: Callable[..., Run], backend: str) -> None:
    rejoin_s = 1.0
    run = make_run(backend, replicas=2, sync=IMPATIENT | {"rejoin_s": rejoin_s})
    publish_next(run, 1)
    run.sync(1)
    next(iter(run.replicas[1].ranks.values())).kill()
    publish_next(run, 2)
    assert run.outcomes(2) == {"rollout-0": "committed", "rollout-1": "lost"}
    assert run.coordinator.states()["rollout-1"] is ReplicaState.LOST
    survivor = next(iter(run.replicas[0].ranks.values()))
    assert survivor.call("live_digest") == expected(2)
    began = time.monotonic()
    for version in range(3, 9):
        publish_next(run, version)
        assert run.outcomes(version) == {"rollout-0": "committed", "rollout-1": "lost"}
    assert time.monotonic() - began < 6 * rejoin_s, "the others waited for the dead again and again"


def test_news_of_a_death_spares_the_others_the_wait(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=2, deadline_s=30.0)
    publish_next(run, 1)
    run.sync(1)
    next(iter(run.replicas[1].ranks.values())).kill()
    run.coordinator.participant_lost(WorkerDiedError("process 7 died.", part="watch"), "rollout-1")
    publish_next(run, 2)
    started = time.monotonic()
    report = run.sync(2)
    assert time.monotonic() - started < 3.0
    assert report.replicas["rollout-1"].outcome.value == "lost"
    assert "process 7 died" in str(report.replicas["rollout-1"].error)


@every_engine
def test_a_replica_that_freezes_is_left_behind_and_gets_the_next_version_when_it_wakes(
    make_run: Callable[..., Run], backend: str
) -> None:
    run = make_run(backend, replicas=2, sync=IMPATIENT)
    publish_next(run, 1)
    run.sync(1)
    frozen = next(iter(run.replicas[1].ranks.values()))
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        publish_next(run, 2)
        report = run.sync(2)
        assert report.replicas["rollout-0"].outcome.value == "committed"
        outcome = report.replicas["rollout-1"].outcome.value
        # Which of the two depends on whether it is missed while streaming or while connecting.
        assert outcome == "lost" or (
            outcome == "behind" and any("rollout-1" in failure.excluded for failure in report.failures)
        )
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.call("live_digest") == expected(1)
    publish_next(run, 3)
    outcomes = run.outcomes(3)
    if outcomes["rollout-1"] != "committed":  # its answer may have come a moment too late for that one
        publish_next(run, 4)
        assert run.outcomes(4)["rollout-1"] == "committed"
        assert frozen.call("live_digest") == expected(4)
    else:
        assert frozen.call("live_digest") == expected(3)


@every_engine
def test_a_replica_that_joins_late_gets_the_current_version_and_the_others_do_not_notice(
    make_run: Callable[..., Run], backend: str
) -> None:
    run = make_run(backend, trainers=2)
    publish_next(run, 1)
    run.sync(1)
    joiner = run.add_replica()
    assert run.coordinator.states() == {"rollout-0": ReplicaState.SERVING, "rollout-1": ReplicaState.JOINING}
    run.step(100)  # the trainer goes on meanwhile
    report = run.sync(1)
    assert {name: part.outcome.value for name, part in report.replicas.items()} == {"rollout-1": "committed"}
    assert run.coordinator.states()["rollout-1"] is ReplicaState.SERVING
    assert next(iter(joiner.ranks.values())).call("live_digest") == expected(1)
    publish_next(run, 2)
    assert run.outcomes(2) == {"rollout-0": "committed", "rollout-1": "committed"}
    assert run.live() == [expected(2), expected(2)]


@every_engine
def test_a_trainer_that_is_started_anew_goes_on_with_the_same_rollouts(
    make_run: Callable[..., Run], backend: str
) -> None:
    run = make_run(backend)
    publish_next(run, 1)
    run.sync(1)
    run.restart_trainer()
    publish_next(run, 2)
    assert run.outcomes(2) == {"rollout-0": "committed"}
    assert run.live() == [expected(2)]


def test_one_that_waits_for_a_sender_that_never_comes_hears_that_it_is_to_begin_anew(tmp_path: Path) -> None:
    rendezvous = Rendezvous.host()
    inbox = rendezvous.inbox(COORDINATOR)
    expectation = Expectation({"w": ExpectedTensor((2,), frozenset({torch.float32}))})
    subscriber = Subscriber("r/0", rendezvous.address, "filesystem", {"path": str(tmp_path)}, expectation)
    joined = inbox.get(Deadline.after(5))
    assert isinstance(joined, Joined)
    senders: dict[str, dict[str, object]] = {"trainer-0": {}}
    for session in ("first", "second", "third"):
        rendezvous.post(joined.inbox, Reset(session=session))
        hello = inbox.get(Deadline.after(2))
        assert isinstance(hello, Hello)
        assert hello.session == session
        waits = Connect(
            session=session, publishers=["trainer-0"], senders=senders, receivers={"r/0": {}}, deadline_s=30.0
        )
        rendezvous.post(joined.inbox, waits)
        time.sleep(0.2)
    began = time.monotonic()
    subscriber.close()
    assert time.monotonic() - began < 2.0


def test_a_transport_that_is_opened_while_its_participant_closes_is_closed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = Rendezvous.host()
    inbox = rendezvous.inbox(COORDINATOR)
    opening = threading.Event()
    opened = []
    open_half = Subscriber._open_half

    def slowly(self: Subscriber) -> object:
        opening.set()
        assert self._closed.wait(5)
        time.sleep(0.2)  # `close` has closed what there was
        answer = open_half(self)
        opened.append(self._receiver)
        return answer

    monkeypatch.setattr(Subscriber, "_open_half", slowly)
    subscriber = Subscriber("r/0", rendezvous.address, "filesystem", {"path": str(tmp_path)}, Expectation({}))
    joined = inbox.get(Deadline.after(5))
    assert isinstance(joined, Joined)
    rendezvous.post(joined.inbox, Reset(session="first"))
    assert opening.wait(5)
    subscriber.close()
    (receiver,) = opened
    with pytest.raises(ClosedError):
        receiver.connect(Topology("first", {}, {}), rendezvous.mailbox("engine/first"), Deadline.after(1))


def test_a_connection_that_comes_too_late_is_not_made_with_the_next_ones_transport(tmp_path: Path) -> None:
    rendezvous = Rendezvous.host()
    inbox = rendezvous.inbox(COORDINATOR)
    subscriber = Subscriber("r/0", rendezvous.address, "filesystem", {"path": str(tmp_path)}, Expectation({}))
    joined = inbox.get(Deadline.after(5))
    assert isinstance(joined, Joined)
    rendezvous.post(joined.inbox, Reset(session="second"))
    assert isinstance(inbox.get(Deadline.after(5)), Hello)
    late = Connect(session="first", publishers=[], senders={"trainer-0": {}}, receivers={"r/0": {}}, deadline_s=5.0)
    with pytest.raises(ClosedError, match="closed while connecting"):
        subscriber._connect_half(late, Topology("first", late.senders, late.receivers), Deadline.after(5))
    subscriber.close()


def test_nobody_waits_for_a_sync_under_way_to_let_a_replica_come_or_go(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=2)
    publish_next(run, 1)
    run.sync(1)

    async def change_meanwhile() -> None:
        syncing = asyncio.create_task(run.coordinator.sync(2))  # which nobody has published yet
        await asyncio.sleep(0.3)
        began = time.monotonic()
        run.coordinator.remove("rollout-1")
        assert time.monotonic() - began < 1.0
        assert "rollout-1" in run.coordinator.states(), "a version under way keeps the replicas it began with"
        run.step(2)
        await asyncio.to_thread(run.publish, 2)
        report = await syncing
        assert report.replicas["rollout-1"].outcome.value == "committed", "it was still there when the version began"
        assert "rollout-1" not in run.coordinator.states()

    asyncio.run(change_meanwhile())


def test_a_replica_that_leaves_does_not_count_any_more(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=2, sync={"quorum": 1.0})
    publish_next(run, 1)
    run.sync(1)
    next(iter(run.replicas[1].ranks.values())).call("close")
    publish_next(run, 2)
    with pytest.raises(SyncAbortedError) as caught:
        run.sync(2)
    assert isinstance(caught.value.reason, QuorumError)
    assert "rollout-1 is lost" in str(caught.value)
    run.coordinator.remove("rollout-1")
    publish_next(run, 3)
    assert run.outcomes(3) == {"rollout-0": "committed"}
    with pytest.raises(ConfigError, match="rollout-1"):
        run.coordinator.remove("rollout-1")


def test_a_replica_that_refuses_a_manifest_stays_behind_alone(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=1)
    odd = run.add_replica(shapes={"head": [40, 24]})
    publish_next(run, 1)
    report = run.sync(1)
    assert report.replicas["rollout-0"].outcome.value == "committed"
    assert report.replicas[odd.name].outcome.value == "behind"
    assert "head has shape [41, 24], expected [40, 24]" in str(report.replicas[odd.name].error)
    assert isinstance(report.replicas[odd.name].error, ManifestError)
    assert run.coordinator.states()[odd.name] is ReplicaState.JOINING, "it never had a version: no requests"
    with pytest.raises(SyncAbortedError) as caught:
        next(iter(odd.ranks.values())).call("wait", 1, 5.0)
    assert caught.value.args[0]["reason"]["type"] == "ManifestError"


def test_a_replica_that_cannot_begin_a_commit_serves_on_with_what_it_had(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=2)
    publish_next(run, 1)
    run.sync(1)
    run.replicas[1].method = "untouched"
    run.replicas[1].fails_with = CommitError("it is not staged here.", part="rollout-1")
    publish_next(run, 2)
    report = run.sync(2)
    assert report.replicas["rollout-1"].outcome.value == "behind"
    assert "not staged here" in str(report.replicas["rollout-1"].error)
    assert run.coordinator.states()["rollout-1"] is ReplicaState.SERVING
    assert run.live() == [expected(2), expected(1)]
    run.replicas[1].method = "commit"
    publish_next(run, 3)
    assert run.outcomes(3) == {"rollout-0": "committed", "rollout-1": "committed"}


@pytest.mark.parametrize(
    "failure",
    [
        QuarantinedError("a rank stopped half-way.", part="rollout-1"),
        WeightlaneError("unexpected KeyError: 'x'", part="rollout-1"),
    ],
    ids=["half-way", "unexpected"],
)
def test_a_replica_that_cannot_prove_its_state_is_quarantined_until_a_complete_version_commits(
    make_run: Callable[..., Run], failure: WeightlaneError
) -> None:
    run = make_run(replicas=2)
    publish_next(run, 1)
    run.sync(1)
    run.replicas[1].fails_with = failure
    publish_next(run, 2)
    assert run.outcomes(2) == {"rollout-0": "committed", "rollout-1": "quarantined"}
    assert [type(error) for error in run.replicas[1].quarantined_by] == [type(failure)]
    assert run.coordinator.states()["rollout-1"] is ReplicaState.QUARANTINED
    run.step(100)
    # The version it missed is still there for it; so is any newer one.
    assert run.outcomes(2) == {"rollout-1": "committed"}
    assert run.coordinator.states()["rollout-1"] is ReplicaState.SERVING
    assert run.live() == [expected(2), expected(2)]


def test_a_version_that_too_few_replicas_take_is_taken_back_everywhere(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=3, sync={"quorum": 0.9})
    publish_next(run, 1)
    run.sync(1)
    run.replicas[2].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-2")
    publish_next(run, 2)
    with pytest.raises(SyncAbortedError) as caught:
        run.sync(2)
    assert isinstance(caught.value.reason, QuarantinedError)
    assert run.live()[:2] == [expected(1), expected(1)], "two versions serve at once"
    assert run.coordinator.states() == {
        "rollout-0": ReplicaState.SERVING,
        "rollout-1": ReplicaState.SERVING,
        "rollout-2": ReplicaState.QUARANTINED,
    }
    for participant in run.participants():
        with pytest.raises(SyncAbortedError):
            participant.call("wait", 2, 5.0)
    publish_next(run, 3)
    assert set(run.outcomes(3).values()) == {"committed"}
    assert run.live() == [expected(3)] * 3


def test_a_replica_that_has_nothing_to_go_back_to_is_quarantined(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=2, sync={"quorum": 1.0})
    run.replicas[1].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-1")
    publish_next(run, 1)
    with pytest.raises(SyncAbortedError):
        run.sync(1)
    assert set(run.coordinator.states().values()) == {ReplicaState.QUARANTINED}
    assert "the version before 1 is not kept here" in str(run.replicas[0].quarantined_by[0])
    publish_next(run, 2)
    assert set(run.outcomes(2).values()) == {"committed"}


@pytest.mark.parametrize(
    ("backend", "limit_bytes", "state"),
    [
        ("gloo", 20_000, ReplicaState.QUARANTINED),  # room for the staged version alone
        ("shm", 20_000, ReplicaState.SERVING),  # which lies in the sender's memory: room for the one that served
        ("shm", 4096, ReplicaState.QUARANTINED),
    ],
)
def test_a_version_can_be_taken_back_where_memory_allows_to_keep_the_one_before(
    make_run: Callable[..., Run], backend: str, limit_bytes: int, state: ReplicaState
) -> None:
    run = make_run(backend, replicas=2, sync={"quorum": 1.0}, rollout={"staging_limit_bytes": limit_bytes})
    publish_next(run, 1)
    run.sync(1)
    run.replicas[1].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-1")
    publish_next(run, 2)
    with pytest.raises(SyncAbortedError):
        run.sync(2)
    assert run.coordinator.states()["rollout-0"] is state
    assert run.live()[0] == expected(1 if state is ReplicaState.SERVING else 2)
    publish_next(run, 3)
    assert set(run.outcomes(3).values()) == {"committed"}
    assert run.live() == [expected(3)] * 2
