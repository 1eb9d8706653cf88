"""Versions that are written into live weights as they come: exact, in a bucket's memory, and never served half-written."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import hop
import pytest
import torch
from hop_run import MakeRun, expected
from waiting import HANG_S, NEVER_S

from weightlane.ckpt_engines import DeadlineExceededError, StagingMemoryError, UntouchedError
from weightlane.sync import CommitReport, ReplicaState
from weightlane.sync.control.coordinator.version_sync import VersionSync

IN_PLACE = {"commit": "in_place"}
AT_ONCE = {"retries": 0}


def test_versions_arrive_bit_for_bit_in_the_memory_of_a_bucket(make_run: MakeRun) -> None:
    big, bucket = {"big_mib": 24}, 1 << 20
    run = make_run("gloo", trainer=big | {"bucket_bytes": bucket}, rollout=big | IN_PLACE)
    for version in (1, 2):
        run.rank().call("watch_memory")
        run.publish_next(version)
        run.sync(version)
        extra = run.rank().call("extra_memory")
        # What the checksums, messages and sockets of some dozens of buckets take is not counted.
        assert extra < bucket + (12 << 20), f"{extra / 2**20:.1f} MiB"
    assert run.live() == [hop.digest(hop.weights(2, torch.float32, 24))]


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ({}, r"needs .* MiB, .* MiB are allowed.*rollout.commit to in_place"),
        (IN_PLACE, r"needs a bucket of each sender, .* MiB, .* MiB are allowed.*sync.bucket_mib"),
    ],
)
def test_too_little_memory_to_stage_names_both_numbers_and_the_way_out(
    make_run: MakeRun, rollout: dict[str, Any], says: str
) -> None:
    run = make_run("gloo", rollout=rollout | {"staging_limit_bytes": 1})
    assert isinstance(run.fails(1, says).reason, StagingMemoryError)


def test_a_sender_that_dies_half_way_leaves_a_mixture_until_the_next_version_and_before_the_first_byte_the_old_one(
    make_run: MakeRun,
) -> None:
    run = make_run("gloo", trainer={"bucket_bytes": 128}, rollout=IN_PLACE, sync=AT_ONCE)
    run.serve(1)
    run.trainers[0].call("hold_after", 4)  # else everything may be on its way before the first piece is written
    run.rank().call("trip", 1, run.trainers[0].pid)
    assert not isinstance(run.fails(2).reason, DeadlineExceededError)
    run.rank().call("trip", -1)
    assert run.coordinator.states()["rollout-0"] is ReplicaState.QUARANTINED
    (torn,) = run.live()
    assert torn not in (expected(1), expected(2))
    assert "a mixture" in str(run.replicas[0].quarantined_by.pop())
    run.restart_trainer()
    run.serve(3)
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING
    run.trainers[0].kill()
    run.configure(deadline_s=0.2)
    run.aborts(4)
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING
    assert run.live() == [expected(3)]
    assert not run.replicas[0].quarantined_by


def test_one_that_fails_half_way_does_not_stop_the_others_whether_they_stage_or_not(make_run: MakeRun) -> None:
    run = make_run("filesystem", replicas=2, rollout=IN_PLACE, sync=AT_ONCE)
    run.add_replica()
    run.serve(1)
    run.rank(1).call("trip", 2)
    run.publish_next(2)
    assert run.outcomes(2) == {"rollout-0": "committed", "rollout-1": "quarantined", "rollout-2": "committed"}
    first, torn, staged = run.live()
    assert first == staged == expected(2)
    assert torn not in (expected(1), expected(2))
    run.rank(1).call("trip", -1)
    run.serve(3)


def test_a_replica_that_does_not_pause_serves_on_and_nobody_waits_longer_than_the_deadline(make_run: MakeRun) -> None:
    run = make_run(rollout=IN_PLACE, sync=AT_ONCE)
    run.serve(1)
    run.replicas[0].refuses_with = UntouchedError("it cannot pause, on purpose.", part="rollout-0")
    run.fails(2, "cannot pause")  # others do not wait for buckets that nobody takes
    assert run.coordinator.states()["rollout-0"] is ReplicaState.SERVING
    begun = threading.Event()

    async def hangs(version: int) -> CommitReport:
        begun.set()
        await asyncio.sleep(NEVER_S)
        return CommitReport(version, 0.0)

    run.publish_next(3)
    with run.deadlines_pass() as clock, pytest.MonkeyPatch.context() as patch:
        begin = VersionSync._begin_in_place

        def begin_too_late(*arguments: Any) -> None:
            clock.advance(HANG_S)
            begin(*arguments)

        patch.setattr(VersionSync, "_begin_in_place", begin_too_late)
        patch.setattr(run.replicas[0], "commit", hangs)
        aborted = run.aborts(3)
    assert begun.is_set()
    assert isinstance(aborted.reason, DeadlineExceededError)
    assert run.live() == [expected(1)]
    assert run.coordinator.states()["rollout-0"] is ReplicaState.QUARANTINED, "nobody knows what it does"
    run.serve(4)


def test_deltas_follow_versions_that_were_taken_in_place_and_a_mixture_is_no_base(make_run: MakeRun) -> None:
    run = make_run("gloo", trainer={"codec": "delta"}, rollout=IN_PLACE | {"scatters": True})
    run.publish(1)
    assert run.sync(1).codec == "dense"
    assert run.nudge(2).codec == run.nudge(3).codec == "delta"
    run.rank().call("trip", 1)
    run.fails(4)
    run.rank().call("trip", -1)
    assert run.nudge(5).codec == "dense", "a mixture is a base"
    assert run.live() == [hop.digest(hop.nudged(4, [5], 20))]
