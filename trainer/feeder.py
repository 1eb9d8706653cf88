"""`RolloutFeeder`: keeps every replica generating as far as the staleness budget allows, and hands out judged groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .config import AlgorithmConfig
from .group import Group
from .overlap import OverlapClock
from .protocols import Completion, Rollout, Tokenizer
from .staleness import StalenessBudget
from .tasks import Task, TaskStream

GENERATION = "generation"
"""Name of the activity on the `OverlapClock`."""

Judge = Callable[[str, Mapping[str, Any]], float]
"""A checked reward function."""


class RolloutFeeder:
    """Generates groups on all replicas at once.

    Args:
        rollouts: The replicas.
        stream: Where prompts come from.
        tokenizer: Turns prompts into tokens and completions into text.
        judge: The reward function.
        algorithm: Group size, temperature and length.
        stop_token_ids: Tokens that end a completion.
        budget: How far ahead of the trainer groups may start.
        clock: Told when anything generates.
        groups_per_replica: Groups in flight per replica.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        stream: TaskStream,
        tokenizer: Tokenizer,
        judge: Judge,
        algorithm: AlgorithmConfig,
        *,
        stop_token_ids: Sequence[int],
        budget: StalenessBudget,
        clock: OverlapClock,
        groups_per_replica: int,
    ) -> None:
        self._rollouts = rollouts
        self._stream = stream
        self._tokenizer = tokenizer
        self._judge = judge
        self._algorithm = algorithm
        self._stop_token_ids = tuple(stop_token_ids)
        self._budget = budget
        self._clock = clock
        self._groups_per_replica = max(1, groups_per_replica)
        self._changed = asyncio.Condition()
        self._waiting: deque[Task] = deque()
        self._outstanding: list[Task] = []
        self._ready: deque[Group] = deque()
        self.generated_tokens = 0
        self.dropped_groups = 0

    async def run(self) -> None:
        """Generate until cancelled. Raises what a replica or the reward function raises."""
        async with asyncio.TaskGroup() as workers:
            for rollout in self._rollouts:
                for _ in range(self._groups_per_replica):
                    workers.create_task(self._work(rollout))

    async def version_committed(self, version: int) -> None:
        """A newer version serves: there is room for more groups."""
        async with self._changed:
            self._budget.committed = max(self._budget.committed, version)
            self._changed.notify_all()

    async def take(self, step: int) -> list[Group]:
        """The next groups to train parameters of version `step` on; waits for them, drops those that are too stale."""
        groups: list[Group] = []
        while len(groups) < self._algorithm.prompts_per_step:
            async with self._changed:
                await self._changed.wait_for(lambda: self._ready)
                group = self._ready.popleft()
                if self._budget.is_too_stale(step, group.oldest_version):
                    self._budget.give_back()
                    self._waiting.append(group.task)
                    self.dropped_groups += 1
                    self._changed.notify_all()
                    continue
            groups.append(group)
        return groups

    def trained(self, groups: Sequence[Group]) -> None:
        """The optimizer has used `groups`: their tasks are done."""
        for group in groups:
            self._outstanding.remove(group.task)

    def outstanding(self) -> list[Task]:
        """Tasks drawn from the stream and not trained on yet; a resumed run begins with them."""
        return list(self._outstanding)

    def requeue(self, tasks: Sequence[Task]) -> None:
        """Generate `tasks` before any new one."""
        self._waiting.extend(tasks)
        self._outstanding.extend(tasks)

    async def generate(self, rollout: Rollout, task: Task, *, count: int, greedy: bool = False) -> Group:
        """`count` judged completions of one task on one replica."""
        prompt_ids = self._tokenizer.encode(task.prompt)
        completions = await rollout.generate_group(
            prompt_ids,
            count=count,
            max_new_tokens=self._algorithm.max_new_tokens,
            temperature=self._algorithm.temperature,
            stop_token_ids=self._stop_token_ids,
            greedy=greedy,
        )
        rewards = await asyncio.to_thread(self._rewards, task, completions)
        self.generated_tokens += sum(len(completion.token_ids) for completion in completions)
        return Group(task, prompt_ids, completions, rewards, rollout.name)

    def _rewards(self, task: Task, completions: Sequence[Completion]) -> list[float]:
        facts = task.as_mapping()
        return [self._judge(self._tokenizer.decode(completion.token_ids), facts) for completion in completions]

    async def _work(self, rollout: Rollout) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._budget.room > 0)
                self._budget.admit()
                task = self._next_task()
            with self._clock.busy(GENERATION):
                group = await self.generate(rollout, task, count=self._algorithm.group_size)
            async with self._changed:
                self._ready.append(group)
                self._changed.notify_all()

    def _next_task(self) -> Task:
        if self._waiting:
            return self._waiting.popleft()
        task = next(self._stream)
        self._outstanding.append(task)
        return task
