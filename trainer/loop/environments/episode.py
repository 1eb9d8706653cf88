"""`Episode`: the tokens of one episode, turn by turn, exactly as the model read and wrote them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import ConfigError, EpisodeError, ProtocolError, WeightlaneError, as_weightlane_error

from ...data.conversations import template_options
from ...data.tasks import Task
from ...data.written_text import WrittenText
from ..protocols import Completion, Judge, Rollout, Trajectory, Turn
from .contract import Message, Reply
from .rendering import Renderer

_PART = "environment"
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of every episode of a run, and how its tokens are sampled."""

    max_model_len: int
    """Most tokens of an episode."""
    max_turns: int
    """Most replies."""
    max_new_tokens: int
    """Most tokens of a reply."""
    temperature: float
    stop_token_ids: Sequence[int]


class Episode:
    """An `EpisodeView`: keeps the tokens, has them continued by one replica, and measures how long a turn takes.

    Every reply is generated from the tokens so far and those of the news. A turn stays on the replica of the turns before, whose
    cache has their tokens.
    """

    def __init__(
        self, rollout: Rollout, task: Task, renderer: Renderer, limits: EpisodeLimits, judge: Judge, *, greedy: bool
    ) -> None:
        self._rollout, self._task, self._renderer, self._limits = rollout, task, renderer, limits
        self._judge, self._greedy = judge, greedy
        self._template_after: list[Mapping[str, Any]] = [template_options(task.extra, task.place)]
        """The chat template's further arguments up to each reply, as `_ids_after`."""
        self._ids_after: list[list[int]] = [[]]
        """The tokens up to the end of each reply, with those of none first."""
        self._replying = self._closed = False
        self.turns: list[Turn] = []
        self.ended = ""
        """Why no further reply is given: ``full`` or ``turns``."""
        self.failure: WeightlaneError | None = None
        """The error that a reply or the reward function ended with. Whatever the environment makes of it, it ends the episode."""
        self.kind = ""
        """The kind of `failure`."""
        self.turn_began = asyncio.get_running_loop().time()
        """When the last reply was asked for or given, in the event loop's seconds."""

    @property
    def token_ids(self) -> Sequence[int]:
        """See `EpisodeView.token_ids`."""
        return self._ids_after[-1]

    @property
    def trajectory(self) -> Trajectory:
        """The turns so far."""
        return Trajectory(tuple(self.turns))

    def close(self) -> None:
        """Refuse further replies."""
        self._closed = True

    async def reply(
        self,
        news: str | Sequence[Message] | None = None,
        *,
        after: int | None = None,
        max_new_tokens: int | None = None,
        **template: Any,
    ) -> Reply:
        """See `EpisodeView.reply`."""
        if self._closed or self._replying or self.ended:
            why = "it is over" if self._closed or self.ended else "its last reply is still being written"
            raise EpisodeError(f"the environment asks an episode for a reply, and {why}.", part=_PART)
        number = len(self.turns) if after is None else after
        if not 0 <= number <= len(self.turns):
            raise EpisodeError(f"there is no reply {number} to go on after.", part=_PART)
        self._replying = True
        try:
            return await self._reply(news, number, max_new_tokens or self._limits.max_new_tokens, template)
        except Exception as error:
            self._fail(as_weightlane_error(error, _PART), self.kind or "request")
            raise
        finally:
            self._replying = False
            self.turn_began = asyncio.get_running_loop().time()

    async def judge(self, reply: Reply) -> float:
        """See `EpisodeView.judge`."""
        try:
            return await self._judge(WrittenText(reply.text, reply.token_ids, reply.logprobs), self._task.as_mapping())
        except WeightlaneError as error:
            self._fail(error, "reward")
            raise

    def _fail(self, error: WeightlaneError, kind: str) -> None:
        if self.failure is None:
            self.failure, self.kind = error, kind

    async def _reply(
        self, news: str | Sequence[Message] | None, after: int, most: int, template: Mapping[str, Any]
    ) -> Reply:
        """Reply to `news`, which follow reply number `after`, with at most `most` tokens."""
        template = {**self._template_after[after], **template}
        self.kind = "environment" if self.turns else "prompt"  # until it has been rendered
        read_ids, limits = self._read(news, after, template), self._limits
        before = self._ids_after[after]
        room = limits.max_model_len - len(before) - len(read_ids)
        if not self.turns or not (before or read_ids):
            self._check_prompt(read_ids, room, min(limits.max_new_tokens, most))
        elif room < 1 or len(self.turns) >= limits.max_turns:
            self.ended = "full" if room < 1 else "turns"
            return Reply("", "full" if room < 1 else "turns")
        self.kind = ""
        self.turn_began = asyncio.get_running_loop().time()
        prompt_ids = [*before, *read_ids]
        completion: Completion = await self._rollout.generate(
            f"episode-{next(_serial)}",
            prompt_ids,
            min(limits.max_new_tokens, most, room),
            temperature=limits.temperature,
            stop_ids=limits.stop_token_ids,
            greedy=self._greedy,
        )
        if not completion.token_ids or not all(map(math.isfinite, completion.logprobs)):
            raise ProtocolError(
                "the completion is empty, or has log-probabilities that are not finite.", part=self._rollout.name
            )
        self._ids_after.append([*prompt_ids, *completion.token_ids])
        self._template_after.append(template)
        sequences = [turn.sequence for turn in self.turns]
        if after and sequences[after - 1] not in sequences[after:]:
            self.turns.append(Turn(read_ids, completion, sequences[after - 1]))
        else:
            self.turns.append(Turn(prompt_ids, completion, max(sequences, default=-1) + 1))
        stopped = completion.token_ids[-1] in limits.stop_token_ids
        text = self._renderer.text(completion.token_ids)
        return Reply(text, "stop" if stopped else "length", completion.token_ids, completion.logprobs)

    def _read(self, news: str | Sequence[Message] | None, after: int, template: Mapping[str, Any]) -> list[int]:
        if after:
            written = self.turns[after - 1].completion.token_ids
            return self._renderer.continuation([] if news is None else news, template, written)
        if news is None:
            news = self._task.extra.get("messages", self._task.prompt)
        return self._renderer.opening(news, template)

    def _check_prompt(self, read_ids: Sequence[int], room: int, most: int) -> None:
        if not read_ids or room < most:
            raise ConfigError(
                f"the prompt has {len(read_ids)} tokens, and at least one and at most"
                f" {self._limits.max_model_len - most} leave room for a completion.",
                part="data",
                hint="rollout.max_model_len is for all turns, algorithm.max_new_tokens for each of the model's.",
            )
