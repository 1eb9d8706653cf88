"""Versions get from trainer processes to rollout processes bit for bit, or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from hop_run import MakeRun, expected, outcomes_of
from waiting import HANG_S

from weightlane.ckpt_engines import DeadlineExceededError, SyncAbortedError, WorkerDiedError
from weightlane.sync import Coordinator, Rendezvous, SyncConfig


@pytest.mark.parametrize(
    ("backend", "trainers", "replicas", "ranks", "wire"),
    [("gloo", 3, 2, 1, "float32"), ("shm", 2, 1, 2, "bfloat16")],
)
def test_every_rank_gets_exactly_what_was_published(
    make_run: MakeRun, backend: str, trainers: int, replicas: int, ranks: int, wire: str, socket_dir: Path
) -> None:
    run = make_run(backend, trainers, replicas, ranks, trainer={"wire_dtype": wire}, rollout={"wire_dtype": wire})
    for version in (1, 2, 5):
        run.publish_next(version)
        # The next optimizer step waits for the snapshot only, and must not leak into the version on its way.
        run.step(version + 100)
        report = run.sync(version)
        assert report.version == version
        assert outcomes_of(report) == {replica.name: "committed" for replica in run.replicas}
        assert report.export_s > 0 < min(report.transfer_s, report.install_s)
        for digest in run.live():
            assert digest == expected(version, getattr(torch, wire))
        for participant in run.participants():
            participant.call("wait", version, HANG_S)
    for participant in run.participants():
        participant.call("close")
    assert not list(socket_dir.iterdir()), "sockets left behind"


@pytest.mark.parametrize("backend", ["faulty:shm", "faulty:gloo"])
def test_a_version_of_which_a_bit_changes_is_never_staged(make_run: MakeRun, backend: str) -> None:
    """Whether receivers look at its buckets in the sender's memory, or receive them into their own."""
    run = make_run(backend, sync={"retries": 0})
    run.fails(1, "arrived with changed bytes")


def test_a_trainer_that_stops_answering_is_named_at_the_deadline_and_the_next_version_goes_through(
    make_run: MakeRun,
) -> None:
    run = make_run("gloo", trainers=2)
    run.serve(1)
    with run.trainers[1].frozen(), run.deadlines_pass(lambda names: "trainer-1" in names):
        run.trainers[0].call("publish", 2)
        run.aborts(2, "deadline passed while waiting for .*trainer-1 to finish version 2")
    assert run.live() == [expected(1)]
    run.trainers[1].call("publish", 2)
    run.serve(3)


def test_a_version_number_is_never_used_twice(make_run: MakeRun) -> None:
    run = make_run("filesystem")
    for version in (3, 4):
        run.serve(version)
    for version in (4, 2):
        run.publish(version)
        run.aborts(version, f"version {version} was to follow version")
    assert run.live() == [expected(4)]
    run.serve(5)


def test_news_of_a_death_aborts_a_sync_at_once(make_run: MakeRun) -> None:
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
