"""A fleet that changes during a run: replicas are added, leave and die, and no sample is lost or trained twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loop_world import TASKS, LiveRollout, World, run
from simulated_time import SimulatedTimeLoop

from weightlane.ckpt_engines import ConfigError, WorkerDiedError
from weightlane.sync import ReplicaState
from weightlane.trainer.loop.protocols import Rollout
from weightlane.trainer.objectives.config import AlgorithmConfig

PAIRS = AlgorithmConfig(prompts_per_step=3, group_size=2, max_new_tokens=4)
LONGEST_S = 3.0
FIRST_ID = 1000


class NumberingRollout(LiveRollout):
    """A replica that takes up to `LONGEST_S` for a group, and writes a number of its own into each completion."""

    def __init__(self, world: ChangingWorld, name: str) -> None:
        super().__init__(world, name)
        self.changing = world
        self.numbers: list[int] = []
        """The numbers of its completions so far."""

    async def generate_group(self, prompt_ids: Sequence[int], *, count: int, max_new_tokens: int, **_: Any) -> Any:
        world, version = self.changing, self.version
        assert world.states_[self.name] is not ReplicaState.JOINING, "it has no version of this run yet"
        assert self.name not in world.fleet.state().leaving, "it gets no new requests"
        self.flying += 1
        with suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), world.chance.uniform(0.1, LONGEST_S))
        self.flying -= 1
        self.raise_if_ended()
        world.numbered += count
        numbers = range(world.numbered - count, world.numbered)
        self.numbers += numbers
        self.versions.append(version)
        each = {"logprobs": [-1.0] * max_new_tokens, "versions": [version] * max_new_tokens}
        return [SimpleNamespace(token_ids=[FIRST_ID + number] * max_new_tokens, **each) for number in numbers]


class ChangingWorld(World):
    """A world of `NumberingRollout`; a start of a further one fails `failing` times in ten."""

    def __init__(self, replicas: int, seed: int = 0, failing: int = 0) -> None:
        self.chance, self.failing, self.numbered = random.Random(seed), failing, 0
        super().__init__(step_s=1.0, sync_s=0.3)
        del self.states_["rollout-0"], self.replicas["rollout-0"]
        for number in range(replicas):
            self.add(NumberingRollout(self, f"rollout-{number}"))

    async def start(self, name: str) -> Rollout:
        await asyncio.sleep(self.chance.uniform(0.5, 5.0))
        if self.chance.randrange(10) < self.failing:
            raise ConfigError("no room.", part=name)
        return cast("Rollout", NumberingRollout(self, name))

    def kill_the_newest(self) -> None:
        self.replicas[self.fleet.serving()[-1].name].gone.set()

    def run(self, steps: int, **settings: Any) -> Any:
        settings = {"start_replica": self.start, "algorithm": PAIRS, "heldout": {}, "quorum": 0.1} | settings
        return run(self, evens_are_better, steps=steps, save_every=0, event_loop=SimulatedTimeLoop, **settings)

    @property
    def trained_numbers(self) -> list[int]:
        """The number of every sample that was trained, in order."""
        return [int(each.tokens[-1]) - FIRST_ID for batch in self.batches for each in batch.sequences]

    def said(self, kind: str) -> list[Mapping[str, Any]]:
        return [facts for facts in self.told if next(iter(facts)) == kind]


def evens_are_better(completion: str, task: Mapping[str, Any]) -> float:
    """A group has an even and an odd number, so that each of its samples has an advantage."""
    return float(ord(completion[0]) % 2)


def assert_each_task_and_sample_was_trained_once(world: ChangingWorld, steps: int) -> None:
    epochs, rest = divmod(steps * PAIRS.prompts_per_step, len(TASKS))
    assert rest == 0
    assert Counter(world.trained) == Counter({task.prompt: epochs for task in TASKS})
    numbers = world.trained_numbers
    assert len(numbers) == len(set(numbers)) == steps * PAIRS.prompts_per_step * PAIRS.group_size


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 32))])
def test_in_thirty_random_deaths_joins_and_departures_no_sample_is_lost_or_trained_twice(seed: int) -> None:
    world, steps = ChangingWorld(3, seed, failing=3), 128
    done: Counter[str] = Counter()

    def change() -> None:
        fleet, chance = world.fleet, world.chance
        state = fleet.state()
        action = chance.choice(["kill", "more", "fewer"])
        if action == "kill" and len(state.serving) > 1:
            # Also one that leaves or joins. One that serves remains.
            name = chance.choice([*state.serving[1:], *state.joining, *state.leaving])
            world.replicas[name].gone.set() if name in world.replicas else None
        elif action == "fewer" and state.wanted > 1:
            fleet.scale(state.wanted - chance.randint(1, state.wanted - 1))
        else:
            action = "more"
            fleet.scale(state.wanted + chance.randint(1, 3))
        done[action] += 1

    world.at_step = dict.fromkeys(range(3, 123, 4), change)
    summary = world.run(steps, max_replacements=100, max_staleness=2, drain_s=1.5)
    assert done.total() == 30
    assert min(done["kill"], done["more"], done["fewer"]) > 2
    assert_each_task_and_sample_was_trained_once(world, steps)
    assert max(world.staleness) <= 2
    assert world.events == ["well"]
    lost, joined, left = world.said("lost"), world.said("joined"), world.said("left")
    assert len(joined) == summary.replicas_added + summary.replicas_replaced
    assert len(left) == summary.replicas_left
    assert len([facts for facts in lost if "could not start" not in facts["error"]]) == summary.replicas_lost
    assert all(min(world.replicas[facts["joined"]].versions, default=steps) >= facts["version"] for facts in joined)


def test_a_replica_that_leaves_finishes_its_groups_gets_no_others_and_is_no_death() -> None:
    world, steps = ChangingWorld(3), 16
    leaving = world.replicas["rollout-2"]
    world.at_step[4] = lambda: world.fleet.scale(2)
    summary = world.run(steps)
    [left] = world.told
    assert (left["left"], left["handed_over"], left["replicas"], left["error"]) == ("rollout-2", 0, 2, "")
    assert (summary.replicas_lost, summary.replicas_left) == (0, 1)
    assert isinstance(leaving, NumberingRollout)
    assert set(leaving.numbers) <= set(world.trained_numbers), "what it has begun is trained on"
    assert_each_task_and_sample_was_trained_once(world, steps)
    assert "rollout-2" not in world.states_
    assert leaving.closed


def test_what_a_replica_has_not_finished_when_its_time_is_over_others_generate_again() -> None:
    world, steps = ChangingWorld(2), 16
    world.at_step[4] = lambda: world.fleet.scale(1)
    world.run(steps, drain_s=0.0, concurrency=8)
    [left] = world.told
    assert left["handed_over"] > 0
    assert_each_task_and_sample_was_trained_once(world, steps)


def test_a_replica_that_dies_while_it_leaves_is_not_replaced() -> None:
    world = ChangingWorld(3)
    leaving = world.replicas["rollout-2"]

    def leave_and_die() -> None:
        if not leaving.flying:
            asyncio.get_running_loop().call_later(0.01, leave_and_die)
            return
        world.fleet.scale(2)
        leaving.gone.set()

    world.at_step[4] = leave_and_die
    summary = world.run(16, concurrency=2)
    [left] = world.told
    assert "rollout-2 (process 9) died" in left["error"]
    assert (summary.replicas_lost, summary.replicas_left) == (0, 1)
    assert_each_task_and_sample_was_trained_once(world, 16)


@pytest.mark.parametrize(
    ("begins", "script", "survives"),
    [
        (4, "kill kill", True),  # 2 of 4
        (4, "kill kill kill", False),
        (4, "scale-2 kill", True),  # 1 of 2: those that left do not count
        (2, "scale-4 kill kill", True),  # 2 of 4: those that have joined do
        (2, "scale-4 kill kill kill", False),
        (4, "kill kill scale-2 kill", True),  # 1 of 2: the dead count until the run is scaled
        (4, "kill kill scale-4 kill kill", True),  # 2 of 4: others have taken their places
    ],
)
def test_a_quorum_is_a_share_of_those_that_began_or_joined_and_have_not_left(
    begins: int, script: str, survives: bool
) -> None:
    world = ChangingWorld(begins)

    def do(action: str) -> None:
        verb, _, number = action.partition("-")
        if verb == "scale":
            world.fleet.scale(int(number))
        else:
            world.kill_the_newest()

    for place, action in enumerate(script.split()):
        world.at_step[12 * place + 4] = partial(do, action)
    settings = {"quorum": 0.5, "max_replacements": 0}
    if survives:
        world.run(64, **settings)
        assert_each_task_and_sample_was_trained_once(world, 64)
    else:
        with pytest.raises(WorkerDiedError, match="died"):
            world.run(64, **settings)


def test_replicas_that_start_go_first_when_there_are_to_be_fewer() -> None:
    world = ChangingWorld(2)

    def change_ones_mind() -> None:
        world.fleet.scale(4)
        assert world.fleet.state().starting == ["rollout-2", "rollout-3"]
        world.fleet.scale(3)
        state = world.fleet.state()
        assert (state.wanted, state.starting, state.leaving) == (3, ["rollout-2"], [])

    world.at_step[3] = change_ones_mind
    world.run(16)
    assert [facts.get("joined") for facts in world.told] == ["rollout-2"]
    assert world.states_.keys() == {"rollout-0", "rollout-1", "rollout-2"}


def test_where_replicas_follow_the_room_a_death_has_no_successor_and_counts_no_longer() -> None:
    world = ChangingWorld(4)
    world.at_step = dict.fromkeys((4, 12, 20), world.kill_the_newest)
    summary = world.run(32, quorum=1.0, follows_room=True)
    assert (summary.replicas_lost, summary.replicas_replaced) == (3, 0)
    assert world.states_.keys() == {"rollout-0"}
    assert all(world.replicas[f"rollout-{number}"].closed for number in (1, 2, 3)), "they may hold a GPU"
    assert_each_task_and_sample_was_trained_once(world, 32)
    world = ChangingWorld(2)
    world.at_step[4] = world.replicas["rollout-1"].gone.set
    with pytest.raises(WorkerDiedError, match="rollout-1"):
        world.run(32, follows_room=True, min_replicas=2)


def test_replicas_that_share_devices_with_the_trainer_keep_their_number() -> None:
    world, refused = World(), []

    def scale() -> None:
        with pytest.raises(ConfigError, match="the number of replicas cannot change"):
            world.fleet.scale(2)
        refused.append(True)

    world.at_step[2] = scale
    run(world, evens_are_better, colocate=True, max_staleness=0)
    assert refused
