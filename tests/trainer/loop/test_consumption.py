"""The loop trains on drawn groups within the staleness bound, on long ones as often as on short ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_world import Characters, LiveRollout, World, group_of, run
from simulated_time import SimulatedTimeLoop

from weightlane.ckpt_engines import DeadlineExceededError, RewardError
from weightlane.trainer import AlgorithmConfig, LossDenominators, MicroBatch, MiniBatch
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.prompt_group import to_batch
from weightlane.trainer.loop.sampling.staleness_budget import StalenessBudget
from weightlane.trainer.loop.summary import RunSummary

GROUPS, PER_STEP = 400, 8
LONG_SHARE = 0.2
STEP_S, LONG_S, SHORT_S, SYNC_S = 1.0, 4.0, 0.3, 0.05
LONG_TOKENS, SHORT_TOKENS = 40, 8
ALGORITHM = AlgorithmConfig(prompts_per_step=PER_STEP, group_size=2, max_new_tokens=LONG_TOKENS)


TASKS = [Task(f"{'short' if number % round(1 / LONG_SHARE) else 'long'} {number}", "") for number in range(GROUPS)]


class SlowRollout(LiveRollout):
    """A replica on which one group in five takes `LONG_S`, and in which versions change in the middle of a completion."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.drawn: list[str] = []

    async def generate_group(self, prompt_ids: Sequence[int], *, count: int, **_: Any) -> Sequence[Any]:
        prompt = Characters().decode(prompt_ids)
        self.drawn.append(prompt)
        tokens, seconds = (LONG_TOKENS, LONG_S) if is_long(prompt) else (SHORT_TOKENS, SHORT_S)
        versions = []
        for _half in range(2):
            versions += [self.version] * (tokens // 2)
            await asyncio.sleep(seconds / 2)
        each = {"token_ids": [1] * tokens, "logprobs": [-1.0] * tokens, "versions": versions}
        return [SimpleNamespace(**each) for _ in range(count)]


class LimitedRollout(SlowRollout):
    """A replica on which one completion of each long group runs into its time limit."""

    async def generate_group(self, prompt_ids: Sequence[int], **more: Any) -> Sequence[Any]:
        answers = await super().generate_group(prompt_ids, **more)
        late = DeadlineExceededError("it took longer than 600 s.", part=self.name)
        return [late, *answers[1:]] if is_long(Characters().decode(prompt_ids)) else answers


def simulate(
    late_groups: str, rollout: type[SlowRollout] = SlowRollout, max_failed_share: float = 0.1, refill: int = 0
) -> tuple[World, list[str], RunSummary]:
    """Run the loop in simulated time; returns its world, the tasks that were drawn, in order, and its summary.

    A long completion cannot be judged on a `LimitedRollout`, either. With `refill`, every third task has no signal.
    """
    world, turn = World(step_s=STEP_S, sync_s=SYNC_S), count()
    world.add(replica := rollout(world, "rollout-0"))

    def judge(text: str, task: Mapping[str, Any]) -> float:
        if refill and int(task["prompt"].split()[1]) % 3 == 0:
            return 0.0
        if rollout is LimitedRollout and len(text) == LONG_TOKENS:
            raise RewardError("it took longer than 10 s.", part="reward")
        return float(next(turn) % 2)

    summary = run(
        world,
        judge,
        tasks=TASKS,
        heldout={},
        algorithm=ALGORITHM.model_copy(update={"refill": refill}),
        concurrency=200,
        event_loop=SimulatedTimeLoop,
        steps=GROUPS // PER_STEP,
        save_every=0,
        max_staleness=1,
        late_groups=late_groups,
        max_failed_share=max_failed_share,
    )
    return world, replica.drawn, summary


def is_long(prompt: str) -> bool:
    return prompt.startswith("long")


def share(prompts: Sequence[str]) -> float:
    """The share of long ones."""
    return sum(map(is_long, prompts)) / len(prompts)


@pytest.mark.parametrize("late", ["wait", "train"])
def test_long_completions_are_trained_as_often_as_they_are_drawn(late: str) -> None:
    world, drawn, summary = simulate(late_groups=late)
    assert len(world.trained) == GROUPS
    drawn = drawn[:GROUPS]
    assert abs(share(drawn) - LONG_SHARE) < 0.02
    assert abs(share(world.trained) - share(drawn)) < 0.02
    assert summary.dropped_groups == 0
    if late == "wait":
        assert world.trained == drawn, "in the order in which they were begun"
        assert max(world.staleness) <= 1
        assert summary.trained_tokens == summary.drawn_tokens


@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    first_version=st.integers(0, 3),
    syncs=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_no_group_the_budget_admits_is_too_stale_and_the_trainer_never_starves(
    max_staleness: int, groups_per_step: int, first_version: int, syncs: list[bool]
) -> None:
    """Groups are trained in the order in which they were admitted, and a sync may or may not end before the next step."""
    budget = StalenessBudget(max_staleness, groups_per_step, first_version)
    waiting: list[int] = []
    step = first_version
    for synced in syncs:
        while budget.room > 0:
            budget.admit()
            waiting.append(budget.committed)
        if len(waiting) >= groups_per_step:
            batch, waiting = waiting[:groups_per_step], waiting[groups_per_step:]
            assert not any(budget.is_too_stale(step, version) for version in batch)
            step += 1
        else:
            assert budget.committed < step, "only a sync that is behind may keep the trainer waiting"
        assert step - budget.committed <= max_staleness + 1
        if synced:
            budget.committed = step


def test_what_dropping_late_groups_does_to_long_ones_is_said() -> None:
    world, _, summary = simulate(late_groups="drop")
    assert max(world.staleness) <= 1
    assert share(world.trained) < LONG_SHARE / 4, "else there is nothing to be said"
    assert summary.dropped_groups > GROUPS / 10
    assert summary.trained_tokens < 0.7 * summary.drawn_tokens


def test_what_time_limits_do_to_long_ones_is_said() -> None:
    """A request that took too long counts as one of the greatest length, and a completion without a reward as it is."""
    world, _, summary = simulate("wait", LimitedRollout, max_failed_share=1.0)
    assert share(world.trained) == 0
    assert summary.trained_tokens == SHORT_TOKENS
    assert summary.drawn_tokens == pytest.approx(LONG_SHARE * LONG_TOKENS + (1 - LONG_SHARE) * SHORT_TOKENS, rel=0.05)


def test_tokens_that_are_too_old_are_left_out_of_the_loss_and_completions_without_others_altogether() -> None:
    batch, mini_batches = to_batch(
        [group_of([[1, 1, 2, 3], [1, 1], [3]], rewards=[1.0, 0.0, 0.0])], ALGORITHM, oldest=2
    )
    assert [(each.length, each.target_tokens) for each in batch.sequences] == [(4, 2), (1, 1)]
    assert (batch.target_tokens, mini_batches) == (3, [MiniBatch(2, LossDenominators(3, 2))])
    micro = MicroBatch.of(batch.sequences)
    assert micro.mask.tolist() == [False, False, True, True, True]
    assert micro.per_token["rollout_logprobs"].tolist() == [-1.0, -2.0, -3.0, -4.0, -1.0]
    nothing, mini_batches = to_batch([group_of([[1, 1], [0]], rewards=[1.0, 0.0])], ALGORITHM, oldest=2)
    assert (len(nothing), nothing.target_tokens) == (1, 0), "a step without a gradient, whatever its loss has for terms"
    assert mini_batches == [MiniBatch(1, LossDenominators(0, 1))]


def test_completions_without_an_advantage_are_not_computed_but_count_in_the_mean() -> None:
    equal, different = (
        group_of([[1] * 5, [1] * 3], rewards=[1.0, 1.0]),
        group_of([[1] * 2, [1] * 4], rewards=[1.0, 0.0]),
    )
    batch, mini_batches = to_batch([equal, different], ALGORITHM)
    assert [each.target_tokens for each in batch.sequences] == [2, 4]
    assert (batch.target_tokens, mini_batches) == (6, [MiniBatch(2, LossDenominators(14, 4))])
    everything, mini_batches = to_batch(
        [equal, different], ALGORITHM.model_copy(update={"compute_zero_advantage": True})
    )
    assert (everything.target_tokens, mini_batches) == (14, [MiniBatch(4, LossDenominators(14, 4))])
    _, mini_batches = to_batch([different, equal, equal], ALGORITHM.model_copy(update={"mini_batch_prompts": 1}))
    assert mini_batches == [MiniBatch(2, LossDenominators(6, 2)), *[MiniBatch(1, LossDenominators(8, 2))] * 2]
    for term in ("kl_coefficient", "entropy_coefficient"):  # gives them a gradient
        assert len(to_batch([equal, different], ALGORITHM.model_copy(update={term: 0.1}))[0]) == 4
    nothing, mini_batches = to_batch([equal], ALGORITHM)
    assert [each.target_tokens for each in nothing.sequences] == [3], "the shortest: a step has a batch"
    assert mini_batches == [MiniBatch(1, LossDenominators(8, 2))]
