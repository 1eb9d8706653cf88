"""`play`: one episode of an environment of verifiers, over the endpoint of the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf

from weightlane.ckpt_engines import EpisodeError

from .configuration import PART, configuration
from .relay import Relay


@dataclass(frozen=True, slots=True)
class _Stage:
    """An environment while its servers run."""

    env: vf.Env
    relay: Relay

    def task(self, data: Mapping[str, Any]) -> vf.Task:
        """Return the task that has `data`."""
        kind = type(self.env.taskset).task_type()
        return kind(kind.data_type().model_validate(data), self.env.config.taskset.task)


_stages: dict[tuple[asyncio.AbstractEventLoop, str], tuple[asyncio.Future[_Stage], asyncio.Task[None]]] = {}
"""Environments by event loop and configuration. Each is made once, and ends with its loop, which cancels the task."""


async def play(task: Mapping[str, Any], client: Mapping[str, str]) -> dict[str, float]:
    """Play `task`, a line that ``python -m weightlane_verifiers tasks`` has written, with the agent's endpoint `client`.

    Returns ``reward``, and the environment's rewards and metrics by name. Raises `ConfigError` if the environment cannot be
    configured, and `EpisodeError` if it does not start, or verifiers counts the episode as failed.
    """
    stage = await _stage(task)
    traces: list[str] = []

    def began(trace: vf.Trace) -> None:
        traces.append(trace.id)
        stage.relay.clients[trace.id] = client

    # verifiers takes an API key from the environment variables. The relay has no use for any that is there.
    endpoint = vf.EvalClientConfig(base_url=stage.relay.base_url, api_key_var="WEIGHTLANE_HAS_NO_KEY")
    try:
        episode = await stage.env.run_episode(
            stage.task(task["task"]), vf.ModelContext(model="policy", client=endpoint), on_trace=began
        )
    finally:
        for trace in traces:
            del stage.relay.clients[trace]
    return _result(episode)


def _result(episode: vf.Episode) -> dict[str, float]:
    if not episode.ok:
        errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "it gives no reason."
        raise EpisodeError(
            f"verifiers counts the episode as failed: {reason}",
            part=PART,
            hint="The error is the environment's own, or of a server that it has started.",
        )
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise EpisodeError(
            f"the episode has {len(trained)} agents that train.",
            part=PART,
            hint="Choose an environment with one.",
        )
    (trace,) = trained
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {**metrics, **rewards, "reward": trace.reward}


async def _stage(task: Mapping[str, Any]) -> _Stage:
    if "environment" not in task or "task" not in task:
        raise EpisodeError(
            "the task is not one of an environment of verifiers.",
            part=PART,
            hint="Have python -m weightlane_verifiers tasks write data.train and data.heldout.",
        )
    loop, name = asyncio.get_running_loop(), json.dumps(task["environment"], sort_keys=True)
    if (loop, name) not in _stages:
        config, ready = configuration(task["environment"]), loop.create_future()
        _stages[loop, name] = ready, loop.create_task(_serve(config, ready), name="environment of verifiers")
    ready, _ = _stages[loop, name]
    return await asyncio.shield(ready)


async def _serve(config: vf.EnvConfig, ready: asyncio.Future[_Stage]) -> None:
    """Keep the environment's servers until the task is cancelled. `ready` gets what prevents them from starting."""
    try:
        env = await asyncio.to_thread(vf.load_environment, config)
        async with Relay() as relay, env.serving():
            ready.set_result(_Stage(env, relay))
            await asyncio.Future()
    except Exception as error:
        if ready.done():
            raise
        message = f"{config.env_id} does not start: {type(error).__name__}: {error}"
        ready.set_exception(EpisodeError(message, part=PART, hint="Try it with verifiers' own commands first."))
