"""Tasks drawn by their success rates, and groups of different sizes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from loop_world import ALGORITHM, LiveRollout, World, first_is_better, group_of, run
from simulated_time import SimulatedTimeLoop

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer import LossDenominators, MiniBatch
from weightlane.trainer.data.tasks import Task, TaskStream
from weightlane.trainer.loop.prompt_group import PromptGroup, to_batch
from weightlane.trainer.loop.protocols import LoopState
from weightlane.trainer.loop.sampling.curriculum import Curriculum
from weightlane.trainer.loop.sampling.request_room import RequestRoom
from weightlane.trainer.loop.sampling.tally import described_samples

TASKS = [Task(f"task {number}", number) for number in range(5)]
RATES = {0: [0.0, 0.0], 1: [1.0, -1.0], 2: [1.0, 1.0], 3: [0.5, 0.0, 0.0, -1.0]}
"""Rewards of tasks by number; the last task was never judged."""
WEIGHTS = [0.1, 1.0, 0.1, 0.75, 1.0]


def judged(seed: int = 0) -> Curriculum:
    """A curriculum that has drawn every task once."""
    stream = Curriculum(TASKS, seed)
    stream.take(len(TASKS))
    for number, rewards in RATES.items():
        stream.judged(TASKS[number], rewards)
    return stream


def test_every_task_is_drawn_once_and_then_by_the_success_rate_of_its_latest_group() -> None:
    assert Curriculum(TASKS, 3).take(5) == TaskStream(TASKS, 3).take(5)
    counts = Counter(task.answer for task in judged().take(6000))
    assert [counts[number] / 6000 for number in range(5)] == pytest.approx(
        [weight / sum(WEIGHTS) for weight in WEIGHTS], abs=0.02
    )
    stream = judged()
    stream.judged(TASKS[1], [1.0, 1.0])
    counts = Counter(task.answer for task in stream.take(6000))
    assert counts[1] / counts[3] == pytest.approx(0.1 / 0.75, rel=0.25), "what it was before no longer counts"
    assert stream.mean_rate == pytest.approx((0.0 + 1.0 + 1.0 + 0.25) / 4)
    stream.judged(TASKS[4], [])
    assert stream.mean_rate == pytest.approx((0.0 + 1.0 + 1.0 + 0.25 + 0.0) / 5), "none could be judged: none succeeds"


def test_a_curriculum_continues_from_its_state_with_the_same_tasks() -> None:
    stream, resumed = judged(), Curriculum(TASKS, 0)
    assert stream.take(7) != judged(1).take(7)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert resumed.take(50) == stream.take(50)
    plain = TaskStream(TASKS, 0)
    plain.take(12)
    later = Curriculum(TASKS, 0)
    later.restore(plain.state())
    assert {task.answer for task in later.take(60)} == set(range(5)), "without rates, all are drawn alike"
    other = Curriculum([*TASKS[:4], Task("task 4", "new")], 0)
    other.restore(stream.state(), may_change=True)
    assert other.mean_rate is None, "the rates were of other lines"
    for damage in ({"rates": [1]}, {"rates": {"x": 1.0}}, {"draws": "many"}):
        with pytest.raises(ConfigError, match="success rates are damaged"):
            Curriculum(TASKS, 0).restore({**stream.state(), **damage})


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_with_a_curriculum_draws_mixed_tasks_most_and_resumes(max_staleness: int) -> None:
    tasks = [Task(f"{'mixed' if number % 2 else 'wrong'} {number}", "") for number in range(8)]

    def judge(completion: str, task: Mapping[str, Any]) -> float:
        return first_is_better(completion, task) if task["prompt"].startswith("mixed") else 0.0

    algorithm = ALGORITHM.model_copy(update={"compute_zero_advantage": True})
    settings = {"tasks": tasks, "heldout": {}, "algorithm": algorithm, "event_loop": SimulatedTimeLoop, "steps": 60}
    settings |= {"curriculum": True, "max_staleness": max_staleness, "save_every": 20}
    world = World()
    summary = run(world, judge, **settings)
    assert set(world.trained[:8]) == {task.prompt for task in tasks}, "each once"
    mixed = sum(prompt.startswith("mixed") for prompt in world.trained[8:]) / len(world.trained[8:])
    assert mixed == pytest.approx(8 / 9 / (8 / 9 + 0.1), abs=0.08)
    assert summary.success_of_tasks == pytest.approx(1 / 6)
    assert described_samples(summary.samples())["success rate"].endswith(f"{summary.drawn.mean_reward - 1 / 6:+.3f}")
    again = World(step=20)
    run(again, judge, resume=LoopState.from_plain(world.saved[0].to_plain()), **settings)
    if max_staleness == 0:
        assert again.trained == world.trained[-len(again.trained) :], "as if nothing had happened"


# -- groups of different sizes ------------------------------------------------------------------------------------------------


class Counting(LiveRollout):
    """A replica that counts requests in flight."""

    def __init__(self, world: World, name: str, order: list[str] | None = None) -> None:
        super().__init__(world, name)
        self.now, self.most = 0, 0
        self.order = [] if order is None else order
        """Names of the replicas that generated groups, in order."""
        self.counts: dict[str, int] = {}

    async def generate_group(self, prompt_ids: Sequence[int], *, count: int, **more: Any) -> Sequence[Any]:
        self.counts["".join(map(chr, prompt_ids))] = count
        self.order.append(self.name)
        self.now += count
        self.most = max(self.most, self.now)
        try:
            return await super().generate_group(prompt_ids, count=count, **more)
        finally:
            self.now -= count


def test_tasks_have_groups_of_their_own_size_and_share_the_requests_of_a_replica() -> None:
    sizes = {f"task {number}": (0, 2, 5, 9)[number % 4] for number in range(12)}
    world = World()
    world.add(replica := Counting(world, "rollout-0"))
    tasks = [Task(prompt, "", group_size=size) for prompt, size in sizes.items()]
    settings = {"heldout": {}, "concurrency": 10, "max_staleness": 3, "event_loop": SimulatedTimeLoop}
    summary = run(world, first_is_better, tasks=tasks, **settings)
    assert sorted(world.trained) == sorted(sizes), "each once, and no large one waits for ever"
    assert replica.counts == {prompt: size or ALGORITHM.group_size for prompt, size in sizes.items()}
    assert 5 < replica.most <= 10
    assert summary.drawn.completions_drawn == sum(replica.counts.values())
    assert Task.from_plain(json.loads(json.dumps(tasks[3].to_plain()))).group_size == 9


def test_one_small_group_among_large_ones_leaves_no_replica_idle() -> None:
    tasks = [Task(f"task {number}", "", group_size=2 if number == 7 else 10) for number in range(32)]
    world = World()
    order: list[str] = []
    for name in ("rollout-0", "rollout-1"):
        world.add(Counting(world, name, order))
    settings = {"heldout": {}, "concurrency": 20, "max_staleness": 0, "event_loop": SimulatedTimeLoop, "steps": 8}
    run(world, first_is_better, tasks=tasks, algorithm=ALGORITHM.model_copy(update={"prompts_per_step": 4}), **settings)
    batches = [Counter(order[first : first + 4]) for first in range(0, 32, 4)]
    assert batches == [{"rollout-0": 2, "rollout-1": 2}] * 8


def test_a_batch_of_groups_of_different_sizes_counts_every_token_and_completion_once() -> None:
    def group(lengths: Sequence[int], rewards: Sequence[float]) -> PromptGroup:
        return group_of([[0] * length for length in lengths], rewards)

    algorithm = ALGORITHM.model_copy(update={"mini_batch_prompts": 2, "normalize_std": False})
    groups = [group([1, 2], [1.0, 0.0]), group([3, 1, 2, 2], [1.0, 0.0, 0.0, 1.0]), group([4, 4, 4], [0.0, 0.0, 3.0])]
    batch, mini_batches = to_batch(groups, algorithm)
    assert mini_batches == [MiniBatch(6, LossDenominators(11, 6)), MiniBatch(3, LossDenominators(12, 3))]
    advantages = [float(each.per_token["advantages"][0]) for each in batch.sequences]
    assert advantages == [0.5, -0.5, 0.5, -0.5, -0.5, 0.5, -1.0, -1.0, 2.0]


def test_a_large_group_waits_for_room_and_goes_before_those_behind_it() -> None:
    async def fill() -> list[int]:
        room, begun = RequestRoom(4), []

        async def group(size: int) -> None:
            async with room.taken(size):
                begun.append(size)
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as groups:
            for size in (3, 7, 1, 2, 2):
                groups.create_task(group(size))
        return begun

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        assert runner.run(fill()) == [3, 7, 1, 2, 2]
