"""Versions that stay in their sender's memory: nobody ever loads what was written over."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hop_run import MakeRun, expected
from waiting import HANG_S

from weightlane.ckpt_engines import QuarantinedError
from weightlane.sync import Manifest, TensorSpec
from weightlane.sync.staging import Staging, Stream
from weightlane.sync.subscriber import adjoined

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
    run.publish_next(2)
    run.aborts(2, "version 1 is still being loaded here")
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


def staged(staging: Staging, version: int) -> torch.Tensor:
    """`version` lies in its sender's memory, which is returned."""
    manifest = Manifest(version, (SPEC,), 64, lasting=True)
    lent = torch.full((64,), version, dtype=torch.uint8)
    staging.reserve(manifest, lent=True)
    staging.complete(manifest, Stream([(0, lent)]))
    return lent


def value(tensors: dict[str, torch.Tensor]) -> int:
    return int(tensors["w"].view(torch.uint8)[0])


def test_lent_memory_is_needed_until_it_is_loaded_and_its_verdict_is_known() -> None:
    staging = Staging("rollout-0/0", 0, torch.device("cpu"))
    lent = staged(staging, 1)
    assert not staging.settle(1)
    assert value(staging.take(1)) == 1
    staging.commit(1)
    assert not staging.settle(1), "it is being loaded"
    staging.release(1)
    assert staging.settle(1)
    lent.zero_()
    staged(staging, 2)
    previous, tensors = staging.take_previous(2)
    assert (previous, value(tensors)) == (1, 1), "what a rollback needs was not copied"
    staging.release(1)
    staging.abort(2)
    assert staging.settle(2)
    assert staging.take_previous(2)[0] == 1, "a version that was given up took the place of the one that serves"


def test_closed_staging_keeps_no_memory_but_what_somebody_looks_at() -> None:
    staging = Staging("rollout-0/0", 0, torch.device("cpu"))
    memory = np.ones(64, dtype=np.uint8)
    alive = weakref.ref(memory)
    manifest = Manifest(1, (SPEC,), 64, lasting=True)
    staging.reserve(manifest, lent=True)
    staging.complete(manifest, Stream([(0, torch.from_numpy(memory))]))
    del memory
    tensors = staging.take(1)
    staging.close()
    assert value(tensors) == 1
    assert alive() is not None
    del tensors
    assert alive() is None, "the memory of a closed subscriber is kept"


def test_buckets_are_one_stream_only_where_they_adjoin() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    whole = adjoined([memory[10:20], memory[20:20], memory[20:64]])
    assert whole is not None
    assert torch.equal(whole, memory[10:64])
    assert whole.data_ptr() == memory[10:].data_ptr()
    assert adjoined([memory[10:20], memory[21:30]]) is None
    assert adjoined([memory[10:20], memory.clone()[20:30]]) is None
    empty = adjoined([])
    assert empty is not None
    assert not empty.numel()
