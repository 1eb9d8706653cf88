"""TextArena's games: started by id and seed, played by moves, each with its own stream of random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import numpy as np
import textarena as ta
from textarena.envs.registration import ENV_REGISTRY

from .refusal import RefusedError

_games: dict[str, _Game] = {}


class _Game:
    """A game, and the state of the generators that TextArena's games share, as this game has left it."""

    def __init__(self, name: str, options: Mapping[str, Any], seed: int) -> None:
        with self._own_random():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            self._env = _incremental(ta.make(name, **options))
            self._env.reset(num_players=1, seed=seed)

    _random: tuple[Any, Any] | None = None

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        if self._random is not None:
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
        yield
        self._random = random.getstate(), np.random.get_state()

    def step(self, move: str) -> bool:
        with self._own_random():
            done, _ = self._env.step(action=move)
        return bool(done)

    def news(self) -> str:
        """Return what the game has said since the last call, without the player's own moves, which the model has written."""
        with self._own_random():
            _, seen = self._env.get_observation()
        return "\n".join(text for _, text, kind in seen if kind != ta.ObservationType.PLAYER_ACTION)

    def result(self) -> dict[str, Any]:
        rewards, info = self._env.close()
        mine = info.get(0, {})
        return {
            "reward": None if rewards is None else float(rewards[0]),
            "moves": int(mine.get("turn_count", 0)),
            "invalid": bool(mine.get("invalid_move", False)),
        }


def games() -> int:
    """Return how many games TextArena has."""
    return len(ENV_REGISTRY)


def start(key: str, game: str, options: Mapping[str, Any], seed: int) -> str:
    """Start `game` as `key`. Returns what it says first. Raises `RefusedError` for a game that cannot be played alone."""
    if game not in ENV_REGISTRY:
        near = get_close_matches(game, ENV_REGISTRY, n=5, cutoff=0.4)
        raise RefusedError(f"TextArena has no game {game!r}.", f"Is it one of {', '.join(near)}?" if near else "")
    try:
        _games[key] = _Game(game, options, seed)
    except Exception as error:
        raise RefusedError(
            f"{game!r} cannot be started for one player: {type(error).__name__}: {error}",
            "Choose a game for one player, install what it needs, and check environment.options.game_options.",
        ) from error
    return _games[key].news()


def step(key: str, move: str) -> dict[str, Any]:
    """Make a move. Returns what the game says then, and ``done``."""
    game = _playing(key)
    done = game.step(move)
    return {"news": "" if done else game.news(), "done": done}


def end(key: str) -> dict[str, Any]:
    """Forget the game. Returns the engine's ``reward`` (None: it is not over), ``moves``, and whether it ended as ``invalid``."""
    result = _playing(key).result()
    del _games[key]
    return result


def drop(key: str) -> None:
    """Forget the game, if it is there."""
    _games.pop(key, None)


def _playing(key: str) -> _Game:
    if key not in _games:
        raise LookupError("the game is lost: its process had to be ended for another game, and started again.")
    return _games[key]


def _incremental(env: Any) -> Any:
    """Return `env` without the wrappers that write the whole game into every observation; those of moves stay."""
    if isinstance(env, ta.ObservationWrapper):
        return _incremental(env.env)
    if isinstance(env, ta.Wrapper):
        env.env = _incremental(env.env)
    return env
