"""`GroupGenerator`: has a replica generate the completions of a task, or play its episodes, and judges them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import (
    ConfigError,
    DeadlineExceededError,
    ProtocolError,
    RewardError,
    TooManyFailuresError,
    WeightlaneError,
)

from ...data.tasks import Task
from ...data.written_text import WrittenText
from ...objectives.config import AlgorithmConfig
from ..failures import Failures
from ..fleet import Fleet
from ..prompt_group import PromptGroup
from ..protocols import Completion, EpisodePlayer, LoopParts, Played, Rollout, Trajectory, Turn
from ..sampling.overlong import overlong_places

FEWEST = 2
"""Completions that a group needs: their rewards are compared."""
_MOST_EMPTY = 100
"""Groups in a row of which dropping overlong completions leaves too little, after which a run ends: it would train on nothing."""


@dataclass(slots=True)
class Lengths:
    """Total and mean length of completions."""

    completions: int = 0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """Mean number of tokens of a completion; 0 if there is none."""
        return self.tokens / self.completions if self.completions else 0.0

    def add(self, group: PromptGroup, oldest: int = -1) -> None:
        """Count the completions of `group`, without tokens of versions older than `oldest`."""
        for completion in group.completions:
            tokens = sum(version >= oldest for version in completion.versions)
            self.completions += tokens > 0
            self.tokens += tokens

    def lose(self, tokens: int) -> None:
        """Count a completion of `tokens` tokens that is left out."""
        self.completions += 1
        self.tokens += tokens


class GroupGenerator:
    """Generates groups with any replica, one call for each, and counts what it generates."""

    def __init__(self, parts: LoopParts, fleet: Fleet, algorithm: AlgorithmConfig, failures: Failures) -> None:
        self._parts, self._fleet, self._algorithm, self._failures = parts, fleet, algorithm, failures
        self.generated_tokens = 0
        self.drawn = Lengths()
        """Lengths of all completions whose turn for training has come, and of those that are left out.

        A request that was ended by its time limit counts as one of `AlgorithmConfig.max_new_tokens`.
        """
        self._empty_in_a_row = 0

    async def generate(
        self, rollout: Rollout, task: Task, count: int, *, greedy: bool = False, trained: bool = True
    ) -> PromptGroup | None:
        """Generate and judge at most `count` completions of one task; None if the replica died or is out of service.

        With `trained`, they are for training: they count as drawn, and a replica that is out of service is refused.
        """
        with self._fleet.using(rollout):
            if self._parts.player is None:
                episodes = await self._answered(rollout, task, count, greedy=greedy, trained=trained)
            else:
                episodes = await self._played(self._parts.player, rollout, task, count, greedy=greedy, trained=trained)
            if episodes is None:
                return None
            if not episodes:  # nothing was generated: that says nothing about overlong completions
                return PromptGroup(task, [], rollout.name)
            return self._group(task, [each for each in episodes if each is not None], rollout, trained=trained)

    async def _answered(
        self, rollout: Rollout, task: Task, count: int, *, greedy: bool, trained: bool
    ) -> list[Played | None] | None:
        """Generate at most `count` completions of one task with one request, as episodes of one turn; None as `generate`."""
        try:
            prompt_ids = self._encoded(task)
        except ConfigError as error:
            # An invalid held-out prompt fails in every evaluation, and trains nothing.
            self._failures.failed("prompt", error, count, may_end=trained, task=task.prompt, place=task.place)
            await asyncio.sleep(0)  # lets other tasks run even if every prompt fails
            return []
        try:
            answers = await rollout.generate_group(
                prompt_ids,
                count=count,
                max_new_tokens=self._algorithm.max_new_tokens,
                temperature=self._algorithm.temperature,
                stop_token_ids=self._parts.stop_token_ids,
                greedy=greedy,
            )
        except WeightlaneError as error:
            if self._fleet.excuses(rollout, error):
                return None
            answers = [error] * count
        if trained and not self._fleet.serves(rollout):
            return None

        async def one(answer: Completion | WeightlaneError) -> Played | None:
            played = await self._judged(task, prompt_ids, answer, rollout.name)
            return self._counted(played, rollout, task, trained=trained)

        return await asyncio.gather(*map(one, answers))

    def _counted(self, played: Played, rollout: Rollout, task: Task, *, trained: bool) -> Played | None:
        """Count an episode that has ended. Returns it; None if it failed."""
        tokens = len(played.trajectory.token_ids)
        self.generated_tokens += tokens
        if played.error is None:
            self._failures.well()
            return played
        if isinstance(played.error, DeadlineExceededError):
            tokens += self._algorithm.max_new_tokens
        if trained and tokens:
            self.drawn.lose(tokens)
        facts: dict[str, Any] = {"task": task.prompt, "place": task.place, "replica": rollout.name}
        if played.text:
            facts["completion"] = played.text
        if self._parts.player is not None:
            facts["turns"] = len(played.trajectory.turns)
        # A prompt that does not fit, and is a held-out one, trains nothing and fails in every evaluation.
        may_end = trained or played.kind != "prompt"
        self._failures.failed(played.kind, played.error, may_end=may_end, **facts)
        return None

    def _group(self, task: Task, episodes: Sequence[Played], rollout: Rollout, *, trained: bool) -> PromptGroup:
        """Make a group, if it is for training without overlong completions where these are dropped."""
        overlong = overlong_places(
            [each.trajectory for each in episodes],
            self._parts.stop_token_ids,
            self._algorithm.max_new_tokens,
            self._parts.max_model_len,
        )
        group = PromptGroup(task, episodes, rollout.name, overlong)
        return self._without_overlong(group) if trained and self._algorithm.overlong == "drop" else group

    def _without_overlong(self, group: PromptGroup) -> PromptGroup:
        left = group.without_overlong()
        enough = len(left.completions) >= FEWEST or not group.overlong
        self._empty_in_a_row = 0 if enough else self._empty_in_a_row + 1
        if self._empty_in_a_row >= _MOST_EMPTY:
            raise TooManyFailuresError(
                f"of {_MOST_EMPTY} groups in a row, fewer than two completions ended within"
                f" {self._algorithm.max_new_tokens} tokens.",
                part="loop",
                hint='Raise algorithm.max_new_tokens, or set algorithm.overlong to "mask" or "penalty" instead of "drop".',
            )
        return left

    async def _played(
        self, player: EpisodePlayer, rollout: Rollout, task: Task, count: int, *, greedy: bool, trained: bool
    ) -> list[Played | None] | None:
        """Play at most `count` episodes of one task; None as `generate`."""

        async def one() -> Played | None:
            played = await player.play(rollout, task, greedy=greedy)
            if played.error is not None and self._fleet.excuses(rollout, played.error):
                raise played.error  # the group starts over, so the other episodes end
            return self._counted(played, rollout, task, trained=trained)

        try:
            async with asyncio.TaskGroup() as playing:
                tasks = [playing.create_task(one()) for _ in range(count)]
        except ExceptionGroup as errors:
            ends = [error for error in errors.exceptions if isinstance(error, TooManyFailuresError)]
            first = (*ends, *errors.exceptions)[0]
            if isinstance(first, WeightlaneError) and not ends:
                return None  # it is excused
            raise first from None
        if trained and not self._fleet.serves(rollout):
            return None
        return [each.result() for each in tasks]

    def _encoded(self, task: Task) -> list[int]:
        """Tokenize the prompt. Raises `ConfigError` if it cannot be tokenized, or leaves no room for a completion."""
        try:
            prompt_ids = list(self._parts.tokenizer.encode(task.prompt))
        except Exception as cause:  # of the tokenizer
            raise ConfigError(
                f"the prompt cannot be tokenized: {type(cause).__name__}: {cause}",
                part="data",
                hint="Correct the data.",
            ) from cause
        most = self._parts.max_model_len - self._algorithm.max_new_tokens
        if self._parts.max_model_len and len(prompt_ids) > most:
            raise ConfigError(
                f"the prompt has {len(prompt_ids)} tokens, and {most} leave room for a completion.",
                part="data",
                hint="rollout.max_model_len is for prompt and completion, algorithm.max_new_tokens for the latter.",
            )
        return prompt_ids

    async def _judged(
        self, task: Task, prompt_ids: Sequence[int], answer: Completion | WeightlaneError, replica: str
    ) -> Played:
        """A completion as an episode of one turn, which has failed if the request or the reward did."""
        if isinstance(answer, WeightlaneError):
            return Played(Trajectory(()), error=answer, kind="request")
        if not answer.token_ids or not all(map(math.isfinite, answer.logprobs)):
            error = ProtocolError(
                "the completion is empty, or has log-probabilities that are not finite.", part=replica
            )
            return Played(Trajectory(()), error=error, kind="request")
        trajectory = Trajectory((Turn(prompt_ids, answer),))
        written = list(answer.token_ids)
        while written and written[-1] in self._parts.stop_token_ids:
            written.pop()
        text = self._parts.tokenizer.decode(written)
        try:
            written_text = WrittenText(text, answer.token_ids, answer.logprobs)
            reward = await self._parts.judge(written_text, task.as_mapping())
        except RewardError as failure:
            return Played(trajectory, text, error=failure, kind="reward")
        return Played(trajectory, text, reward)
