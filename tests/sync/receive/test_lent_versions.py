"""Versions that stay in their sender's memory: nobody ever loads what was written over."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from hop_run import MakeRun, expected
from waiting import HANG_S, NEVER_S

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    CommitError,
    ConfigError,
    DeadlineExceededError,
    DeltaBaseError,
    PeerLostError,
    QuarantinedError,
)
from weightlane.sync import LocalShard, Manifest, Publisher, Rendezvous, SyncConfig, TensorSpec
from weightlane.sync.receive.staged_version import ViewedVersion
from weightlane.sync.receive.staging import Staging
from weightlane.sync.send.sending_rank import SendMemory
from weightlane.sync.send.snapshot.snapshot import Progress, Snapshot
from weightlane.sync.version.box import Box
from weightlane.sync.version.manifest_message import DeltaSegment

SPEC = TensorSpec("w", (16,), torch.float32)


@pytest.mark.parametrize("patience_s", [0.0, HANG_S], ids=["other memory is taken", "it is waited for"])
def test_the_next_snapshot_does_not_write_over_what_somebody_still_loads(make_run: MakeRun, patience_s: float) -> None:
    run = make_run(trainer={"patience_s": patience_s})
    run.publish_next(1)
    run.replicas[0].method = "take_only"
    run.sync(1)
    run.publish_next(2)
    run.trainers[0].tell("step", 3)  # its fence is passed when the snapshot of 2 is taken, which needs memory
    if not patience_s:
        run.trainers[0].answer()
    assert run.rank().call("taken_digest") == expected(1), "what is being loaded was written over"
    run.rank().call("release", 1)
    if patience_s:
        run.trainers[0].answer()
    run.replicas[0].method = "commit"
    run.sync(2)
    assert run.live() == [expected(2)]


def test_what_is_loaded_stays_whole_when_its_session_ends(make_run: MakeRun) -> None:
    run = make_run(replicas=2, trainer={"patience_s": HANG_S})
    run.publish_next(1)
    run.replicas[0].method = "take_only"
    run.sync(1)
    run.lose_replica(1)  # the next version needs another session
    run.fails(2, "version 1 is still being loaded here")
    run.publish_next(3)
    run.trainers[0].call("step", 4)
    assert run.rank().call("taken_digest") == expected(1), "what is being loaded was written over"
    run.rank().call("release", 1)
    run.publish(4)
    run.replicas[0].method = "commit"
    assert run.outcomes(4) == {"rollout-0": "committed", "rollout-1": "lost"}
    assert run.rank().call("live_digest") == expected(4)


def test_a_failed_commit_gives_the_memory_back(make_run: MakeRun) -> None:
    run = make_run(replicas=2, sync={"quorum": 0.5}, trainer={"patience_s": HANG_S})
    run.serve(1)
    for version in (2, 3, 4):
        run.replicas[1].fails_with = QuarantinedError("stopped half-way.", part="rollout-1")
        run.publish_next(version)
        assert run.outcomes(version) == {"rollout-0": "committed", "rollout-1": "quarantined"}
        assert run.rank().call("live_digest") == expected(version)
    run.serve(5)
    run.step(6)


def staged(staging: Staging, version: int, identity: str = "") -> None:
    """`version` lies in its sender's memory."""
    manifest = Manifest(version, (SPEC,), 64, lasting=True, identity=identity)
    staging.reserve(manifest, viewed=True)
    staging.complete_viewed(ViewedVersion(manifest, [(0, torch.full((64,), version, dtype=torch.uint8))]))


def test_a_rollback_never_loads_an_older_version_than_the_one_that_served() -> None:
    staging = Staging("rollout-0/0", 0, torch.device("cpu"))
    staged(staging, 1)
    staging.commit(1)
    assert staging.clean_up(1)
    staged(staging, 2, identity="a/2")
    staging.commit(2)
    assert staging.clean_up(2, keep=False), "no copy is kept where deltas go into the live weights"
    staged(staging, 3)
    with pytest.raises(CommitError, match="not kept here"):
        staging.take_previous(3)


def test_what_is_kept_is_neither_dropped_for_its_own_delta_nor_half_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, copied = Staging("rollout-0/0", 100, torch.device("cpu")), ViewedVersion.copy_to
    base = {"base_version": 1, "base_identity": "a/1", "segments": (DeltaSegment(0, Box((0,), (16,)), nbytes=12),)}
    delta = Manifest(2, (SPEC,), 64, codec="delta", identity="a/2", **base)  # type: ignore[arg-type]
    staged(staging, 1, identity="a/1")
    staging.commit(1)
    for _ in range(2):  # before its copy, and after
        with pytest.raises(DeltaBaseError, match=r"a delta that needs 0\.0 MiB beside version 1"):
            staging.reserve(delta)
        assert staging.kept_identity("") == "a/1"
        assert staging.clean_up(1)
    staged(staging, 2, identity="b/2")
    staging.commit(2)

    def room_is_needed_meanwhile(viewed: ViewedVersion, stream: torch.Tensor) -> None:
        staging.reserve(Manifest(3, (SPEC,), 64))
        copied(viewed, stream)

    monkeypatch.setattr(ViewedVersion, "copy_to", room_is_needed_meanwhile)
    assert staging.clean_up(2)
    assert staging.kept_identity("") == "", "memory beyond the limit, or a version without its bytes"
    with pytest.raises(CommitError, match="not kept here"):
        staging.take_previous(3)


def publisher_of(rendezvous: Rendezvous, socket_dir: Any, *specs: TensorSpec, **options: Any) -> Publisher:
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir), **options})
    data = [torch.zeros(spec.shape) for spec in specs]
    tied = [LocalShard.whole(replace(specs[-1], name="lm_head.weight"), data[-1])]
    shards = [*map(LocalShard.whole, specs, data), *tied]
    config = SyncConfig(bucket_mib=1 / 16, deadline_s=NEVER_S)
    return Publisher("t-0", rendezvous.address, shards=shards, engine=engine, config=config)


def test_a_version_that_is_no_whole_number_is_not_published(rendezvous: Rendezvous, socket_dir: Any) -> None:
    with closing(publisher_of(rendezvous, socket_dir, SPEC)) as publisher:
        for version in ("7", 1.0, None, True, -1):
            with pytest.raises(ConfigError, match="a version is a whole number from 0, not"):
                publisher.publish(version)  # type: ignore[arg-type]
            assert not publisher.busy
        publisher.publish(torch.tensor(3))  # type: ignore[arg-type]  # as a counter may be
        publisher.fence()


def test_a_publisher_that_cannot_join_takes_no_memory(
    rendezvous: Rendezvous, socket_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous.close()
    monkeypatch.setattr(SendMemory, "_new", pytest.fail)
    with pytest.raises(PeerLostError):
        publisher_of(rendezvous, socket_dir, SPEC)


def test_the_fence_waits_for_all_that_it_names_and_for_nothing_else(
    rendezvous: Rendezvous, socket_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = (replace(SPEC, name=name) for name in ("early", "late"))
    read_late = threading.Event()

    def take(snapshot: Snapshot, _memory: Any, _after: Any, progress: Progress, _remains: Any = None) -> None:
        progress.advance(snapshot.ends["early"], snapshot.ends["early"])
        assert read_late.wait(HANG_S)
        progress.advance(snapshot.nbytes, snapshot.read_end)

    monkeypatch.setattr(Snapshot, "take", take)
    with closing(publisher_of(rendezvous, socket_dir, early, late)) as publisher:
        publisher.publish(1)
        publisher.fence(["early"])
        publisher._deadline_s = 0.0
        publisher.fence(["early", "of another rank"])
        for names in (["early", "late"], ["lm_head.weight", "early"], None):  # the head is tied to `late`
            with pytest.raises(DeadlineExceededError, match="snapshot of version 1"):
                publisher.fence(names)
        read_late.set()
        publisher._deadline_s = NEVER_S
        for names in (["early", "late"], None):
            publisher.fence(names)
