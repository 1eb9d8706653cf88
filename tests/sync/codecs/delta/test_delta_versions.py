"""Versions that are sent as what changed: bit for bit what a full version would be, whatever fails on the way."""

from __future__ import annotations

from typing import Any

import pytest
from hop import digest, nudged
from hop_run import MakeRun, Run, expected
from waiting import NEVER_S

from weightlane.ckpt_engines import QuarantinedError, SyncAbortedError


def after(first: int, versions: list[int]) -> dict[str, str]:
    return digest(nudged(first, versions, 20))


def begun(make_run: MakeRun, backend: str = "shm", **arguments: Any) -> Run:
    """A run that sends deltas, and has committed version 1."""
    trainer = {"codec": "delta"} | arguments.pop("trainer", {})
    run = make_run(backend, trainer=trainer, **arguments)
    run.publish(1)
    assert run.sync(1).codec == "dense"
    return run


def test_a_delta_takes_little_on_the_wire(make_run: MakeRun) -> None:
    run = begun(make_run)
    run.step(1)
    run.publish(2)
    full = run.sync(2)
    assert full.codec == "dense"
    assert "the delta reached" in full.codec_reason, "what changed completely was sent as a delta"
    run.publish(3)
    assert run.sync(3).sent_bytes < full.sent_bytes / 10
    assert run.live() == [expected(1)]


def test_a_replica_that_refused_a_delta_and_one_or_a_trainer_that_was_started_anew_get_or_send_a_full_version(
    make_run: MakeRun,
) -> None:
    run = begun(make_run, replicas=2)
    run.nudge(2)
    run.restart_replica(1)
    report = run.nudge(3)
    assert report.codec == "dense"
    assert "lacks" in report.codec_reason
    assert run.live() == [after(0, [2, 3])] * 2
    assert run.nudge(4).codec == "delta"
    assert run.live() == [after(0, [2, 3, 4])] * 2
    run.restart_trainer()
    assert run.nudge(5).codec == "dense", "a trainer that counts alike is believed"
    assert run.live() == [after(0, [5])] * 2, "a new trainer begins with other weights"
    run.replicas[1].refuses_with = QuarantinedError("busy.", part="rollout-1")
    assert run.nudge(6).codec == "delta"
    assert run.live() == [after(0, [5, 6]), after(0, [5])]
    assert run.nudge(7).codec == "dense"
    assert run.live() == [after(0, [5, 6, 7])] * 2


def test_a_delta_that_was_committed_by_too_few_is_taken_back_by_exchanging_values(make_run: MakeRun) -> None:
    run = begun(make_run, replicas=2, sync={"quorum": 1.0}, rollout={"scatters": True})
    run.nudge(2)
    run.replicas[1].fails_with = QuarantinedError("stopped half-way.", part="rollout-1")
    with pytest.raises(SyncAbortedError):
        run.nudge(3)
    assert run.live()[0] == after(0, [2]), "two versions serve at once"
    assert run.nudge(4).codec == "dense"  # one replica cannot prove what it has
    assert run.live() == [after(0, [2, 3, 4])] * 2
    assert run.nudge(5).codec == "delta"
    assert run.live() == [after(0, [2, 3, 4, 5])] * 2


def test_where_no_copy_is_kept_and_none_can_scatter_versions_come_in_full(make_run: MakeRun) -> None:
    run = begun(make_run, "shm", rollout={"staging_limit_bytes": 4096})
    report = run.nudge(2)
    assert report.codec == "dense"
    assert run.live() == [after(0, [2])]
    assert len(report.failures) == 1, "the refusal is told"


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_newcomer_gets_in_full_what_lies_in_the_store_as_a_delta_and_deltas_also_alone(
    make_run: MakeRun, trainers: int
) -> None:
    run = begun(make_run, "filesystem", trainers=trainers, sync={"retries": 0})
    run.add_replica()
    assert run.outcomes(1) == {"rollout-1": "committed"}
    run.coordinator.remove("rollout-0")  # nobody is left whom the session's plan names
    assert run.nudge(2).codec == "delta"
    run.trainers[0].call("wait_stored", 2, NEVER_S)  # which returns, since it is not stored
    run.add_replica()
    assert run.outcomes(2) == {"rollout-2": "committed"}
    assert run.live()[1:] == [after(0, [2])] * 2
    assert run.nudge(3).codec == "delta"
    assert run.live()[1:] == [after(0, [2, 3])] * 2
