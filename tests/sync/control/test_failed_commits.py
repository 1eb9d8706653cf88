"""Versions that too few replicas commit are rolled back, and a replica that cannot prove its state is quarantined."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hop import Replica
from hop_run import MakeRun, expected
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from weightlane.ckpt_engines import QuarantinedError, StorageError, SyncAbortedError, UntouchedError, WeightlaneError
from weightlane.sync import ReplicaState
from weightlane.sync.control.coordinator.replicas import Roster


def test_a_replica_that_cannot_begin_a_commit_serves_on_and_one_that_cannot_prove_its_state_is_quarantined(
    make_run: MakeRun,
) -> None:
    run = make_run(replicas=2)
    run.serve(1)
    run.replicas[1].refuses_with = UntouchedError("it is not staged here.", part="rollout-1")
    run.publish_next(2)
    report = run.sync(2)
    assert report.replicas["rollout-1"].outcome.value == "behind"
    assert "not staged here" in str(report.replicas["rollout-1"].error)
    assert run.coordinator.states()["rollout-1"] is ReplicaState.SERVING
    assert run.live() == [expected(2), expected(1)]
    half_way = QuarantinedError("a rank stopped half-way.", part="rollout-1")
    unlisted = StorageError("no space left after the first tensor.", part="rollout-1")
    its_own: Any = TimeoutError("the read operation timed out")
    for version, failure in ((3, half_way), (4, unlisted), (5, its_own)):
        run.replicas[1].fails_with = failure
        run.publish_next(version)
        assert run.outcomes(version) == {"rollout-0": "committed", "rollout-1": "quarantined"}
        told = run.replicas[1].quarantined_by[-1]
        assert type(told) is (WeightlaneError if failure is its_own else type(failure))
        assert str(failure) in str(told)
        assert run.coordinator.states()["rollout-1"] is ReplicaState.QUARANTINED
        run.step(100)
        # The version it missed is still there for it; so is any newer one.
        assert run.outcomes(version) == {"rollout-1": "committed"}
        assert run.coordinator.states()["rollout-1"] is ReplicaState.SERVING
        assert run.live() == [expected(version)] * 2


def test_a_version_that_too_few_replicas_take_is_taken_back_everywhere_or_serves_nobody(make_run: MakeRun) -> None:
    run = make_run(replicas=3, sync={"quorum": 0.9})
    run.replicas[2].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-2")
    run.fails(1)
    assert set(run.coordinator.states().values()) == {ReplicaState.QUARANTINED}, "there is nothing to go back to"
    assert "the version before 1 is not kept here" in str(run.replicas[0].quarantined_by[0])
    run.serve(2)
    run.replicas[2].fails_with = OSError("cannot read mod\udc80le")  # a name that is not UTF-8
    assert "cannot read mod\\udc80le" in str(run.fails(3).reason)
    assert run.live()[:2] == [expected(2), expected(2)], "two versions serve at once"
    assert run.coordinator.states() == {
        "rollout-0": ReplicaState.SERVING,
        "rollout-1": ReplicaState.SERVING,
        "rollout-2": ReplicaState.QUARANTINED,
    }
    for participant in run.participants():
        with pytest.raises(SyncAbortedError) as caught:
            participant.call("wait", 3, HANG_S)
        assert caught.value.args[0]["reason"]["type"] == "WeightlaneError"
    run.serve(4)


@pytest.mark.parametrize(
    ("backend", "rollout", "state"),
    [
        # Room for the staged version alone, or for another one where that lies in the sender's memory.
        ("gloo", {"staging_limit_bytes": 20_000}, ReplicaState.QUARANTINED),
        ("shm", {"staging_limit_bytes": 20_000}, ReplicaState.SERVING),
    ],
)
def test_a_version_can_be_taken_back_where_memory_allows_to_keep_the_one_before(
    make_run: MakeRun, backend: str, rollout: dict[str, Any], state: ReplicaState
) -> None:
    run = make_run(backend, replicas=2, sync={"quorum": 1.0, "retries": 0}, rollout=rollout)
    run.serve(1)
    run.replicas[1].fails_with = QuarantinedError("a rank stopped half-way.", part="rollout-1")
    run.fails(2)
    assert run.coordinator.states()["rollout-0"] is state
    assert run.live()[0] == expected(1 if state is ReplicaState.SERVING else 2)
    run.serve(3)


@given(replicas=st.integers(1, 300), percent=st.integers(1, 100))
def test_a_quorum_is_the_smallest_number_that_is_that_share(replicas: int, percent: int) -> None:
    roster = Roster(["trainer-0"], [Replica(f"r{index}", {}) for index in range(replicas)], percent / 100)
    assert roster.needed == math.ceil(Fraction(percent, 100) * replicas)
