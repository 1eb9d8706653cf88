"""Versions that are sent as what changed: bit for bit what a full version would be, whatever fails on the way."""

from __future__ import annotations

from typing import Any

import pytest
from hop import digest, nudged
from hop_run import MakeRun, Run, expected

from weightlane.ckpt_engines import QuarantinedError, SyncAbortedError

EVERY = 20
further = pytest.mark.exhaustive


def nudge(run: Run, version: int) -> Any:
    """A step that changes little, and its version."""
    for trainer in run.trainers:
        trainer.call("nudge", version, EVERY)
    run.publish(version)
    return run.sync(version)


def after(first: int, versions: list[int]) -> dict[str, str]:
    return digest(nudged(first, versions, EVERY))


def begun(make_run: MakeRun, backend: str = "shm", **arguments: Any) -> Run:
    """A run that sends deltas, and has committed version 1."""
    trainer = {"codec": "delta"} | arguments.pop("trainer", {})
    run = make_run(backend, trainer=trainer, **arguments)
    run.publish(1)
    assert run.sync(1).codec == "dense"
    return run


@pytest.mark.parametrize(
    ("backend", "trainers", "scatters"),
    [
        ("gloo", 2, True),
        ("shm", 1, False),
        ("shm", 2, True),
        ("filesystem", 2, False),
        pytest.param("gloo", 1, False, marks=further),
        pytest.param("shm", 2, False, marks=further),
        pytest.param("filesystem", 1, True, marks=further),
    ],
)
def test_deltas_of_all_ranks_arrive_bit_for_bit(make_run: MakeRun, backend: str, trainers: int, scatters: bool) -> None:
    run = begun(make_run, backend, trainers=trainers, replicas=2, rollout={"scatters": scatters})
    for version in range(2, 8):
        report = nudge(run, version)
        assert report.codec == "delta"
        assert {part.outcome.value for part in report.replicas.values()} == {"committed"}
        assert run.live() == [after(0, list(range(2, version + 1)))] * 2


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


@pytest.mark.parametrize("scatters", [False, True])
def test_a_replica_that_was_started_anew_gets_a_full_version_with_the_others(make_run: MakeRun, scatters: bool) -> None:
    run = begun(make_run, replicas=2, rollout={"scatters": scatters})
    nudge(run, 2)
    run.restart_replica(1)
    report = nudge(run, 3)
    assert report.codec == "dense"
    assert "lacks" in report.codec_reason
    assert run.live() == [after(0, [2, 3])] * 2
    assert nudge(run, 4).codec == "delta"
    assert run.live() == [after(0, [2, 3, 4])] * 2


def test_a_trainer_that_was_started_anew_and_counts_alike_is_not_believed(make_run: MakeRun) -> None:
    run = begun(make_run)
    nudge(run, 2)
    run.restart_trainer()
    report = nudge(run, 3)  # of the weights that a new trainer begins with
    assert report.codec == "dense"
    assert run.live() == [after(0, [3])]


@pytest.mark.parametrize("scatters", [False, True])
def test_a_delta_that_was_committed_by_too_few_is_taken_back_by_exchanging_values(
    make_run: MakeRun, scatters: bool
) -> None:
    run = begun(make_run, replicas=2, sync={"quorum": 1.0}, rollout={"scatters": scatters})
    nudge(run, 2)
    run.replicas[1].fails_with = QuarantinedError("stopped half-way.", part="rollout-1")
    with pytest.raises(SyncAbortedError):
        nudge(run, 3)
    assert run.live()[0] == after(0, [2]), "two versions serve at once"
    assert nudge(run, 4).codec == "dense"  # one replica cannot prove what it has
    assert run.live() == [after(0, [2, 3, 4])] * 2
    assert nudge(run, 5).codec == "delta"
    assert run.live() == [after(0, [2, 3, 4, 5])] * 2


@pytest.mark.parametrize("scatters", [False, True])
def test_a_delta_that_some_refuse_to_load_changes_nothing_there(make_run: MakeRun, scatters: bool) -> None:
    run = begun(make_run, replicas=2, rollout={"scatters": scatters})
    run.replicas[1].refuses_with = QuarantinedError("busy.", part="rollout-1")
    nudge(run, 2)
    assert run.live() == [after(0, [2]), after(0, [])]
    assert nudge(run, 3).codec == "dense"
    assert run.live() == [after(0, [2, 3])] * 2


def test_where_no_copy_is_kept_and_none_can_scatter_versions_come_in_full(make_run: MakeRun) -> None:
    run = begun(make_run, "shm", rollout={"staging_limit_bytes": 4096})
    for version in (2, 3):
        report = nudge(run, version)
        assert report.codec == "dense"
        assert run.live() == [after(0, list(range(2, version + 1)))]
        assert len(report.failures) == 1, "the refusal is told"


def test_now_and_then_a_version_is_sent_in_full(make_run: MakeRun) -> None:
    run = begun(make_run, trainer={"full_every": 3})
    assert [nudge(run, version).codec for version in range(2, 8)] == ["delta", "delta", "dense"] * 2
    assert run.live() == [after(0, list(range(2, 8)))]


def test_auto_measures_dense_first_and_gives_its_reasons(make_run: MakeRun) -> None:
    run = begun(make_run, trainer={"codec": "auto"})
    reports = [nudge(run, version) for version in range(2, 8)]
    assert [report.codec for report in reports[:2]] == ["dense"] * 2
    assert all("dense is being measured" in report.codec_reason for report in reports[:2])
    assert "a delta is expected to take" in reports[-1].codec_reason
    assert run.live() == [after(0, list(range(2, 8)))]
