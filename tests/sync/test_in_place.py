"""Versions that are written into live weights as they come: exact, in a bucket's memory, and never served half-written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import hop
import pytest
import torch
from hop_run import PATIENCES_S, Run, expected
from waiting import HANG_S, NEVER_S, wait_until

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
from weightlane.sync.messages import Ready

IN_PLACE = {"commit": "in_place"}
AT_ONCE = {"retries": 0}
further = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("backend", "trainers", "ranks"),
    [
        ("gloo", 2, 2),
        ("shm", 1, 1),
        ("filesystem", 2, 2),
        pytest.param("gloo", 1, 1, marks=further),
        pytest.param("shm", 2, 2, marks=further),
    ],
)
def test_versions_arrive_bit_for_bit(make_run: Callable[..., Run], backend: str, trainers: int, ranks: int) -> None:
    run = make_run(
        backend, trainers=trainers, replicas=2, ranks=ranks, rollout=IN_PLACE | {"staging_limit_bytes": 4096}
    )
    for version in (1, 2, 3):
        run.serve(version)
        assert run.live() == [expected(version)] * 2 * ranks


@pytest.mark.parametrize("backend", ["gloo", "shm", pytest.param("filesystem", marks=further)])
def test_it_takes_the_memory_of_a_bucket(make_run: Callable[..., Run], backend: str) -> None:
    big, bucket = {"big_mib": 96}, 1 << 20
    run = make_run(backend, trainer=big | {"bucket_bytes": bucket}, rollout=big | IN_PLACE)
    for version in (1, 2):
        run.rank().call("watch_memory")
        run.publish_next(version)
        run.sync(version)
        extra = run.rank().call("extra_memory")
        # What the seals, messages and sockets of a hundred buckets take is not counted.
        assert extra < bucket + (12 << 20), f"{extra / 2**20:.1f} MiB"
    assert run.live() == [hop.digest(hop.weights(2, torch.float32, 96))]


def test_one_that_is_ready_before_another_has_accepted_is_heard(make_run: Callable[..., Run]) -> None:
    run = make_run("filesystem", rollout=IN_PLACE)
    run.serve(1)
    run.add_replica(**IN_PLACE)
    run.add_replica(**IN_PLACE)
    slow = run.rank(2)
    slow.call("accept_late")

    def accept_when_the_other_is_ready() -> None:
        heard = run.coordinator._letters._progress
        wait_until(lambda: (Ready, "rollout-1/0", 1) in heard, "ready replica")
        slow.call("accept")

    accepting = threading.Thread(target=accept_when_the_other_is_ready)
    accepting.start()
    assert run.outcomes(1) == {"rollout-1": "committed", "rollout-2": "committed"}
    accepting.join()
    assert run.live() == [expected(1)] * 3


def test_replicas_of_both_kinds_take_one_version(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=1, rollout=IN_PLACE)
    run.add_replica()
    for version in (1, 2):
        run.serve(version)
        assert run.live() == [expected(version)] * 2


def test_too_little_memory_to_stage_names_both_numbers_and_the_way_out(make_run: Callable[..., Run]) -> None:
    limit = {"staging_limit_bytes": 1}
    run = make_run("gloo", rollout=limit, trainer={"bucket_bytes": 4096})
    run.publish_next(1)
    with pytest.raises(
        SyncAbortedError, match=r"needs .* MiB, .* MiB are allowed.*rollout.commit to in_place"
    ) as caught:
        run.sync(1)
    assert isinstance(caught.value.reason, StagingMemoryError)
    run = make_run("gloo", rollout=limit | IN_PLACE, trainer={"bucket_bytes": 4096})
    run.publish_next(1)
    with pytest.raises(
        SyncAbortedError, match=r"needs a bucket of .* MiB, .* MiB are allowed.*sync.bucket_mib"
    ) as caught:
        run.sync(1)
    assert isinstance(caught.value.reason, StagingMemoryError)


def test_a_bucket_that_was_changed_on_its_way_is_never_written(tmp_path: Path) -> None:
    """Chance says which bucket is struck: the first leaves what there was, a later one a mixture, none the new version."""
    log = tmp_path / "faults"
    faults = {"inner": {}, "rate": 0.3, "kinds": [FaultKind.FLIP.value], "log": str(log)}
    run = Run("faulty:gloo", faults)
    run.begin(rollout=IN_PLACE, sync=AT_ONCE)
    seen: set[bool] = set()
    try:
        for version in range(1, 100):
            before, aborted = run.live(), None
            run.publish_next(version)
            try:
                run.sync(version)
            except SyncAbortedError as error:
                aborted = error
            if aborted is None:
                assert version not in {fault.version for fault in read_fault_log(log)}, "changed bytes were served"
                assert run.live() == [expected(version)]
                continue
            assert "arrived with changed bytes" in str(aborted)
            assert isinstance(aborted.reason, CorruptBucketError)
            touched = run.live() != before
            assert run.coordinator.states()["rollout-0"] is ReplicaState.QUARANTINED or not touched
            seen.add(touched)
            if seen == {True, False}:
                return
    finally:
        run.end()
    raise AssertionError(f"only {seen}")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_sender_that_dies_half_way_leaves_a_mixture_until_the_next_version_and_before_the_first_byte_the_old_one(
    make_run: Callable[..., Run], backend: str
) -> None:
    run = make_run(backend, rollout=IN_PLACE, sync=AT_ONCE)
    run.serve(1)
    run.rank().call("trip", 1, run.trainers[0].pid)
    run.publish_next(2)
    with pytest.raises(SyncAbortedError) as caught:
        run.sync(2)
    assert not isinstance(caught.value.reason, DeadlineExceededError)
    run.rank().call("trip", -1)
    assert run.coordinator.states()["rollout-0"] is ReplicaState.QUARANTINED
    (torn,) = run.live()
    assert torn not in (expected(1), expected(2))
    assert "a mixture" in str(run.replicas[0].quarantined_by.pop())
    run.restart_trainer()
    run.serve(3)
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING
    assert run.live() == [expected(3)]
    run.trainers[0].kill()
    run.configure(deadline_s=0.2)
    with pytest.raises(SyncAbortedError):
        run.sync(4)
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING
    assert run.live() == [expected(3)]
    assert not run.replicas[0].quarantined_by


@pytest.mark.parametrize("backend", ["shm", "filesystem", pytest.param("gloo", marks=further)])
def test_one_that_fails_half_way_does_not_stop_the_others(make_run: Callable[..., Run], backend: str) -> None:
    run = make_run(backend, replicas=2, rollout=IN_PLACE, sync=AT_ONCE)
    run.serve(1)
    run.rank(1).call("trip", 2)
    run.publish_next(2)
    assert run.outcomes(2) == {"rollout-0": "committed", "rollout-1": "quarantined"}
    assert run.rank(0).call("live_digest") == expected(2)
    assert run.rank(1).call("live_digest") not in (expected(1), expected(2))
    run.rank(1).call("trip", -1)
    run.serve(3)
    assert run.live() == [expected(3)] * 2


def test_a_replica_that_does_not_pause_serves_on_and_nobody_waits_longer_than_the_deadline(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(rollout=IN_PLACE, sync=AT_ONCE)
    run.serve(1)
    run.replicas[0].refuses_with = CommitError("it cannot pause, on purpose.", part="rollout-0")
    run.publish_next(2)
    with pytest.raises(SyncAbortedError, match="cannot pause"):
        run.sync(2)  # others do not wait for buckets that nobody takes
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING
    begun = threading.Event()

    async def hangs(version: int) -> CommitReport:
        begun.set()
        await asyncio.sleep(NEVER_S)
        return CommitReport(version, 0.0)

    commit, run.replicas[0].commit = run.replicas[0].commit, hangs  # type: ignore[method-assign]
    run.publish_next(3)
    for deadline_s in PATIENCES_S:
        run.configure(deadline_s=deadline_s)
        with pytest.raises(SyncAbortedError) as caught:
            run.sync(3)
        if begun.is_set():  # else the machine was so busy that the version was not on its way by then
            break
    assert isinstance(caught.value.reason, DeadlineExceededError)
    assert run.live() == [expected(1)]
    assert run.coordinator.states()["rollout-0"] is ReplicaState.QUARANTINED, "nobody knows what it does"
    run.replicas[0].commit = commit  # type: ignore[method-assign]
    run.configure()
    run.serve(4)
    assert run.live() == [expected(4)]


def test_what_cannot_be_taken_back_serves_nobody(make_run: Callable[..., Run]) -> None:
    run = make_run(replicas=2, rollout=IN_PLACE, sync={"quorum": 1.0, "retries": 0})
    run.serve(1)
    run.replicas[1].fails_with = QuarantinedError("stopped half-way.", part="rollout-1")
    run.publish_next(2)
    with pytest.raises(SyncAbortedError):
        run.sync(2)
    assert set(run.coordinator.states().values()) == {ReplicaState.QUARANTINED}
    run.serve(3)
    assert run.live() == [expected(3)] * 2


def test_deltas_follow_versions_that_were_taken_in_place(make_run: Callable[..., Run]) -> None:
    run = make_run("gloo", trainer={"codec": "delta"}, rollout=IN_PLACE | {"scatters": True})
    run.publish(1)
    assert run.sync(1).codec == "dense"
    for version in (2, 3):
        run.trainers[0].call("nudge", version, 17)
        run.publish(version)
        assert run.sync(version).codec == "delta"
    run.rank().call("trip", 1)
    run.publish_next(4)
    with pytest.raises(SyncAbortedError):
        run.sync(4)
    run.rank().call("trip", -1)
    run.trainers[0].call("nudge", 5, 17)
    run.publish(5)
    report = run.sync(5)
    assert report.codec == "dense", "a mixture is no base"
    digests = run.live()
    wanted = hop.nudged(4, [5], 17)
    assert digests == [hop.digest(wanted)]


SPECS = (
    TensorSpec("a", (5, 7), torch.float32),
    TensorSpec("b", (3,), torch.int8),
    TensorSpec("c", (33,), torch.bfloat16),
)


def stream_of(whole_tensors: bool, bucket_bytes: int, seconds: float = HANG_S) -> LiveStream:
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
    receiving.join(HANG_S)
    assert isinstance(caught.pop(), ClosedError)
    with pytest.raises(CommitError, match="written already"):
        stream.begin()

    stream = stream_of(False, 64)
    stream.fail(CorruptBucketError("changed.", part="test"))
    with pytest.raises(CorruptBucketError):
        stream.begin()
    with pytest.raises(CorruptBucketError):
        stream.offer(0, data)

    stream = stream_of(False, 64, seconds=0.05)
    with pytest.raises(DeadlineExceededError, match="bucket 0 of version 7 to be written"):
        stream.offer(0, data)
    with pytest.raises(DeadlineExceededError):
        stream.begin()
