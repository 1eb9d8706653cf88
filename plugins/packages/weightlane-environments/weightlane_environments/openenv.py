"""`OpenEnv`: the model acts in an environment behind a server of OpenEnv, over the protocol of OpenEnv's own client.

The protocol (``http_server.py`` and ``types.py`` in ``openenv/core/env_server``, version 0.10) is one WebSocket at ``URL/ws`` for
each episode, with a JSON message for each call: ``{"type": "reset" | "step", "data": ...}``, answered by ``{"type":
"observation", "data": {"observation", "reward", "done"}}`` or ``{"type": "error", "data": {"message", "code"}}``. The ``openenv``
distribution is not needed: importing its client also imports what its servers are made of. As there, the connection is one of
``websockets``, which answers the server's pings also while the model writes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from weightlane.ckpt_engines import (
    ConfigError,
    Deadline,
    DeadlineExceededError,
    EpisodeError,
    PeerLostError,
    ProtocolError,
    TransportError,
)
from weightlane.trainer.loop.environments import Environment, EnvironmentContext, EpisodeView, Verdict

from .turns import TurnOptions

_PART = "environment openenv"
_MOST_BYTES = 100 << 20
"""Most bytes of an observation: the limit of OpenEnv's client."""
_CLOSE_S = 1.0
"""Longest wait for a server to agree that a connection is closed."""
_PAUSE_S = 0.5
"""Seconds between two attempts to begin an episode."""


class OpenEnvOptions(TurnOptions):
    """Options of the environment ``openenv``."""

    url: str = Field(description="Address of the server, such as http://127.0.0.1:8000; https and wss are encrypted.")
    action_field: str = Field(
        default="message", min_length=1, description="Field of the action that is the model's text."
    )
    action: dict[str, Any] = Field(default_factory=dict, description="Further fields of every action.")
    observation_field: str | None = Field(
        default=None,
        min_length=1,
        description="Field of the observation that the model reads; none: all of it, as JSON.",
    )
    reset: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of reset; a task's own, under its key reset, override them."
    )
    first: Literal["observation", "task"] = Field(
        default="observation", description="What the model reads first: the observation of reset, or the task's prompt."
    )
    reward: Literal["sum", "last"] = Field(
        default="sum", description="The episode's reward: the sum of the steps' rewards, or the last one."
    )
    begin_time_limit_s: float = Field(
        default=60.0,
        gt=0,
        description="Most seconds until the server answers and has a session free; attempts are repeated until then.",
    )
    call_time_limit_s: float = Field(default=60.0, gt=0, description="Most seconds of a reset or a step.")


class OpenEnv(Environment):
    """Plays one episode of the server's environment in a session of its own.

    A task's ``reset`` are arguments of the environment's reset, such as a seed. Metrics: ``steps``, and whether the episode was
    ``finished``.
    """

    options_type = OpenEnvOptions
    options: OpenEnvOptions

    def __init__(self, options: OpenEnvOptions, context: EnvironmentContext) -> None:
        super().__init__(options, context)
        parts = urlsplit(options.url)
        secure = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        if secure not in {"ws", "wss"} or not parts.hostname:
            raise ConfigError(
                f"{options.url!r} is no address of a server.",
                part=_PART,
                hint="Set environment.options.url to one such as http://127.0.0.1:8000.",
            )
        self._url = f"{secure}://{parts.netloc}{parts.path.rstrip('/')}/ws"

    async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:
        """See `Environment.play`."""
        connection, answer = await self._begun({**self.options.reset, **task.get("reset", {})})
        rewards: list[float] = []
        done = False
        async with connection:
            first = None if self.options.first == "task" else self.options.opening(task, self._text(answer))
            reply = await episode.reply(first)
            while not reply.is_last:
                action = {**self.options.action, self.options.action_field: self.options.action_of(reply.text)}
                answer = await self._ask(connection, "step", action)
                rewards.append(float(answer.get("reward") or 0.0))
                if done := bool(answer.get("done")):
                    break
                reply = await episode.reply(self.options.news(task, self._text(answer)))
        reward = sum(rewards) if self.options.reward == "sum" else [0.0, *rewards][-1]
        return Verdict(reward, {"steps": len(rewards), "finished": float(done)})

    async def _begun(self, arguments: dict[str, Any]) -> tuple[ClientConnection, dict[str, Any]]:
        """Connect and reset, over and over until the server is there and has a session free."""
        limit_s = self.options.begin_time_limit_s
        deadline = Deadline.after(limit_s)
        while True:
            try:
                return await self._attempt(arguments, deadline.remaining_s)
            except DeadlineExceededError:  # of a reset, which has a limit of its own
                raise
            except (OSError, InvalidHandshake, _FullError) as error:  # also `PeerLostError`
                refusal = error
            if deadline.remaining_s <= _PAUSE_S:
                break
            await asyncio.sleep(_PAUSE_S)
        raise TransportError(
            f"no episode could be begun within {limit_s:g} s: {str(refusal) or 'no answer'}.",
            part=_PART,
            peer=self._url,
            hint="Start the server, with at least rollout.concurrency sessions (max_concurrent_envs), or raise"
            " environment.options.begin_time_limit_s.",
        ) from refusal

    async def _attempt(self, arguments: dict[str, Any], open_s: float) -> tuple[ClientConnection, dict[str, Any]]:
        try:
            connection = await connect(self._url, max_size=_MOST_BYTES, close_timeout=_CLOSE_S, open_timeout=open_s)
        except InvalidURI as error:
            raise ConfigError(f"{self._url} is no address: {error}.", part=_PART) from error
        try:
            return connection, await self._ask(connection, "reset", arguments)
        except BaseException:
            await connection.close()
            raise

    async def _ask(self, connection: ClientConnection, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        limit_s = self.options.call_time_limit_s
        try:
            async with asyncio.timeout(limit_s):
                with suppress(ConnectionClosed):  # the reason may have arrived before
                    await connection.send(json.dumps({"type": kind, "data": data}))
                received = await connection.recv()
        except TimeoutError:
            raise DeadlineExceededError(
                f"a {kind} took longer than {limit_s:g} s.",
                part=_PART,
                peer=self._url,
                hint="Raise environment.options.call_time_limit_s if the environment only needs longer.",
            ) from None
        except ConnectionClosed as error:
            raise PeerLostError(
                f"the server closed the connection in a {kind}: {error}.", part=_PART, peer=self._url
            ) from error
        return self._checked(received, kind)

    def _checked(self, received: str | bytes, kind: str) -> dict[str, Any]:
        """Return the data of an answer. Raises what an error message stands for."""
        try:
            message = json.loads(received)
            type_, data = message["type"], message["data"]
            if type_ == "observation" and isinstance(data["observation"], dict):
                return dict(data)
            why, code = str(data["message"]), str(data["code"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(
                f"the answer to a {kind} is no message of OpenEnv: {received[:200]!r}.",
                part=_PART,
                peer=self._url,
                hint="Is it a server of openenv 0.10, and environment.options.url its address?",
            ) from error
        if code == "CAPACITY_REACHED":
            raise _FullError(why)
        if code == "VALIDATION_ERROR":
            raise ConfigError(
                f"the server does not take a {kind} like this: {why}: {json.dumps(data.get('errors'))[:500]}.",
                part=_PART,
                peer=self._url,
                hint="GET /schema shows its actions; see environment.options.action_field and environment.options.action.",
            )
        raise EpisodeError(f"a {kind} failed on the server: {why} ({code}).", part=_PART, peer=self._url)

    def _text(self, answer: Mapping[str, Any]) -> str:
        observation, field = answer["observation"], self.options.observation_field
        if field is None:
            return json.dumps({key: value for key, value in observation.items() if key != "metadata"})
        if field not in observation:
            raise ConfigError(
                f"the observation has no field {field!r}, but {', '.join(observation) or 'none'}.",
                part=_PART,
                peer=self._url,
                hint="Set environment.options.observation_field.",
            )
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value)


class _FullError(Exception):
    """Raised when the server has no session free."""
