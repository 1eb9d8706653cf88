"""`Curriculum`: a stream that draws tasks of middling success more often than those that are always or never solved."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from weightlane.ckpt_engines import ConfigError

from ...data.tasks import Task, TaskStream

_LEAST = 0.1
"""Smallest weight: a task that was always or never solved is drawn a tenth as often as one that is solved half the time."""


class Curriculum(TaskStream[Task]):
    """Every task once, in shuffled order; then, for ever, tasks drawn with weights by the success rates of their latest groups.

    The weight is ``max(0.1, 4 p (1 - p))`` for a success rate p, and 1 as long as there is none. A completion succeeds if its
    reward is above 0; a group of which none could be judged counts as one without success. The same seed and the same rates at
    every draw give the same stream; in a run, rates depend on which groups have ended. Tasks with the same prompt share a rate.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        super().__init__(tasks, seed)
        self._places = {task.prompt: place for place, task in reversed(list(enumerate(tasks)))}
        self._rates: dict[int, float] = {}
        """Success rate of a task's latest group, by the task's place in the data."""
        self._draws = 0

    @property
    def mean_rate(self) -> float | None:
        """Mean of the tasks' latest success rates; None if there is none."""
        return sum(self._rates.values()) / len(self._rates) if self._rates else None

    def __next__(self) -> Task:
        if self._epoch == 0 and self._position < len(self._tasks):
            return super().__next__()
        draws = random.Random(f"{self._seed}:draw {self._draws}")  # noqa: S311 - an order of data, not a secret
        self._draws += 1
        while True:  # ends after `1 / _LEAST` tries on average at most
            task = self._tasks[draws.randrange(len(self._tasks))]
            if draws.random() < self._weight(task):
                return task

    def judged(self, task: Task, rewards: Sequence[float]) -> None:
        """See `TaskStream.judged`."""
        if task.prompt in self._places:
            right = sum(reward > 0 for reward in rewards)
            self._rates[self._places[task.prompt]] = right / len(rewards) if rewards else 0.0

    def state(self) -> dict[str, Any]:
        """See `TaskStream.state`; with the number of draws and the rates."""
        rates = {str(place): rate for place, rate in sorted(self._rates.items())}
        return {**super().state(), "draws": self._draws, "rates": rates}

    def restore(self, state: Mapping[str, Any], *, may_change: bool = False) -> None:
        """See `TaskStream.restore`. A state of a stream without rates, or of tasks of other content, begins without any."""
        super().restore(state, may_change=may_change)
        try:
            self._draws = int(state.get("draws", 0))
            rates = {int(place): float(rate) for place, rate in state.get("rates", {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"the saved success rates are damaged: {error!r}.", part="data") from None
        same = state.get("digest", self._digest) == self._digest
        self._rates = {place: rate for place, rate in rates.items() if same and 0 <= place < len(self._tasks)}

    def _weight(self, task: Task) -> float:
        rate = self._rates.get(self._places[task.prompt])
        return 1.0 if rate is None else max(_LEAST, 4.0 * rate * (1.0 - rate))
