"""A server of openenv's own: guess a number. ``python openenv_server.py PORT SESSIONS``. Some guesses make it fail."""

from __future__ import annotations

import os
import sys
import time
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

PING_S, PATIENCE_S = 1.0, 15.0
"""Seconds between the server's pings, and until a client that does not answer one is disconnected."""


BROKEN_SEED = 666


class Guess(Action):
    guess: str
    shout: bool = False


class Hint(Observation):
    hint: str
    guesses: int = 0


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._number = State(episode_id=str(uuid4())), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 10, **_: Any) -> Hint:
        if seed == BROKEN_SEED:
            raise OSError("this episode is broken")
        self._number = (seed or 0) * 7 % most
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(hint=f"a number below {most}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        guesses = self._state.step_count
        if action.guess == "hang":
            time.sleep(600)
        if action.guess == "die":
            os._exit(1)
        if action.guess == "raise":
            raise OSError("this step is broken")
        if not action.guess.isdecimal():
            return Hint(hint="no number", guesses=guesses, reward=-1.0)
        number = int(action.guess)
        if number == self._number:
            return Hint(hint="yes", guesses=guesses, done=True, reward=1.0)
        hint = "more" if number < self._number else "less"
        return Hint(hint=hint.upper() if action.shout else hint, guesses=guesses, reward=-0.25 if guesses > 1 else None)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", ws_ping_interval=PING_S, ws_ping_timeout=PATIENCE_S)
