"""The loop with parts that live in this process: what ends a run, and which tasks it uses."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from weightlane.ckpt_engines import ConfigError, PeerLostError, WorkerDiedError
from weightlane.plugins import hookimpl, make_hooks
from weightlane.sync import SyncReport
from weightlane.trainer.batch import TrainBatch
from weightlane.trainer.config import AlgorithmConfig
from weightlane.trainer.loop import AsyncLoop, LoopParts
from weightlane.trainer.loop_config import LoopConfig
from weightlane.trainer.loop_state import LoopState
from weightlane.trainer.protocols import StepReport
from weightlane.trainer.rewards import Reward
from weightlane.trainer.summary import RunSummary
from weightlane.trainer.tasks import Task

ALGORITHM = AlgorithmConfig(prompts_per_step=2, group_size=2, max_new_tokens=4)
TASKS = [Task(f"task-{number}", "") for number in range(12)]


class Characters:
    """A tokenizer: a character is its code point."""

    def encode(self, text: str) -> Sequence[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


@dataclass
class Answer:
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]


@dataclass
class Figures:
    max_token_gap_s: float = 0.0


@dataclass
class World:
    """Trainers, one rollout and a syncer that share what they know; any of them can be made to fail."""

    version: int = 0
    step: int = 0
    published: int = -1
    trained: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    saved: list[LoopState] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    fails_at_step: int = -1
    dies: asyncio.Event = field(default_factory=asyncio.Event)
    name: str = "rollout-0"

    async def train_step(self, batch: TrainBatch) -> StepReport:
        if self.step == self.fails_at_step:
            asyncio.get_running_loop().call_later(0.05, self.dies.set)
            raise PeerLostError("the connection was reset.", part="gloo")
        prompts = ["".join(map(chr, sample.prompt_ids)) for sample in batch.samples]
        self.trained += prompts[:: ALGORITHM.group_size]
        await asyncio.sleep(0.001)
        self.step += 1
        return StepReport(self.step)

    async def publish(self, version: int) -> float:
        assert version == self.step, "the parameters are those of the version that is published"
        self.published = version
        return 0.0

    async def save(self, directory: Path) -> None:
        raise NotImplementedError

    async def save_loop(self, state: LoopState) -> None:
        self.saved.append(state)

    async def watch(self) -> NoReturn:
        await self.dies.wait()
        raise WorkerDiedError("trainer rank 1 (process 7) died.", part="trainer group", peer="trainer-1")

    async def sync(self, version: int) -> SyncReport:
        await asyncio.sleep(0.002)
        assert version == self.published
        self.version = version
        return SyncReport(version, 0.002, 0)

    async def generate_group(
        self,
        prompt_ids: Sequence[int],
        *,
        count: int,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        greedy: bool = False,
    ) -> Sequence[Answer]:
        version = self.version
        await asyncio.sleep(0.001)
        return [
            Answer([65 + n] * max_new_tokens, [-1.0] * max_new_tokens, [version] * max_new_tokens) for n in range(count)
        ]

    async def stats(self) -> Figures:
        return Figures()

    @hookimpl
    def training_step(self, step: int, facts: Mapping[str, Any]) -> None:
        self.staleness.append(facts["staleness_max"])

    @hookimpl
    def run_ended(self, facts: Mapping[str, Any]) -> None:
        self.events.append(facts.get("error", "well"))


class LiveRollout:
    """The world as a rollout: its own `watch` never ends."""

    def __init__(self, world: World) -> None:
        self.name = world.name
        self.generate_group = world.generate_group
        self.stats = world.stats

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError


def run(
    world: World,
    judge: Callable[[str, Mapping[str, Any]], float],
    *,
    resume: LoopState | None = None,
    **config: int,
) -> RunSummary:
    loop = AsyncLoop(
        LoopParts(
            trainers=world,
            rollouts=[LiveRollout(world)],
            syncer=world,
            tokenizer=Characters(),
            stop_token_ids=[0],
            judge=judge,
            train_tasks=TASKS,
            heldout_tasks=[Task("held-out", "")],
            hooks=make_hooks([world]),
            save=world.save_loop,
        ),
        LoopConfig(**{"steps": 6, **config}),
        ALGORITHM,
        seed=0,
        concurrency=4,
        resume=resume,
    )
    return asyncio.run(asyncio.wait_for(loop.run(), 30.0))


def first_is_better(completion: str, task: Mapping[str, Any]) -> float:
    return float(completion.startswith("A"))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_run_trains_every_task_once_per_epoch_within_the_staleness_bound(max_staleness: int) -> None:
    world = World()
    summary = run(world, first_is_better, max_staleness=max_staleness)
    assert sorted(world.trained) == sorted(task.prompt for task in TASKS), "six steps of two are one epoch"
    assert max(world.staleness) <= max_staleness
    assert world.version == 6, "the last version serves"
    assert summary.accuracy_before == summary.accuracy_after == 1.0
    assert world.events == ["well"]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_is_resumed_uses_every_task_that_was_not_trained_on_and_none_twice(max_staleness: int) -> None:
    world = World()
    run(world, first_is_better, max_staleness=max_staleness, steps=4, save_every=3)
    for state in world.saved:
        again = World(step=state.step)
        resumed = LoopState.from_plain(state.to_plain())
        run(again, first_is_better, max_staleness=max_staleness, steps=6, resume=resumed)
        used = Counter(world.trained[: 2 * state.step] + again.trained)
        assert used == Counter(task.prompt for task in TASKS)
        assert again.version == 6


def test_a_reward_that_is_not_a_number_ends_the_run_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nan_of_loop_test.py").write_text("def judge(completion, task):\n    return float('nan')\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("weightlane.trainer.loop._DEATH_NOTICE_S", 0.02)
    judge = Reward("nan_of_loop_test:judge", [tmp_path])
    world = World()
    with pytest.raises(ConfigError, match=r"nan_of_loop_test:judge returned nan for prompt 'held-out'"):
        run(world, judge)
    with pytest.raises(ConfigError, match=r"nan_of_loop_test:judge returned nan for prompt 'task-"):
        run(World(), judge, evaluate_tasks=0)
    assert len(world.events) == 1
    assert "returned nan" in world.events[0]


def test_a_process_that_died_is_named_rather_than_what_its_death_made_fail() -> None:
    world = World(fails_at_step=2)
    with pytest.raises(WorkerDiedError, match="trainer rank 1"):
        run(world, first_is_better)
    assert world.step == 2


def test_a_failed_call_without_a_death_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.trainer.loop._DEATH_NOTICE_S", 0.02)
    with pytest.raises(PeerLostError, match="the connection was reset"):
        run(World(fails_at_step=0), first_is_better)
