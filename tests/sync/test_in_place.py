"""Versions that are written into live weights as they come: exact, in a bucket's memory, and never served half-written."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hop
import pytest
import torch
from hop_run import Run, expected
from soak import DEADLINE_S, soak

from weightlane.ckpt_engines import (
    ClosedError,
    CommitError,
    CorruptBucketError,
    Deadline,
    DeadlineExceededError,
    QuarantinedError,
    StagingMemoryError,
    SyncAbortedError,
    WeightlaneError,
)
from weightlane.ckpt_engines.faulty import FaultKind, read_fault_log
from weightlane.sync import CommitReport, Manifest, ReplicaState, TensorSpec
from weightlane.sync.live_stream import LiveStream

IN_PLACE = {"commit": "in_place"}
IMPATIENT = {"rejoin_s": 3.0, "stall_s": 2.0}
every_engine = pytest.mark.parametrize("backend", ["gloo", "shm", "filesystem"])


def publish_next(run: Run, version: int) -> None:
    run.step(version)
    run.publish(version)


@every_engine
@pytest.mark.parametrize(("trainers", "ranks"), [(1, 1), (2, 2)])
def test_versions_arrive_bit_for_bit(make_run: Callable[..., Run], backend: str, trainers: int, ranks: int) -> None:
    run = make_run(
        backend, trainers=trainers, replicas=2, ranks=ranks, rollout=IN_PLACE | {"staging_limit_bytes": 4096}
    )
    for version in (1, 2, 3):
        publish_next(run, version)
        assert run.outcomes(version) == {"rollout-0": "committed", "rollout-1": "committed"}
        assert run.live() == [expected(version)] * 2 * ranks


@every_engine
def test_it_takes_the_memory_of_a_bucket(make_run: Callable[..., Run], backend: str) -> None:
    big, bucket = {"big_mib": 96}, 1 << 20
    run = make_run(backend, trainer=big | {"bucket_bytes": bucket}, rollout=big | IN_PLACE)
    for version in (1, 2):
        rank_of(run).call("watch_memory")
        publish_next(run, version)
        run.sync(version)
        extra = rank_of(run).call("extra_memory")
        # What the seals, messages and sockets of a hundred buckets take is not counted.
        assert extra < bucket + (12 << 20), f"{extra / 2**20:.1f} MiB"
    assert run.live() == [hop.digest(hop.weights(2, torch.float32, 96))]


def test_one_that_is_ready_before_another_has_accepted_is_heard(make_run: Callable[..., Run]) -> None:
    run = make_run("filesystem", rollout=IN_PLACE, deadline_s=10.0)
    publish_next(run, 1)
    run.sync(1)
    run.add_replica(**IN_PLACE)
    slow = rank_of(run, run.replicas.index(run.add_replica(**IN_PLACE)))
    slow.call("accept_late", 1.0)
    assert run.outcomes(1) == {"rollout-1": "committed", "rollout-2": "committed"}
    assert run.live() == [expected(1)] * 3


def test_replicas_of_both_kinds_take_one_version(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=1, rollout=IN_PLACE)
    run.add_replica()
    for version in (1, 2):
        publish_next(run, version)
        assert run.outcomes(version) == {"rollout-0": "committed", "rollout-1": "committed"}
        assert run.live() == [expected(version)] * 2


def test_too_little_memory_to_stage_names_both_numbers_and_the_way_out(make_run: Callable[..., Run]) -> None:
    limit = {"staging_limit_bytes": 1}
    run = make_run("gloo", rollout=limit, trainer={"bucket_bytes": 4096})
    publish_next(run, 1)
    with pytest.raises(
        SyncAbortedError, match=r"needs .* MiB, .* MiB are allowed.*rollout.commit to in_place"
    ) as caught:
        run.sync(1)
    assert isinstance(caught.value.reason, StagingMemoryError)
    run = make_run("gloo", rollout=limit | IN_PLACE, trainer={"bucket_bytes": 4096})
    publish_next(run, 1)
    with pytest.raises(
        SyncAbortedError, match=r"needs a bucket of .* MiB, .* MiB are allowed.*sync.bucket_mib"
    ) as caught:
        run.sync(1)
    assert isinstance(caught.value.reason, StagingMemoryError)


def test_a_bucket_that_was_changed_on_its_way_is_never_written(make_faulty: Callable[..., Run], tmp_path: Path) -> None:
    """Chance says which bucket is struck: the first leaves the old version serving, a later one a mixture, none a new one."""
    seen: set[ReplicaState] = set()
    for seed in range(25):
        log = tmp_path / f"faults-{seed}"
        run = make_faulty("gloo", seed=seed, rate=0.3, kinds=[FaultKind.FLIP.value], log=str(log))
        before = run.live()
        publish_next(run, 1)
        try:
            run.sync(1)
        except SyncAbortedError as error:
            aborted = error
        else:
            assert not read_fault_log(log), "changed bytes were served"
            assert run.live() == [expected(1)]
            continue
        assert "arrived with changed bytes" in str(aborted)
        assert isinstance(aborted.reason, CorruptBucketError)
        state = run.coordinator.states()["rollout-0"]
        assert bool(run.replicas[0].quarantined_by) == (state is ReplicaState.QUARANTINED)
        assert (run.live() == before) == (state is not ReplicaState.QUARANTINED), "touched, or not touched, unnoticed"
        seen.add(state)
        if seen == {ReplicaState.QUARANTINED, ReplicaState.JOINING}:
            return
    raise AssertionError(f"only {seen}")


@pytest.fixture
def make_faulty(tmp_path: Path, socket_dir: Path) -> Any:
    """A run of one replica over an engine that injects faults; no version is tried twice."""
    made: list[Run] = []

    def make(inner: str, **faults: Any) -> Run:
        for earlier in made:
            earlier.end()
        made.clear()
        run = Run(f"faulty:{inner}", {"inner": {}} | faults)
        made.append(run)
        run.begin(rollout=IN_PLACE, sync=IMPATIENT | {"retries": 0}, deadline_s=6.0)
        return run

    yield make
    for run in made:
        run.end()


def rank_of(run: Run, number: int = 0) -> Any:
    return next(iter(run.replicas[number].ranks.values()))


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_sender_that_dies_half_way_leaves_a_mixture_that_serves_nobody_until_the_next_version(
    make_run: Callable[..., Run], backend: str
) -> None:
    run = make_run(backend, rollout=IN_PLACE, sync=IMPATIENT | {"retries": 0}, deadline_s=8.0)
    publish_next(run, 1)
    run.sync(1)
    rank_of(run).call("trip", -1, 0.15)
    publish_next(run, 2)
    killing = threading.Timer(0.4, run.trainers[0].kill)
    killing.start()
    began = time.monotonic()
    with pytest.raises(SyncAbortedError):
        run.sync(2)
    assert time.monotonic() - began < 8.0
    killing.join()
    rank_of(run).call("trip", -1, 0.0)
    assert run.coordinator.states()["rollout-0"] is ReplicaState.QUARANTINED
    (torn,) = run.live()
    assert torn not in (expected(1), expected(2))
    assert "a mixture" in str(run.replicas[0].quarantined_by[0])
    run.restart_trainer()
    publish_next(run, 3)
    assert run.outcomes(3) == {"rollout-0": "committed"}
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING
    assert run.live() == [expected(3)]


def test_a_sender_that_dies_before_the_first_byte_leaves_the_old_version_serving(make_run: Callable[..., Run]) -> None:
    run = make_run("gloo", rollout=IN_PLACE, sync=IMPATIENT | {"retries": 0}, deadline_s=4.0)
    publish_next(run, 1)
    run.sync(1)
    run.trainers[0].kill()
    with pytest.raises(SyncAbortedError):
        run.sync(2)
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING
    assert run.live() == [expected(1)]
    assert not run.replicas[0].quarantined_by


@every_engine
def test_one_that_fails_half_way_does_not_stop_the_others(make_run: Callable[..., Run], backend: str) -> None:
    run = make_run(backend, replicas=2, rollout=IN_PLACE, sync=IMPATIENT | {"retries": 0})
    publish_next(run, 1)
    run.sync(1)
    rank_of(run, 1).call("trip", 2)
    publish_next(run, 2)
    assert run.outcomes(2) == {"rollout-0": "committed", "rollout-1": "quarantined"}
    assert rank_of(run, 0).call("live_digest") == expected(2)
    assert rank_of(run, 1).call("live_digest") not in (expected(1), expected(2))
    rank_of(run, 1).call("trip", -1)
    publish_next(run, 3)
    assert run.outcomes(3) == {"rollout-0": "committed", "rollout-1": "committed"}
    assert run.live() == [expected(3)] * 2


def test_a_replica_that_does_not_pause_serves_on_and_nobody_waits_longer_than_the_deadline(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(rollout=IN_PLACE, sync=IMPATIENT | {"retries": 0}, deadline_s=8.0)
    publish_next(run, 1)
    run.sync(1)
    run.replicas[0].refuses_with = CommitError("it cannot pause, on purpose.", part="rollout-0")
    publish_next(run, 2)
    began = time.monotonic()
    with pytest.raises(SyncAbortedError, match="cannot pause"):
        run.sync(2)
    assert time.monotonic() - began < 6.0, "others waited for buckets that nobody took"
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING

    async def hangs(version: int) -> CommitReport:
        await asyncio.sleep(60.0)
        return CommitReport(version, 0.0)

    commit, run.replicas[0].commit = run.replicas[0].commit, hangs  # type: ignore[method-assign]
    publish_next(run, 3)
    began = time.monotonic()
    with pytest.raises(SyncAbortedError, match="of version 3 to be") as caught:
        run.sync(3)
    assert isinstance(caught.value.reason, DeadlineExceededError)
    assert time.monotonic() - began < 11.0
    assert run.live() == [expected(1)]
    assert run.coordinator.states()["rollout-0"] is ReplicaState.QUARANTINED, "nobody knows what it does"
    run.replicas[0].commit = commit  # type: ignore[method-assign]
    publish_next(run, 4)
    assert run.outcomes(4) == {"rollout-0": "committed"}
    assert run.live() == [expected(4)]


def test_what_cannot_be_taken_back_serves_nobody(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=2, rollout=IN_PLACE, sync={"quorum": 1.0, "retries": 0})
    publish_next(run, 1)
    run.sync(1)
    run.replicas[1].fails_with = QuarantinedError("stopped half-way.", part="rollout-1")
    publish_next(run, 2)
    with pytest.raises(SyncAbortedError):
        run.sync(2)
    assert set(run.coordinator.states().values()) == {ReplicaState.QUARANTINED}
    publish_next(run, 3)
    assert set(run.outcomes(3).values()) == {"committed"}
    assert run.live() == [expected(3)] * 2


def test_deltas_follow_versions_that_were_taken_in_place(make_run: Callable[..., Run]) -> None:
    run = make_run("gloo", trainer={"codec": "delta"}, rollout=IN_PLACE | {"scatters": True})
    run.publish(1)
    assert run.sync(1).codec == "dense"
    for version in (2, 3):
        run.trainers[0].call("nudge", version, 17)
        run.publish(version)
        assert run.sync(version).codec == "delta"
    rank_of(run).call("trip", 1)
    publish_next(run, 4)
    with pytest.raises(SyncAbortedError):
        run.sync(4)
    rank_of(run).call("trip", -1)
    run.trainers[0].call("nudge", 5, 17)
    run.publish(5)
    report = run.sync(5)
    assert report.codec == "dense", "a mixture is no base"
    digests = run.live()
    wanted = hop.nudged(4, [5], 17)
    assert digests == [hop.digest(wanted)]


def test_a_soak_in_place_ends_with_no_hang_no_wrong_weight_and_every_fault_reported(tmp_path: Path) -> None:
    log = tmp_path / "faults.jsonl"
    result = soak("shm", {}, versions=25, seed=3, rate=0.02, log=log, commit="in_place")
    told = "\n".join(result.lines())
    assert not result.wrong, told
    assert not result.unaccounted, told
    assert result.slowest_sync_s < DEADLINE_S + 1.0, told
    assert result.faults >= 5, told
    assert result.committed >= 17, told


SPECS = (
    TensorSpec("a", (5, 7), torch.float32),
    TensorSpec("b", (3,), torch.int8),
    TensorSpec("c", (33,), torch.bfloat16),
)


def stream_of(whole_tensors: bool, bucket_bytes: int, seconds: float = 5.0) -> LiveStream:
    manifest = Manifest(7, SPECS, bucket_bytes, whole_tensors=whole_tensors)
    return LiveStream(manifest, "r/0", Deadline.after(seconds))


@pytest.mark.parametrize("whole_tensors", [False, True])
@pytest.mark.parametrize("bucket_bytes", [64, 128, 4096])
def test_pieces_are_every_element_once_in_order(whole_tensors: bool, bucket_bytes: int) -> None:
    stream = stream_of(whole_tensors, bucket_bytes)
    manifest = stream.manifest
    data = torch.randint(0, 255, (manifest.total_bytes,), dtype=torch.uint8)
    wanted = manifest.views(data)
    buffer = torch.empty(manifest.largest_bucket_bytes, dtype=torch.uint8)

    def receive() -> None:
        for index in range(manifest.bucket_count):
            start, stop = manifest.window(index)
            buffer[: stop - start] = data[start:stop]
            stream.offer(index, buffer[: stop - start])
        stream.finish()

    receiving = threading.Thread(target=receive)
    receiving.start()
    got = {spec.name: torch.empty(spec.numel, dtype=spec.dtype) for spec in SPECS}
    reached = dict.fromkeys(got, 0)
    stream.begin()
    for piece in stream.pieces():
        assert piece.start == reached[piece.name]
        reached[piece.name] += piece.values.numel()
        got[piece.name][piece.start : reached[piece.name]] = piece.values
    receiving.join()
    assert reached == {spec.name: spec.numel for spec in SPECS}
    for name, tensor in got.items():
        assert torch.equal(tensor.view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8))


def test_whoever_fails_ends_both_sides_of_a_stream() -> None:
    stream, data = stream_of(False, 64), torch.zeros(64, dtype=torch.uint8)
    caught: list[WeightlaneError] = []

    def receive(stream: LiveStream) -> None:
        try:
            stream.offer(0, data)
            stream.offer(1, data)
        except WeightlaneError as error:
            caught.append(error)

    receiving = threading.Thread(target=receive, args=(stream,))
    receiving.start()
    stream.begin()
    next(stream.pieces())  # and no more
    receiving.join(5.0)
    assert isinstance(caught.pop(), ClosedError)
    with pytest.raises(CommitError, match="written already"):
        stream.begin()

    stream = stream_of(False, 64)
    stream.fail(CorruptBucketError("changed.", part="test"))
    with pytest.raises(CorruptBucketError):
        stream.begin()
    with pytest.raises(CorruptBucketError):
        stream.offer(0, data)

    stream = stream_of(False, 64, seconds=0.2)
    with pytest.raises(DeadlineExceededError, match="bucket 0 of version 7 to be written"):
        stream.offer(0, data)
    with pytest.raises(DeadlineExceededError):
        stream.begin()
