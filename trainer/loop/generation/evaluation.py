"""`Evaluator`: measures a version on held-out tasks: greedy rewards, and pass@k of sampled completions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...data.tasks import Task
from ..config import LoopConfig
from ..prompt_group import PromptGroup
from ..summary import ACCURACY
from .rollout_feeder import RolloutFeeder

_BESIDE_TRAINING = 16
"""Most concurrent requests of an evaluation during training, so that most capacity is left for training samples."""


class Evaluator:
    """Has the replicas answer the held-out tasks, each set of them under its name; a single set may have the name ``""``.

    `most_requests` are in flight at once where nothing else is.
    """

    def __init__(
        self, feeder: RolloutFeeder, sets: Mapping[str, Sequence[Task]], config: LoopConfig, *, most_requests: int
    ) -> None:
        self._feeder, self._config, self._most_requests = feeder, config, most_requests
        self._sets = {name: tasks[: config.evaluate_tasks] for name, tasks in sets.items() if tasks}

    async def measure(self, version: int | None = None) -> dict[str, Any] | None:
        """Answer and judge every task; `plugins.hooks.RunHooks.evaluated` says what is returned.

        The completions are generated with `version`; during training, without one, with the version that serves then, a few
        at a time. None if there is no task, or none could be answered and judged.
        """
        started = time.perf_counter()
        tasks = [(name, task) for name, tasks in self._sets.items() for task in tasks]
        samples = self._config.evaluate_samples
        most = self._most_requests if version is not None else _BESIDE_TRAINING
        free = asyncio.Semaphore(max(1, most // (1 + samples)))

        async def answer(turn: int, task: Task) -> tuple[PromptGroup, PromptGroup | None]:
            async with free:
                greedy = self._feeder.answer(task, turn, version)
                if not samples:
                    return await greedy, None
                return await asyncio.gather(greedy, self._feeder.answer(task, turn, version, samples=samples))

        answers = await asyncio.gather(*(answer(turn, task) for turn, (_, task) in enumerate(tasks)))
        by_set: dict[str, list[tuple[PromptGroup, PromptGroup | None]]] = {name: [] for name in self._sets}
        for (name, _), answered in zip(tasks, answers, strict=True):
            by_set[name].append(answered)
        measured = {name: self._measures(groups) for name, groups in by_set.items()}
        judged = sum(len(greedy.rewards) for greedy, _ in answers)
        if not judged:
            return None
        groups = [group for pair in answers for group in pair if group is not None]
        versions = [version for group in groups for done in group.completions for version in done.versions]
        return {
            **mean_measures(list(measured.values())),
            **{f"{key}_{name}": value for name, each in measured.items() if name for key, value in each.items()},
            "version_min": min(versions),
            "version_max": max(versions),
            "tasks": judged,
            "failed": len(tasks) - judged,
            "seconds": time.perf_counter() - started,
        }

    def _measures(self, answers: Sequence[tuple[PromptGroup, PromptGroup | None]]) -> dict[str, float]:
        """The measures of one set, without those of which no task was answered."""
        rewards = [reward for greedy, _ in answers for reward in greedy.rewards]
        measures = {ACCURACY: sum(rewards) / len(rewards)} if rewards else {}
        sampled = [group.rewards for _, group in answers if group is not None]
        k = 1
        while k <= self._config.evaluate_samples:
            estimates = [
                pass_at(k, len(judged), sum(reward >= self._config.pass_reward for reward in judged))
                for judged in sampled
                if len(judged) >= k
            ]
            if estimates:
                measures[f"pass_at_{k}"] = sum(estimates) / len(estimates)
            k *= 2
        return measures


def pass_at(k: int, samples: int, passed: int) -> float:
    """Estimate the probability that one of `k` completions passes, without bias, from `samples` of which `passed` did.

    ``1 - C(samples - passed, k) / C(samples, k)`` (arXiv 2107.03374, equation 1), for ``k <= samples``.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_measures(sets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over the sets that have it, whatever their sizes."""
    names = dict.fromkeys(name for each in sets for name in each)
    return {name: sum(found) / len(found) for name in names if (found := [each[name] for each in sets if name in each])}
