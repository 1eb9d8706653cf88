"""`RolloutFeeder`: keeps every replica generating as far as the staleness budget allows, and hands out judged groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...data.tasks import Task, TaskStream
from ...objectives.config import AlgorithmConfig
from ..failures import Failures
from ..fleet import Fleet
from ..prompt_group import PromptGroup
from ..protocols import LoopParts, Rollout
from ..sampling.request_room import RequestRoom
from ..sampling.staleness_budget import StalenessBudget
from ..sampling.tally import SampleTally
from ..summary import OverlapClock
from .group_generator import FEWEST, GroupGenerator

GENERATION = "generation"
"""Name of the generating activity on the `OverlapClock`."""

_PAUSE_S = 0.2
"""Seconds to wait after a failed request before the next one."""


@dataclass(slots=True, eq=False)
class _Place:
    """A started group's place in the queue."""

    task: Task
    group: PromptGroup | None = None
    """The group once it is complete."""
    replaced: list[PromptGroup] = field(default_factory=list)
    """Groups without signal that were drawn for this place before."""


class RolloutFeeder:
    """Generates groups on all replicas at once, and hands them out in the order in which they were begun.

    In any other order, such as that of completion, short completions would be trained on more often than they are sampled.
    `late` decides about a group that is not complete at its turn: see `LoopConfig.late_groups`.

    A group that its replica cannot finish, because it died or was taken out of service, starts over on another one. No
    task is lost by that, and none used twice. A completion that fails, or cannot be judged, is left out; so is its group
    if fewer than two completions remain. Those that take too long are mostly the longest, so all of them count as drawn.

    With ``algorithm.refill``, a group without signal is replaced when it is complete, by one of the next task in the same place:
    neither the order nor the budget changes, and its tokens are not older.

    `budget` says how far ahead of the trainer groups may start.
    """

    def __init__(
        self,
        parts: LoopParts,
        fleet: Fleet,
        stream: TaskStream[Task],
        algorithm: AlgorithmConfig,
        *,
        budget: StalenessBudget,
        late: Literal["wait", "train", "mask", "drop"],
        clock: OverlapClock,
        failures: Failures,
        concurrency: int,
    ) -> None:
        self._parts, self._fleet, self._stream, self._algorithm = parts, fleet, stream, algorithm
        self._budget, self._late, self._clock, self._failures = budget, late, clock, failures
        self._concurrency = concurrency
        """Most requests in flight per replica."""
        self._changed = asyncio.Condition()
        self._waiting: deque[Task] = deque()
        """Tasks that are started before any new one."""
        self._outstanding: list[Task] = []
        self._line: deque[_Place] = deque()
        """Groups that were started and not handed out yet, in the order in which they were started."""
        self._again: deque[_Place] = deque()
        """Places in `_line` whose replica could not finish the group."""
        self._workers: asyncio.TaskGroup | None = None
        self._news: set[asyncio.Task[None]] = set()
        self.dropped_groups = 0
        self._generator = GroupGenerator(parts, fleet, algorithm, failures)
        self.drawn = self._generator.drawn
        self.tally = SampleTally()
        """Counts of the groups whose turn has come, and of their rewards."""

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, of evaluations too."""
        return self._generator.generated_tokens

    async def run(self) -> None:
        """Generate until cancelled. Raises errors of a replica that the fleet does not excuse, and `TooManyFailuresError`."""
        try:
            async with asyncio.TaskGroup() as self._workers:
                for rollout in self._fleet.living:
                    self.add(rollout)
                await asyncio.Event().wait()  # also while no replica is left to work with
        finally:
            self._workers = None

    def add(self, rollout: Rollout) -> None:
        """Generate on a replica that has joined; it gets requests once it serves."""
        if self._workers is not None:  # else `run` begins with it
            room = RequestRoom(self._concurrency)
            for _ in range(max(1, self._concurrency // min(map(self._size, self._parts.train_tasks)))):
                self._workers.create_task(self._work(rollout, room))

    def replicas_changed(self) -> None:
        """Check again which replicas may get requests."""
        task = asyncio.create_task(self._notify())
        self._news.add(task)
        task.add_done_callback(self._news.discard)

    async def version_committed(self, version: int) -> None:
        """Make room for more groups: a newer version serves."""
        async with self._changed:
            self._budget.committed = max(self._budget.committed, version)
            self._changed.notify_all()

    async def take(self, step: int) -> list[PromptGroup]:
        """Wait for the next groups to train parameters of version `step` on, and return them."""
        groups: list[PromptGroup] = []
        while len(groups) < self._algorithm.prompts_per_step:
            async with self._changed:
                await self._changed.wait_for(lambda: self._next() is not None)
                place = self._next()
                assert place is not None
                assert place.group is not None
                late = self._budget.is_too_stale(step, place.group.oldest_version)
                if late and self._late == "wait":
                    # Its replica had missed versions. The group is sampled again, whatever its length was.
                    place.group = None
                    self._again.append(place)
                    self._changed.notify_all()
                    continue
                self._leave_line(place, place.group)
                if late and self._late == "drop":
                    self._give_up(place)
                    self.dropped_groups += 1
                    continue
            groups.append(place.group)
        return groups

    def _next(self) -> _Place | None:
        """The next group to hand out, if it is complete."""
        if self._late != "wait":
            return next((place for place in self._line if place.group is not None), None)
        return self._line[0] if self._line and self._line[0].group is not None else None

    def _leave_line(self, place: _Place, last: PromptGroup) -> None:
        """Remove a place from the line, and count the groups that were drawn for it, of which `last` is the last one."""
        self._line.remove(place)
        for group in (*place.replaced, last):
            self.drawn.add(group)
            for episode in group.dropped:
                self.drawn.lose(len(episode.trajectory.token_ids))
            self.tally.overlong_completions += len(group.dropped)
            self.tally.add_rewards([episode.reward for episode in group.dropped])
            if len(group.completions) < FEWEST:
                self.tally.add_rewards(group.rewards)
                continue
            signal, refilled = group.has_signal(self._algorithm), group is not last
            self.tally.draw(group.rewards, signal=signal, overlong=len(group.overlong), refilled=refilled)

    def _complete(self, place: _Place, group: PromptGroup) -> None:
        """Put a group in its place, or have a further task's group generated there if this one has no signal."""
        if len(place.replaced) < self._algorithm.refill and not group.has_signal(self._algorithm):
            place.replaced.append(group)
            self._outstanding.remove(place.task)
            place.task = self._next_task()
            self._again.append(place)
        else:
            place.group = group

    def _give_up(self, place: _Place) -> None:
        """Give up a group that is not trained on, so that another one may begin. Its task is done."""
        self._budget.give_back()
        self._outstanding.remove(place.task)
        self._changed.notify_all()

    def trained(self, groups: Sequence[PromptGroup]) -> None:
        """Mark the tasks of `groups` as done: the optimizer has used them."""
        for group in groups:
            self._outstanding.remove(group.task)

    async def wasted(self, groups: Sequence[PromptGroup]) -> None:
        """Give up `groups` whose step changed nothing: their tasks are done, and others may begin."""
        async with self._changed:
            for group in groups:
                self._give_up(_Place(group.task))

    def outstanding(self) -> list[Task]:
        """Tasks drawn from the stream and not trained on yet; a resumed run begins with them."""
        return list(self._outstanding)

    def requeue(self, tasks: Sequence[Task]) -> None:
        """Generate `tasks` before any new one."""
        self._waiting.extend(tasks)
        self._outstanding.extend(tasks)

    async def answer(self, task: Task, turn: int, version: int | None = None, *, samples: int = 0) -> PromptGroup:
        """Have a serving replica answer a held-out `task`, and judge: one greedy completion, or as many `samples`.

        `turn` chooses among replicas, round-robin; with `version`, among those that serve it. Completions that failed are
        left out.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._fleet.serving(version))
                able = self._fleet.serving(version)
            group = await self._generator.generate(
                able[turn % len(able)], task, samples or 1, greedy=not samples, trained=False
            )
            if group is not None:
                return group
            await asyncio.sleep(_PAUSE_S)

    def _size(self, task: Task) -> int:
        """The number of completions of a task's group."""
        return task.group_size or self._algorithm.group_size

    async def _work(self, rollout: Rollout, room: RequestRoom) -> None:
        fleet = self._fleet
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: (
                        not fleet.stays(rollout)
                        or ((self._again or self._budget.room > 0) and fleet.serves(rollout) and room.is_open)
                    )
                )
                if not fleet.stays(rollout):
                    return
                place = self._next_place()
            count = self._size(place.task)
            async with room.taken(count):
                self.replicas_changed()  # the room may be open to another group again
                group = None
                if fleet.stays(rollout):  # it may have begun to leave meanwhile
                    with self._clock.busy(GENERATION):
                        group = await self._generator.generate(rollout, place.task, count)
            async with self._changed:
                if group is not None:
                    self._stream.judged(place.task, [*group.rewards, *(each.reward for each in group.dropped)])
                if group is None:
                    self._again.append(place)
                elif len(group.completions) < FEWEST:
                    self._leave_line(place, group)
                    self._give_up(place)
                else:
                    self._complete(place, group)
                self._changed.notify_all()
            if group is None:
                # The coordinator may need a moment to learn the replica's state.
                await asyncio.sleep(_PAUSE_S)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _next_place(self) -> _Place:
        if self._again:
            return self._again.popleft()
        self._budget.admit()
        place = _Place(self._next_task())
        self._line.append(place)
        return place

    def _next_task(self) -> Task:
        if self._waiting:
            return self._waiting.popleft()
        task = next(self._stream)
        self._outstanding.append(task)
        return task
