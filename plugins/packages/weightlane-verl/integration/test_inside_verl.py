"""verl's own manager and workers send weights over weightlane's engines, on a CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from cpu_run import (
    HANG_S,
    Replica,
    Run,
    begin,
    cached_by,
    connect,
    facts,
    outcome,
    outcomes,
    received_by,
    sent,
    set_rollout,
)
from ray.exceptions import RayActorError
from verl.checkpoint_engine import CheckpointEngineManager
from weightlane_verl import CachingManager

from weightlane.ckpt_engines import CorruptBucketError, DeadlineExceededError, PeerLostError

NEVER_S = 1e6
"""A deadline that no test lives to see."""
STEPS = iter(range(1, 1000))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    before = set(Path("/dev/shm").iterdir())
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        started = Run(3)
        processes = [psutil.Process(pid) for pid in started.trainer_pids + started.rollout_pids]
        yield started
    finally:
        ray.shutdown()
    assert not psutil.wait_procs(processes, HANG_S)[1]
    assert not set(Path("/dev/shm").iterdir()) - before


def check(manager: CheckpointEngineManager, step: int) -> None:
    """Every rollout worker of the manager has the bits of version `step`, and nothing else."""
    for replica in manager.replicas:
        is_version(received_by(replica), step)


def is_version(found: dict[str, Any], step: int) -> None:
    expected = facts(sent(step).items())
    assert list(found) == list(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize(
    "options", [{"engine": "shm"}, {"engine": "gloo"}, {"engine": "filesystem"}, {"cache": True}], ids=str
)
def test_every_rollout_worker_gets_the_bits_that_the_trainer_yields(
    run: Run, options: dict[str, Any], tmp_path: Path
) -> None:
    if options.get("engine") == "filesystem":
        options = options | {"options": {"path": str(tmp_path)}}
    manager = run.manager(run.replicas[:2], **options)
    for step in (next(STEPS), next(STEPS), next(STEPS)):
        metrics = run.update(manager, step)
        check(manager, step)
        assert metrics["checkpoint_engine/sent_bytes"] >= sum(tensor.nbytes for tensor in sent(step).values())
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("bucket")]


def test_replicas_are_added_and_removed_between_two_updates(run: Run) -> None:
    manager = run.manager(run.replicas, engine="shm")
    manager.remove_replicas(run.replicas[2:])
    first, second, third = next(STEPS), next(STEPS), next(STEPS)
    run.update(manager, first)
    check(manager, first)
    manager.add_replicas(run.replicas[2:])
    run.update(manager, second)
    check(manager, second)
    manager.remove_replicas(run.replicas[:1])
    run.update(manager, third)
    check(manager, third)
    is_version(received_by(run.replicas[0]), second)


def test_requests_are_aborted_only_when_the_weights_are_in_the_rollouts_memory(run: Run) -> None:
    replicas = run.replicas[:2]
    manager, step = run.manager(replicas, CachingManager, cache=True), next(STEPS)
    cached: list[dict[str, Any]] = []
    for replica in replicas:
        replica.on_abort = lambda: cached.extend(map(cached_by, replicas))
    metrics = run.update(manager, step)
    assert metrics["checkpoint_engine/sent_bytes"] > 0
    assert len(cached) == 4
    for each in cached:
        is_version(each, step)
    check(manager, step)


def test_a_changed_byte_is_an_error_and_the_next_update_works(run: Run) -> None:
    faults = {"kinds": ["flip"], "rate": 1.0}
    manager = run.manager(run.replicas[:2], engine="faulty:shm", options=faults, timeout_s=NEVER_S)
    trainers, rollouts = outcomes(run, manager, next(STEPS))
    assert isinstance(trainers[0], PeerLostError)
    assert any(isinstance(error, CorruptBucketError) for error in rollouts)
    assert all(isinstance(error, CorruptBucketError | PeerLostError) for error in rollouts)
    update_works(run, run.replicas[:2])


def update_works(run: Run, replicas: list[Replica]) -> None:
    """Workers that are left after a failed update take part in the next one."""
    manager, step = run.manager(replicas, engine="shm"), next(STEPS)
    run.update(manager, step)
    check(manager, step)


def test_an_error_of_the_trainers_generator_ends_the_update_everywhere(run: Run) -> None:
    manager = run.manager(run.replicas[:2], engine="shm", timeout_s=NEVER_S)
    run.set(raises_at="empty")
    with pytest.raises((ArithmeticError, PeerLostError)):  # verl raises the one that it hears of first
        run.update(manager, next(STEPS))
    _, rollouts = outcomes(run, manager, next(STEPS))
    assert all(isinstance(error, PeerLostError) for error in rollouts)
    update_works(run, run.replicas[:2])


def test_a_frozen_rollout_worker_ends_the_update_by_the_deadline(run: Run) -> None:
    manager = run.manager(run.replicas[:2], engine="shm", timeout_s=NEVER_S)
    set_rollout(run.replicas[1], freezes_at="empty")
    rollouts = connect(run, manager)
    ray.get(run.trainers.workers[0].__ray_call__.remote(_allow_a_moment))
    sends, receives = begin(run, rollouts, next(STEPS))
    error = outcome(sends[0])
    assert isinstance(error, DeadlineExceededError)
    assert "(peer rollout-" in str(error)
    assert outcome(sends[1]) == {}
    assert isinstance(outcome(receives[0]), PeerLostError)
    os.kill(run.rollout_pids[1], signal.SIGCONT)
    assert isinstance(outcome(receives[1]), PeerLostError)
    update_works(run, run.replicas[:2])


def _allow_a_moment(worker: Any) -> None:
    worker.checkpoint_engine._stream._timeout_s = 0.5


def test_a_killed_rollout_worker_ends_the_update_and_the_others_go_on_without_it(run: Run) -> None:
    manager = run.manager(run.replicas, engine="shm", timeout_s=NEVER_S)
    set_rollout(run.replicas[2], dies_at="empty")
    trainers, rollouts = outcomes(run, manager, next(STEPS))
    assert isinstance(trainers[0], PeerLostError)
    assert trainers[1] == {}, "the other rank gathered all tensors"
    assert isinstance(rollouts[2], RayActorError)
    assert all(isinstance(error, PeerLostError) for error in rollouts[:2])
    update_works(run, run.replicas[:2])


def test_a_killed_trainer_ends_the_update_of_every_rollout_worker(run: Run) -> None:
    manager = run.manager(run.replicas[:2], engine="shm", timeout_s=NEVER_S)
    run.set(dies_at="empty")
    trainers, rollouts = outcomes(run, manager, next(STEPS))
    assert isinstance(trainers[0], RayActorError)
    assert all(isinstance(error, PeerLostError) for error in rollouts)
