"""Bad answers, rewards, prompts and gradients cost their sample, group or step; too many of them end the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from loop_world import ALGORITHM, TASKS, Characters, LiveRollout, World, first_is_better, run

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, PeerLostError, RewardError, TooManyFailuresError
from weightlane.plugins import make_hooks
from weightlane.sync import Outcome, ReplicaReport, SyncReport
from weightlane.trainer.loop.failures import Failures

TOO_LATE = DeadlineExceededError("it took longer than 600 s.", part="rollout-0")
EMPTY = SimpleNamespace(token_ids=[], logprobs=[], versions=[])
NOT_FINITE = SimpleNamespace(token_ids=[66, 67], logprobs=[-1.0, float("nan")], versions=[0, 0])


@pytest.mark.parametrize(
    ("bad", "says"),
    [(TOO_LATE, "longer than 600 s"), (EMPTY, "is empty"), (NOT_FINITE, "not finite")],
    ids=["late", "empty", "not finite"],
)
def test_an_answer_that_cannot_be_used_costs_that_sample(bad: Any, says: str) -> None:
    world = World(bad_answers={"task-3": bad, "task-5": bad, "held-out": bad})
    summary = run(world, some_are_better)
    assert sorted(world.trained) == sorted(task.prompt for task in TASKS), "its group has two samples left"
    assert sorted(facts["task"] for _, facts in world.failures) == ["held-out", "task-3", "task-5"]
    assert all(kind == "request" and says in facts["error"] for kind, facts in world.failures)
    assert summary.failures == {"request": 3}
    assert summary.accuracy_before is None, "the only held-out task was not answered"
    assert summary.accuracy_after is not None


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_a_replica_generates_that_missed_versions_is_drawn_anew(max_staleness: int) -> None:
    asked_behind = []

    class Behind(LiveRollout):
        async def generate_group(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
            asked_behind.append(self.version < self.world.version)
            return await super().generate_group(*args, **kwargs)

    class Lagging(World):
        async def sync(self, version: int) -> SyncReport:
            had = self.replicas["rollout-1"].version
            report = await super().sync(version)
            if version not in (2, 3, 4):
                return report
            self.replicas["rollout-1"].version = had
            missed = ReplicaReport(Outcome.BEHIND, PeerLostError("late.", part="rollout-1"))
            return replace(report, replicas={**report.replicas, "rollout-1": missed})

    world = Lagging()
    world.add(Behind(world, "rollout-1"))
    run(world, first_is_better, max_staleness=max_staleness, steps=8)
    assert len(world.trained) == 16
    assert max(world.staleness) <= max_staleness
    assert any(asked_behind), "it was asked while it lagged"


def test_one_bad_prompt_or_answer_ends_no_run_however_large_its_group_is() -> None:
    failures = Failures(0.1, make_hooks([]), group_size=16)
    failures.failed("prompt", ConfigError("too long.", part="data"), 16)
    failures.failed("prompt", ConfigError("too long.", part="data"), 1000, may_end=False)
    failures.failed("prompt", ConfigError("too long.", part="data"), 16)
    with pytest.raises(TooManyFailuresError, match="48 of the last 320 samples"):
        failures.failed("prompt", ConfigError("too long.", part="data"), 16)


def test_an_evaluation_that_fails_beside_the_training_ends_the_run_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.loop._DEATH_NOTICE_S", 0.02)

    def judge(completion: str, task: Mapping[str, Any]) -> float:
        if task["prompt"] == "held-out" and world.step:
            raise TooManyFailuresError("no reward.", part="judge")
        return first_is_better(completion, task)

    world = World()
    with pytest.raises(TooManyFailuresError):
        run(world, judge, steps=200, evaluate_every=2)
    assert world.step < 200

    def cancels(*_: object) -> Any:
        raise asyncio.CancelledError

    for judge in (first_is_better, cancels):
        with pytest.raises(RuntimeError, match="ended without a result"):
            run(World(at_step={2: cancels}), judge)


def some_are_better(completion: str, task: Mapping[str, Any]) -> float:
    """Reward a completion by its first letter, so that one of any two completions of a prompt is better."""
    return float("ABC".index(completion[0]))


def test_a_group_of_which_too_little_is_left_is_replaced_by_the_next_task_and_the_bound_holds() -> None:
    def judge(completion: str, task: Mapping[str, Any]) -> float:
        if task["prompt"] in ("task-1", "task-2") and not completion.startswith("A"):
            raise RewardError(f"no reward for {completion}.", part="judge")
        return some_are_better(completion, task)

    world = World()
    summary = run(world, judge, max_staleness=1)
    assert len(world.trained) == 12
    assert not {"task-1", "task-2"} & set(world.trained)
    assert max(world.staleness) <= 1
    assert {facts["task"] for _, facts in world.failures} == {"task-1", "task-2"}
    assert set(summary.failures) == {"reward"}


def test_a_prompt_that_is_no_text_or_leaves_no_room_costs_its_group_and_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Characters.encode

    def refuse(self: Characters, text: str) -> Sequence[int]:
        if text == "task-3":
            raise TypeError("surrogates not allowed")
        return encode(self, text)

    monkeypatch.setattr(Characters, "encode", refuse)
    world = World()
    limits = {"max_model_len": len("task-9") + ALGORITHM.max_new_tokens, "max_failed_share": 0.5}
    summary = run(world, first_is_better, **limits)
    others = {f"task-{number}" for number in range(10)} - {"task-3"}
    assert set(world.trained) == others, "two have a letter more"
    assert {kind for kind, _ in world.failures} == {"prompt"}
    assert {facts["task"] for _, facts in world.failures} >= {"task-3", "task-10", "task-11", "held-out"}
    assert any("the prompt has 7 tokens, and 6 leave room" in facts["error"] for _, facts in world.failures)
    assert summary.accuracy_before is None


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_step_whose_gradient_is_not_finite_costs_its_groups_and_no_version(max_staleness: int) -> None:
    world = World(skips={1, 4})
    summary = run(world, first_is_better, max_staleness=max_staleness)
    assert (world.step, world.calls, world.version) == (6, 8, 6)
    assert [(kind, facts["step"]) for kind, facts in world.failures] == [("step", 2), ("step", 4)]
    assert summary.failures == {"step": 2}
    used = Counter(world.trained) + Counter(prompt for _, facts in world.failures for prompt in facts["tasks"])
    assert used.total() == 16
    assert set(used) == {task.prompt for task in TASKS}
    assert max(world.staleness) <= max_staleness


def test_too_many_lost_steps_or_samples_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trainer.loop.loop._DEATH_NOTICE_S", 0.02)
    world = World(skips=set(range(100)))
    with pytest.raises(TooManyFailuresError, match=r"3 of the last 20 optimizer steps failed.*gradient norm is nan"):
        run(world, first_is_better)
    assert (world.step, world.calls) == (0, 3)

    def judge(completion: str, task: Mapping[str, Any]) -> float:
        raise RewardError("judge returned nan.", part="judge")

    world = World()
    with pytest.raises(TooManyFailuresError, match=r"11 of the last 100 samples.*judge returned nan"):
        run(world, judge)
    assert world.failures[0][1]["task"] == "held-out"
    assert [kind for kind, _ in world.failures][:11] == ["reward"] * 11
    (event,) = world.events
    assert "returned nan" in event
