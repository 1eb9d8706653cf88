"""The loop trains on drawn groups within the staleness bound, on long ones as often as on short ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from loop_world import prompt_of
from simulated_time import SimulatedTimeLoop

from weightlane.plugins import hookimpl, make_hooks
from weightlane.sync import Outcome, ReplicaReport, ReplicaState, SyncReport
from weightlane.trainer import AlgorithmConfig, MicroBatch, MiniBatch, TokenBatch
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.config import LoopConfig
from weightlane.trainer.loop.group import PromptGroup, to_batch
from weightlane.trainer.loop.loop import AsyncLoop, LoopParts
from weightlane.trainer.loop.protocols import Rollout, StepReport, Syncer
from weightlane.trainer.loop.summary import RunSummary

GROUPS, PER_STEP = 400, 8
LONG_SHARE = 0.2
STEP_S, SHORT_S, SYNC_S = 1.0, 0.3, 0.05
LONG_TOKENS, SHORT_TOKENS = 40, 8
ALGORITHM = AlgorithmConfig(prompts_per_step=PER_STEP, group_size=2, max_new_tokens=LONG_TOKENS)


class World:
    """Trainers that take a second for a step, and a replica on which one group in five takes `long_s`."""

    def __init__(self, long_s: float) -> None:
        self.name = "rollout-0"
        self.long_s = long_s
        self.step = self.version = 0
        self.trained: list[bool] = []
        """Whether a group was long, for every group that was trained on."""
        self.drawn: list[bool] = []
        self.staleness: list[int] = []

    async def train_step(self, batch: TokenBatch, mini_batch: MiniBatch) -> StepReport:
        prompts = dict.fromkeys(map(prompt_of, batch.sequences))
        self.trained += [prompt[0] == 1 for prompt in prompts]
        await asyncio.sleep(STEP_S)
        self.step += 1
        return StepReport(self.step)

    async def publish(self, version: int) -> float:
        return 0.0

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def sync(self, version: int) -> SyncReport:
        await asyncio.sleep(SYNC_S)
        self.version = version
        return SyncReport(version, SYNC_S, 0, {self.name: ReplicaReport(Outcome.COMMITTED)})

    def states(self) -> Mapping[str, ReplicaState]:
        return {self.name: ReplicaState.SERVING}

    async def generate_group(self, prompt_ids: Sequence[int], *, count: int, **_: Any) -> Sequence[Any]:
        long = prompt_ids[0] == 1
        self.drawn.append(long)
        versions = []
        for _half in range(2):
            versions += [self.version] * ((LONG_TOKENS if long else SHORT_TOKENS) // 2)
            await asyncio.sleep((self.long_s if long else SHORT_S) / 2)
        each = {"token_ids": [1] * len(versions), "logprobs": [-1.0] * len(versions), "versions": versions}
        return [SimpleNamespace(**each, number=number) for number in range(count)]

    async def stats(self) -> Any:
        return SimpleNamespace(max_token_gap_s=0.0)

    @hookimpl
    def training_step(self, facts: Mapping[str, Any]) -> None:
        self.staleness.append(facts["staleness_max"])


class Numbers:
    """A tokenizer of prompts that are numbers: whether it is long, and which one it is."""

    def encode(self, text: str) -> Sequence[int]:
        number = int(text)
        return [int(number % round(1 / LONG_SHARE) == 0), 2 + number]

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def simulate(world: World, **config: Any) -> RunSummary:
    turn = iter(range(1 << 30))

    async def judge(completion: str, task: Mapping[str, Any]) -> float:
        return float(next(turn) % 2)

    async def save(_: object) -> None:
        """Nothing is resumed."""

    async def export(_: int) -> None:
        """Nobody loads it."""

    parts = LoopParts(
        trainers=cast("Any", world),
        rollouts=[cast("Rollout", world)],
        syncer=cast("Syncer", world),
        tokenizer=Numbers(),
        stop_token_ids=[0],
        judge=judge,
        train_tasks=[Task(str(number), "") for number in range(GROUPS)],
        heldout_tasks=[],
        hooks=make_hooks([world]),
        save=save,
        export=export,
    )
    settings = LoopConfig(steps=GROUPS // PER_STEP, save_every=0, **config)
    loop = AsyncLoop(parts, settings, ALGORITHM, seed=1, concurrency=200)
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(loop.run())


def share(of: Sequence[bool]) -> float:
    return sum(of) / len(of)


@pytest.mark.parametrize("late", ["wait", "train"])
@pytest.mark.parametrize(("long_s", "max_staleness"), [(4.0, 1), (2.5, 0)])
def test_long_completions_are_trained_as_often_as_they_are_drawn(long_s: float, max_staleness: int, late: str) -> None:
    world = World(long_s)
    summary = simulate(world, max_staleness=max_staleness, late_groups=late)
    assert len(world.trained) == GROUPS
    drawn = share(world.drawn[:GROUPS])
    assert abs(drawn - LONG_SHARE) < 0.02
    assert abs(share(world.trained) - drawn) < 0.02
    assert summary.dropped_groups == 0
    if late == "wait":
        assert world.trained == world.drawn[:GROUPS], "in the order in which they were begun"
        assert max(world.staleness) <= max_staleness
        assert summary.trained_tokens == summary.drawn_tokens


def test_what_dropping_late_groups_does_to_long_ones_is_said() -> None:
    world = World(4.0)
    summary = simulate(world, max_staleness=1, late_groups="drop")
    assert max(world.staleness) <= 1
    assert share(world.trained) < LONG_SHARE / 4, "else there is nothing to be said"
    assert summary.dropped_groups > GROUPS / 10
    assert summary.trained_tokens < 0.7 * summary.drawn_tokens


def group(*versions: Sequence[int], rewards: Sequence[float]) -> PromptGroup:
    completions = [
        SimpleNamespace(token_ids=[7] * len(each), logprobs=[-float(n + 1) for n in range(len(each))], versions=each)
        for each in versions
    ]
    return PromptGroup(Task("p", ""), [3], cast("Any", completions), [""] * len(versions), rewards, "rollout-0")


def test_tokens_that_are_too_old_are_left_out_of_the_loss_and_completions_without_others_altogether() -> None:
    batch, mini_batch = to_batch([group([1, 1, 2, 3], [1, 1], [3], rewards=[1.0, 0.0, 0.0])], ALGORITHM, oldest=2)
    assert [(each.length, each.target_tokens) for each in batch.sequences] == [(4, 2), (1, 1)]
    assert (batch.target_tokens, mini_batch) == (3, MiniBatch(3, 2))
    micro = MicroBatch.of(batch.sequences)
    assert micro.mask.tolist() == [False, False, True, True, True]
    assert micro.per_token["rollout_logprobs"].tolist() == [-1.0, -2.0, -3.0, -4.0, -1.0]
    nothing, mini_batch = to_batch([group([1, 1], [0], rewards=[1.0, 0.0])], ALGORITHM, oldest=2)
    assert (len(nothing), nothing.target_tokens) == (1, 0), "a step without a gradient, whatever its loss has for terms"
    assert mini_batch == MiniBatch(0, 1)


def test_completions_without_an_advantage_are_not_computed_but_count_in_the_mean() -> None:
    equal, different = group([1] * 5, [1] * 3, rewards=[1.0, 1.0]), group([1] * 2, [1] * 4, rewards=[1.0, 0.0])
    batch, mini_batch = to_batch([equal, different], ALGORITHM)
    assert [each.target_tokens for each in batch.sequences] == [2, 4]
    assert (batch.target_tokens, mini_batch) == (6, MiniBatch(14, 4))
    everything = to_batch([equal, different], ALGORITHM.model_copy(update={"compute_zero_advantage": True}))
    assert (len(everything[0]), everything[0].target_tokens, everything[1]) == (4, 14, MiniBatch(14, 4))
    for term in ("kl_coefficient", "entropy_coefficient"):  # gives them a gradient
        assert len(to_batch([equal, different], ALGORITHM.model_copy(update={term: 0.1}))[0]) == 4
    nothing, mini_batch = to_batch([equal], ALGORITHM)
    assert [each.target_tokens for each in nothing.sequences] == [3], "the shortest: a step has a batch"
    assert mini_batch == MiniBatch(8, 2)
