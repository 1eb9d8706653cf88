"""`Player`: plays episodes of an environment, each within its time limits, and turns whatever it does into a typed result."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Sequence

from weightlane.ckpt_engines import DeadlineExceededError, EpisodeError, WeightlaneError

from ...config import EnvironmentConfig
from ...data.rewards import LARGEST_REWARD
from ...data.tasks import Task
from ...objectives.config import AlgorithmConfig
from ..protocols import Judge, Played, Rollout
from .contract import Environment, Verdict
from .episode import Episode, EpisodeLimits
from .rendering import EpisodeTokenizer, Renderer


class Player:
    """Plays episodes of one environment: many at once, and none with a thread of its own.

    Args:
        environment: The environment.
        config: Its limits, and its name for errors.
        algorithm: How tokens are sampled.
        tokenizer: The model's.
        stop_token_ids: Tokens that end a reply.
        judge: The run's reward function.
        max_model_len: Most tokens of an episode.
    """

    def __init__(
        self,
        environment: Environment,
        config: EnvironmentConfig,
        algorithm: AlgorithmConfig,
        *,
        tokenizer: EpisodeTokenizer,
        stop_token_ids: Sequence[int],
        judge: Judge,
        max_model_len: int,
    ) -> None:
        self._environment, self._config, self._judge = environment, config, judge
        self._renderer, self._tokenizer = Renderer(tokenizer, stop_token_ids), tokenizer
        self._limits = EpisodeLimits(
            max_model_len, config.max_turns, algorithm.max_new_tokens, algorithm.temperature, stop_token_ids
        )
        self._left_behind: set[asyncio.Task[Verdict]] = set()
        """Episodes that were given up and still run: they ignore that they were cancelled."""

    async def play(self, rollout: Rollout, task: Task, *, greedy: bool) -> Played:
        """See `EpisodePlayer.play`."""
        episode = Episode(rollout, task, self._renderer, self._limits, self._judge, greedy=greedy)
        verdict: Verdict | None = None
        error: WeightlaneError | None = None
        try:
            verdict = self._checked(await self._within_limits(task, episode))
        except WeightlaneError as raised:
            error = raised
        finally:
            episode.close()
        if episode.failure is not None:  # the environment may have caught it
            error = episode.failure
        trajectory = episode.trajectory
        if error is None and not trajectory.turns:
            error = EpisodeError("it ended without a reply of the model.", part=self._part)
        if error is not None or verdict is None:
            return Played(trajectory, error=error, kind=episode.kind or "environment")
        text = self._tokenizer.decode(trajectory.whole[len(trajectory.turns[0].read_ids) :])
        return Played(trajectory, text, float(verdict.reward), verdict.metrics, episode.ended)

    @property
    def _part(self) -> str:
        return f"environment {self._config.name}"

    async def _within_limits(self, task: Task, episode: Episode) -> Verdict:
        """Let the environment play, and leave it behind when a limit has passed, even if it ignores that it is cancelled."""
        now = asyncio.get_running_loop().time
        ends = now() + self._config.episode_time_limit_s
        playing = asyncio.create_task(self._guarded(task, episode))
        try:
            while True:
                of_turn = episode.turn_began + self._config.turn_time_limit_s
                done, _ = await asyncio.wait({playing}, timeout=max(0.0, min(of_turn, ends) - now()))
                if done:
                    return playing.result()
                of_turn = episode.turn_began + self._config.turn_time_limit_s
                if now() >= min(of_turn, ends):
                    key = "episode_time_limit_s" if ends <= of_turn else "turn_time_limit_s"
                    raise DeadlineExceededError(
                        f"turn {len(episode.turns) + 1} of an episode ended by environment.{key},"
                        f" {getattr(self._config, key):.3g} s.",
                        part=self._part,
                        hint=f"Raise environment.{key}, or find out what the environment waits for.",
                    )
        except asyncio.CancelledError:
            if playing.cancelled():
                raise EpisodeError("it cancelled itself.", part=self._part) from None
            raise
        finally:
            if not playing.done():
                playing.cancel()
                self._left_behind.add(playing)
                playing.add_done_callback(self._forget)

    def _forget(self, playing: asyncio.Task[Verdict]) -> None:
        self._left_behind.discard(playing)
        if not playing.cancelled():
            playing.exception()  # else asyncio logs that nobody asked for it

    async def _guarded(self, task: Task, episode: Episode) -> Verdict:
        try:
            return await self._environment.play(task.as_mapping(), episode)
        except WeightlaneError:
            raise
        except (Exception, SystemExit) as cause:  # executed code of a model may call `exit()`
            raise EpisodeError(
                f"it raised {type(cause).__name__}: {cause} for prompt {task.prompt!r}.", part=self._part
            ) from cause

    def _checked(self, verdict: object) -> Verdict:
        """Raise `EpisodeError` unless `verdict` has numbers only."""
        if not isinstance(verdict, Verdict):
            raise EpisodeError(f"play() returned {verdict!r}, which is no Verdict.", part=self._part)
        for name, value in {
            "reward": verdict.reward,
            **{f"metric {key}": v for key, v in verdict.metrics.items()},
        }.items():
            if not isinstance(value, numbers.Real) or not math.isfinite(value) or abs(value) > LARGEST_REWARD:
                raise EpisodeError(
                    f"its {name} is {value!r}.", part=self._part, hint=f"Give a number, at most {LARGEST_REWARD:.0e}."
                )
        return verdict
