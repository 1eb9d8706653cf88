"""`TextArena`: the model plays a game for one player, against the rules and for the reward of TextArena's engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import Field

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.trainer.loop.environments import Environment, EnvironmentContext, EpisodeView, Verdict

from .library_process import LibraryOptions, LibraryProcesses
from .turns import TurnOptions


class TextArenaOptions(LibraryOptions, TurnOptions):
    """Options of the environment ``textarena``."""

    game: str | None = Field(
        default=None, min_length=1, description="TextArena's id of the game; a task's own, its key game, overrides it."
    )
    game_options: dict[str, Any] = Field(default_factory=dict, description="Arguments of textarena.make.")
    unfinished_reward: float = Field(
        default=0.0, description="Reward of a game that is not over when the episode has no further turn or room."
    )


class TextArena(Environment):
    """Plays one game: its ``seed`` is the task's. An invalid move is what the engine makes of it.

    Metrics: ``moves`` that the engine counted, whether the game was ``finished``, and whether an ``invalid_move`` ended it.
    """

    options_type = TextArenaOptions
    options: TextArenaOptions

    def __init__(self, options: TextArenaOptions, context: EnvironmentContext) -> None:
        super().__init__(options, context)
        self._processes = LibraryProcesses("games", library="TextArena", name="textarena", options=options)
        self._serial = itertools.count()
        if options.game is None:
            self._processes.call_once("games")
        else:
            self._processes.call_once("start", key="", game=options.game, options=options.game_options, seed=0)

    async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:
        """See `Environment.play`."""
        game, seed = task.get("game", self.options.game), task.get("seed")
        if not isinstance(game, str) or not isinstance(seed, int):
            raise ConfigError(
                f"the task's game is {game!r}, and its seed {seed!r}.",
                part="environment textarena",
                hint="Write task files by python -m weightlane_environments.tasks textarena GAME.",
            )
        process, key = self._processes.following(), str(next(self._serial))
        try:
            said = await process.call("start", key=key, game=game, options=self.options.game_options, seed=seed)
            reply = await episode.reply(self.options.opening(task, said))
            while not reply.is_last:
                answer = await process.call("step", key=key, move=self.options.action_of(reply.text))
                if answer["done"]:
                    break
                reply = await episode.reply(self.options.news(task, answer["news"]))
            result = await process.call("end", key=key)
        except BaseException:
            with suppress(WeightlaneError):
                await process.call("drop", key=key)
            raise
        finished = result["reward"] is not None
        facts = {"moves": result["moves"], "finished": float(finished), "invalid_move": float(result["invalid"])}
        return Verdict(result["reward"] if finished else self.options.unfinished_reward, facts)

    async def close(self) -> None:
        """See `Environment.close`."""
        await self._processes.close()
