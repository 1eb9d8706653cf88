"""Versions get from trainer processes to rollout processes bit for bit, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hop_run import Participant, Run, expected

from weightlane.ckpt_engines import (
    AddressInUseError,
    DeadlineExceededError,
    ManifestError,
    PeerLostError,
    StagingMemoryError,
    SyncAbortedError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.sync import Coordinator, Rendezvous, SyncConfig

every_engine = pytest.mark.parametrize("backend", ["gloo", "shm", "filesystem"])


@every_engine
@pytest.mark.parametrize(
    ("trainers", "replicas", "ranks", "wire"), [(1, 1, 1, "float32"), (2, 1, 2, "bfloat16"), (3, 2, 1, "float32")]
)
def test_every_rank_gets_exactly_what_was_published(
    make_run: Callable[..., Run], backend: str, trainers: int, replicas: int, ranks: int, wire: str, tmp_path: Path
) -> None:
    run = make_run(
        backend,
        trainers=trainers,
        replicas=replicas,
        ranks=ranks,
        trainer={"wire_dtype": wire},
        rollout={"wire_dtype": wire},
    )
    for version in (1, 2, 5):
        run.step(version)
        run.publish(version)
        # The next optimizer step waits for the snapshot only, and must not leak into the version on its way.
        run.step(version + 100)
        report = run.sync(version)
        assert report.version == version
        assert {name: part.outcome for name, part in report.replicas.items()} == {
            replica.name: "committed" for replica in run.replicas
        }
        for digest in run.live():
            assert digest == expected(version, getattr(torch, wire))
        for participant in run.participants():
            participant.call("wait", version, 5.0)
    for participant in run.participants():
        participant.call("close")
    assert not list(tmp_path.rglob("*.bin")), "buckets left behind"
    assert not list(tmp_path.rglob("*.sock")), "sockets left behind"


def assert_same_reason_everywhere(
    run: Run, version: int, reason: type[WeightlaneError], alive: list[Participant]
) -> None:
    """Every participant raises `SyncAbortedError` caused by the same kind of error."""
    for participant in alive:
        with pytest.raises(SyncAbortedError) as caught:
            participant.call("wait", version, 10.0)
        assert caught.value.args[0]["reason"]["type"] == reason.__name__


def test_a_refused_manifest_aborts_on_every_side_and_the_old_version_serves_on(make_run: Callable[..., Run]) -> None:
    run = make_run(trainers=2, rollout={"shapes": {"head": [40, 24]}})
    run.publish(1)
    with pytest.raises(SyncAbortedError, match=r"head has shape \[41, 24\], expected \[40, 24\]") as caught:
        run.sync(1)
    assert isinstance(caught.value.reason, ManifestError)
    assert_same_reason_everywhere(run, 1, ManifestError, run.participants())
    assert run.live() == [expected(0)]


def test_too_little_memory_for_staging_is_refused_in_words(make_run: Callable[..., Run]) -> None:
    run = make_run("gloo", rollout={"staging_limit_bytes": 4096})
    run.publish(1)
    with pytest.raises(SyncAbortedError, match=r"needs 0\.0 MiB") as caught:
        run.sync(1)
    assert isinstance(caught.value.reason, StagingMemoryError)


def test_after_an_abort_the_next_version_goes_through_on_a_new_connection(make_run: Callable[..., Run]) -> None:
    run = make_run(trainers=2, deadline_s=6.0)
    run.publish(1)
    run.sync(1)
    # Version 2 is offered by one rank only: it cannot become complete.
    run.step(2)
    run.trainers[0].call("publish", 2)
    with pytest.raises(SyncAbortedError):
        run.sync(2)
    run.trainers[1].call("publish", 2)
    run.step(3)
    run.publish(3)
    assert run.sync(3).version == 3
    assert run.live() == [expected(3)]


@every_engine
def test_a_rollout_killed_mid_run_ends_the_sync_within_the_deadline(make_run: Callable[..., Run], backend: str) -> None:
    run = make_run(backend, replicas=2, deadline_s=4.0)
    run.publish(1)
    run.sync(1)
    victim = next(iter(run.replicas[1].ranks.values()))
    victim.kill()
    run.publish(2)
    started = time.monotonic()
    with pytest.raises(SyncAbortedError) as caught:
        run.sync(2)
    assert time.monotonic() - started < 6.0
    assert isinstance(caught.value.reason, (DeadlineExceededError, PeerLostError))
    survivor = next(iter(run.replicas[0].ranks.values()))
    assert survivor.call("live_digest") == expected(0)  # version 1 republished the initial weights


@every_engine
def test_a_trainer_that_stops_answering_is_named_at_the_deadline(make_run: Callable[..., Run], backend: str) -> None:
    run = make_run(backend, trainers=2, deadline_s=3.0)
    run.publish(1)
    run.sync(1)
    os.kill(run.trainers[1].pid, signal.SIGSTOP)
    try:
        run.trainers[0].call("publish", 2)
        started = time.monotonic()
        with pytest.raises(SyncAbortedError) as caught:
            run.sync(2)
        assert time.monotonic() - started < 6.0
        assert "trainer-1" in str(caught.value)
    finally:
        os.kill(run.trainers[1].pid, signal.SIGCONT)
    assert run.live() == [expected(0)]


def test_a_version_number_is_never_used_twice(make_run: Callable[..., Run]) -> None:
    run = make_run("filesystem")
    for version in (3, 4):
        run.step(version)
        run.publish(version)
        run.sync(version)
    for version in (4, 2):
        run.publish(version)
        with pytest.raises(SyncAbortedError, match=f"version {version} was to follow version"):
            run.sync(version)
    assert run.live() == [expected(4)]
    run.step(5)
    run.publish(5)
    run.sync(5)
    assert run.live() == [expected(5)]


def test_staging_memory_is_not_filled_while_it_is_being_loaded(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.publish(1)
    run.sync(1)
    rank = run.participants()[-1]
    run.step(2)
    run.publish(2)
    run.replicas[0].method = "take_only"
    run.sync(2)
    run.step(3)
    run.publish(3)
    with pytest.raises(SyncAbortedError, match="version 2 is still being loaded here"):
        run.sync(3)
    assert rank.call("taken_digest") == expected(2)
    rank.call("release", 2)
    run.replicas[0].method = "commit"
    run.publish(4)
    run.sync(4)
    assert run.live() == [expected(3)]


def test_news_of_a_death_aborts_a_sync_at_once(make_run: Callable[..., Run]) -> None:
    run = make_run(deadline_s=30.0)

    async def sync_and_hear() -> None:
        await run.coordinator.connect()
        task = asyncio.create_task(run.coordinator.sync(1))  # nobody publishes version 1
        await asyncio.sleep(0.3)
        run.coordinator.participant_lost(WorkerDiedError("trainer rank 0 died.", part="watch"))
        await task

    started = time.monotonic()
    with pytest.raises(SyncAbortedError, match="trainer rank 0 died"):
        asyncio.run(sync_and_hear())
    assert time.monotonic() - started < 10.0


def test_a_participant_that_never_joins_is_named(free_port: int) -> None:
    rendezvous = Rendezvous.host("127.0.0.1", free_port)
    coordinator = Coordinator(rendezvous, ["trainer-0"], [], SyncConfig(connect_timeout_s=0.5))
    with pytest.raises(DeadlineExceededError, match="trainer-0 to join"):
        asyncio.run(coordinator.connect())
    coordinator.close()


def test_a_taken_port_is_a_typed_error() -> None:
    first = Rendezvous.host()
    with pytest.raises(AddressInUseError, match=str(first.address.port)):
        Rendezvous.host("127.0.0.1", first.address.port)
