"""Replicas of the loop that die are replaced, within limits, and no task is lost or used twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

import pytest
from loop_world import TASKS, LiveRollout, World, first_is_better, run

from weightlane.ckpt_engines import ConfigError, WorkerDiedError
from weightlane.sync import ReplicaState
from weightlane.trainer.loop.fleet import Successor
from weightlane.trainer.loop.protocols import Newcomer


def successors(world: World, *, failing: str = "") -> Successor:
    async def succeed(dead: str, name: str) -> Newcomer:
        await asyncio.sleep(0.01)
        if name == failing:
            raise ConfigError("no room.", part=name)
        return cast("Newcomer", LiveRollout(world, name))

    return succeed


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_replica_that_dies_is_replaced_and_no_task_is_lost_or_used_twice(max_staleness: int) -> None:
    world = World()
    first, second = world.replicas["rollout-0"], LiveRollout(world, "rollout-1")
    world.add(second)
    world.at_step[2] = first.gone.set
    summary = run(world, first_is_better, succeed=successors(world), max_staleness=max_staleness, steps=120)
    assert Counter(world.trained) == Counter({task.prompt: 20 for task in TASKS})
    assert max(world.staleness) <= max_staleness
    assert (summary.replicas_lost, summary.replicas_replaced) == (1, 1)
    lost, joined = world.told
    assert (lost["lost"], lost["left"], lost["needed"], lost["successor"]) == ("rollout-0", 1, 1, "rollout-0.1")
    assert "rollout-0 (process 9) died" in lost["error"]
    assert (joined["joined"], joined["instead_of"]) == ("rollout-0.1", "rollout-0")
    newcomer = world.replicas["rollout-0.1"]
    assert min(newcomer.versions) >= joined["version"] > 0, "it had the current version before its first request"
    assert world.states_.keys() == {"rollout-1", "rollout-0.1"}, "the dead one does not count any more"


@pytest.mark.parametrize(("replicas", "quorum", "left"), [(1, 0.5, 0), (2, 1.0, 1), (3, 0.5, 1)])
def test_when_too_few_replicas_are_left_the_run_ends_with_the_last_death(
    replicas: int, quorum: float, left: int
) -> None:
    world = World()
    for number in range(1, replicas):
        world.add(LiveRollout(world, f"rollout-{number}"))
    for number in range(replicas - left):
        world.at_step[2 + 2 * number] = world.replicas[f"rollout-{number}"].gone.set
    with pytest.raises(WorkerDiedError, match=rf"rollout-{replicas - left - 1} \(process 9\) died"):
        run(world, first_is_better, quorum=quorum, max_successors=0, succeed=successors(world), steps=1000)
    assert len(world.told) == replicas - left
    assert world.told[-1]["successor"] == ""


def test_successors_can_die_or_fail_to_start_and_are_counted() -> None:
    world = World()
    world.add(LiveRollout(world, "rollout-1"))

    def kill_the_newest() -> None:
        newest = max(name for name in world.replicas if name.startswith("rollout-0"))
        world.replicas[newest].gone.set()

    world.at_step = dict.fromkeys((2, 60), kill_the_newest)
    succeed = successors(world, failing="rollout-0.2")
    summary = run(world, first_is_better, succeed=succeed, max_successors=2, steps=120)
    assert Counter(world.trained) == Counter({task.prompt: 20 for task in TASKS})
    told = [facts.get("joined", facts.get("lost")) for facts in world.told]
    assert told == ["rollout-0", "rollout-0.1", "rollout-0.1", "rollout-0.2"]
    assert "could not start" in world.told[-1]["error"]
    assert "no room" in world.told[-1]["error"]
    assert (summary.replicas_lost, summary.replicas_replaced) == (2, 1)


def test_a_replica_out_of_service_gets_no_requests_and_its_tasks_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.rollout_feeder._PAUSE_S", 0.005)
    world = World()
    first, second = world.replicas["rollout-0"], LiveRollout(world, "rollout-1")
    world.add(second)
    asked: list[int] = []

    def quarantine() -> None:
        first.quarantined = True  # and the coordinator learns it a little later
        asyncio.get_running_loop().call_later(0.01, settle)

    def settle() -> None:
        world.states_["rollout-0"] = ReplicaState.QUARANTINED
        first.quarantined = False
        asked.append(len(first.versions))

    world.at_step[3] = quarantine
    run(world, first_is_better, steps=60)
    assert Counter(world.trained) == Counter({task.prompt: 10 for task in TASKS})
    assert world.told == []
    assert world.states_["rollout-0"] is ReplicaState.SERVING, "the next version healed it"
    assert len(first.versions) > asked[0], "and it was asked again"
