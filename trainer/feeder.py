"""`RolloutFeeder`: keeps every replica generating as far as the staleness budget allows, and hands out judged groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightlane.ckpt_engines import WeightlaneError

from .config import AlgorithmConfig
from .fleet import Fleet
from .group import Group
from .overlap import OverlapClock
from .protocols import Completion, Rollout, Tokenizer
from .staleness import StalenessBudget
from .tasks import Task, TaskStream

GENERATION = "generation"
"""Name of the activity on the `OverlapClock`."""

_PAUSE_S = 0.2
"""How long after a failed request its replica is left alone."""

Judge = Callable[[str, Mapping[str, Any]], float]
"""A checked reward function."""


class RolloutFeeder:
    """Generates groups on all replicas at once.

    A group that its replica cannot finish, because it died or was taken out of service, is begun anew on another one. No
    task is lost by that, and none used twice: only complete groups are handed out.

    Args:
        fleet: The replicas.
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
        fleet: Fleet,
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
        self._fleet = fleet
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
        self._workers: asyncio.TaskGroup | None = None
        self._news: set[asyncio.Task[None]] = set()
        self.generated_tokens = 0
        self.dropped_groups = 0

    async def run(self) -> None:
        """Generate until cancelled. Raises what a replica or the reward function raises."""
        try:
            async with asyncio.TaskGroup() as self._workers:
                for rollout in self._fleet.living:
                    self.add(rollout)
                await asyncio.Event().wait()  # also while no replica is left to work with
        finally:
            self._workers = None

    def add(self, rollout: Rollout) -> None:
        """A replica has joined; it gets requests once it serves."""
        if self._workers is not None:  # else `run` begins with it
            for _ in range(self._groups_per_replica):
                self._workers.create_task(self._work(rollout))

    def replicas_changed(self) -> None:
        """Look again at who may get requests."""
        task = asyncio.create_task(self._notify())
        self._news.add(task)
        task.add_done_callback(self._news.discard)

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

    async def answer(self, task: Task, version: int, turn: int) -> Group:
        """A judged greedy completion of `task` by a replica that serves `version`: the `turn`-th of them, in rotation."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._fleet.serving(version))
                able = self._fleet.serving(version)
            rollout = able[turn % len(able)]
            try:
                return await self.generate(rollout, task, count=1, greedy=True)
            except WeightlaneError as error:
                if not self._fleet.excuses(rollout, error):
                    raise
            await asyncio.sleep(_PAUSE_S)

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
        fleet, budget = self._fleet, self._budget
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not fleet.lives(rollout) or (budget.room > 0 and fleet.serves(rollout))
                )
                if not fleet.lives(rollout):
                    return
                budget.admit()
                task = self._next_task()
            with self._clock.busy(GENERATION):
                group = await self._try(rollout, task)
            async with self._changed:
                if group is not None:
                    self._ready.append(group)
                else:
                    budget.give_back()
                    self._waiting.appendleft(task)
                self._changed.notify_all()
            if group is None:
                # The coordinator may need a moment to learn what the replica said of itself.
                await asyncio.sleep(_PAUSE_S)

    async def _try(self, rollout: Rollout, task: Task) -> Group | None:
        """A group, or None when its replica cannot be asked for one now, or not trusted with what it answered."""
        try:
            group = await self.generate(rollout, task, count=self._algorithm.group_size)
        except WeightlaneError as error:
            if self._fleet.excuses(rollout, error):
                return None
            raise
        return group if self._fleet.serves(rollout) else None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _next_task(self) -> Task:
        if self._waiting:
            return self._waiting.popleft()
        task = next(self._stream)
        self._outstanding.append(task)
        return task
