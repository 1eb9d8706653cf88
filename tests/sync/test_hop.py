"""Versions get from trainer processes to rollout processes bit for bit, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hop_run import PATIENCES_S, Run, expected
from waiting import HANG_S

from weightlane.ckpt_engines import (
    AddressInUseError,
    DeadlineExceededError,
    ManifestError,
    SyncAbortedError,
    WorkerDiedError,
)
from weightlane.sync import Coordinator, Rendezvous, SyncConfig

every_engine = pytest.mark.parametrize("backend", ["gloo", "shm", "filesystem"])


further = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("backend", "trainers", "replicas", "ranks", "wire"),
    [
        ("gloo", 3, 2, 1, "float32"),
        ("shm", 2, 1, 2, "bfloat16"),
        ("filesystem", 1, 1, 1, "float32"),
        pytest.param("gloo", 2, 1, 2, "bfloat16", marks=further),
        pytest.param("shm", 1, 1, 1, "float32", marks=further),
        pytest.param("filesystem", 3, 2, 1, "bfloat16", marks=further),
    ],
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
        run.publish_next(version)
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
            participant.call("wait", version, HANG_S)
    for participant in run.participants():
        participant.call("close")
    assert not list(tmp_path.rglob("*.bin")), "buckets left behind"
    assert not list(tmp_path.rglob("*.sock")), "sockets left behind"


def test_a_refused_manifest_aborts_on_every_side_and_the_old_version_serves_on(make_run: Callable[..., Run]) -> None:
    run = make_run(trainers=2, rollout={"shapes": {"head": [40, 24]}})
    run.publish(1)
    with pytest.raises(SyncAbortedError, match=r"head has shape \[41, 24\], expected \[40, 24\]") as caught:
        run.sync(1)
    assert isinstance(caught.value.reason, ManifestError)
    for participant in run.participants():
        with pytest.raises(SyncAbortedError) as caught:
            participant.call("wait", 1, HANG_S)
        assert caught.value.args[0]["reason"]["type"] == "ManifestError"
    assert run.live() == [expected(0)]


@every_engine
def test_a_trainer_that_stops_answering_is_named_at_the_deadline_and_the_next_version_goes_through(
    make_run: Callable[..., Run], backend: str
) -> None:
    run = make_run(backend, trainers=2)
    run.serve(1)
    for version, deadline_s in zip((2, 4, 6), PATIENCES_S, strict=True):
        run.configure(deadline_s=deadline_s)
        with run.trainers[1].frozen():
            run.trainers[0].call("publish", version)
            with pytest.raises(SyncAbortedError) as caught:
                run.sync(version)
        assert run.live() == [expected(version - 1)]
        run.configure()
        run.trainers[1].call("publish", version)
        run.serve(version + 1)
        assert run.live() == [expected(version + 1)]
        if "trainer-1" in str(caught.value):  # else others were so slow that the version was not on its way by then
            return
    raise AssertionError(caught.value)


def test_a_version_number_is_never_used_twice(make_run: Callable[..., Run]) -> None:
    run = make_run("filesystem")
    for version in (3, 4):
        run.serve(version)
    for version in (4, 2):
        run.publish(version)
        with pytest.raises(SyncAbortedError, match=f"version {version} was to follow version"):
            run.sync(version)
    assert run.live() == [expected(4)]
    run.serve(5)
    assert run.live() == [expected(5)]


def test_staging_memory_is_not_filled_while_it_is_being_loaded(make_run: Callable[..., Run]) -> None:
    run = make_run(trainer={"patience_s": 0.0})
    run.publish(1)
    run.sync(1)
    rank = run.rank()
    run.publish_next(2)
    run.replicas[0].method = "take_only"
    run.sync(2)
    run.publish_next(3)
    with pytest.raises(SyncAbortedError, match="version 2 is still being loaded here"):
        run.sync(3)
    assert rank.call("taken_digest") == expected(2)
    rank.call("release", 2)
    run.replicas[0].method = "commit"
    run.publish(4)
    run.sync(4)
    assert run.live() == [expected(3)]


def test_news_of_a_death_aborts_a_sync_at_once(make_run: Callable[..., Run]) -> None:
    run = make_run()

    async def sync_and_hear() -> None:
        await run.coordinator.connect()
        task = asyncio.create_task(run.coordinator.sync(1))  # nobody publishes version 1
        while not task.done():  # news is of a sync that has begun to wait
            run.coordinator.participant_lost(WorkerDiedError("trainer rank 0 died.", part="watch"))
            await asyncio.sleep(0.02)
        await task

    with pytest.raises(SyncAbortedError, match="trainer rank 0 died"):
        asyncio.run(sync_and_hear())


def test_a_participant_that_never_joins_is_named(free_port: int) -> None:
    rendezvous = Rendezvous.host("127.0.0.1", free_port)
    coordinator = Coordinator(rendezvous, ["trainer-0"], [], SyncConfig(connect_timeout_s=0.1))
    with pytest.raises(DeadlineExceededError, match="trainer-0 to join"):
        asyncio.run(coordinator.connect())
    coordinator.close()


def test_a_taken_port_is_a_typed_error() -> None:
    first = Rendezvous.host()
    with pytest.raises(AddressInUseError, match=str(first.address.port)):
        Rendezvous.host("127.0.0.1", first.address.port)
