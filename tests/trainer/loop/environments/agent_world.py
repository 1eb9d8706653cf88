"""Episodes that agents play over the endpoint with a replica in this process, which says what a test gives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from loop_world import ALGORITHM, TASKS, Characters, LiveRollout, World, first_is_better, judging

from weightlane.ckpt_engines import DeadlineExceededError
from weightlane.trainer.config import EnvironmentConfig
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.environments import Environment, EnvironmentContext
from weightlane.trainer.loop.environments.player import Player
from weightlane.trainer.loop.environments.registry import make_environment
from weightlane.trainer.loop.protocols import Played, Rollout

STOP = 0


class Saying(LiveRollout):
    """Writes the texts that it is given, then numbers; keeps what it read and wrote. HANGS never ends."""

    hanging = 0

    def __init__(self, world: World, name: str, *texts: str) -> None:
        super().__init__(world, name)
        self.texts, self.said = list(texts), list[tuple[list[int], list[int]]]()

    async def generate(self, request_id: str, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> Any:
        text = self.texts.pop(0) if self.texts else f"reply {len(self.said)}"
        if text == "DEADLINE":
            raise DeadlineExceededError("request 3 took longer than 600 s.", part="rollout-0")
        if text == "BROKEN":
            raise KeyError(text)
        if text == "HANGS":
            Saying.hanging += 1
            try:
                await asyncio.Event().wait()
            finally:
                Saying.hanging -= 1
        tokens = [*map(ord, text), STOP][:max_new_tokens]
        self.said.append((list(prompt_ids), tokens))
        logprobs = [-1.0 / (1 + token) for token in tokens]
        versions = [self.version] * len(tokens)
        return SimpleNamespace(token_ids=tokens, logprobs=logprobs, versions=versions, cached_tokens=None)


def agent_of(folder: Path, options: Mapping[str, Any]) -> Environment:
    made = make_environment(EnvironmentConfig(name="agent", options=options), EnvironmentContext([folder]))
    assert made is not None
    return made


def player_of(
    environment: Environment, *, max_model_len: int = 4000, judge: Any = first_is_better, **limits: Any
) -> Player:
    return Player(
        environment,
        EnvironmentConfig(name="agent", **limits),
        ALGORITHM.model_copy(update={"max_new_tokens": 120}),
        tokenizer=Characters(),
        stop_token_ids=[STOP],
        judge=judging(judge),
        max_model_len=max_model_len,
    )


Agent = Callable[[Mapping[str, Any], Mapping[str, str]], Any]
AGENTS: dict[str, Agent] = {}
MODULE = "def __getattr__(name):\n    from agent_world import AGENTS\n    return AGENTS[name]\n"


def played(
    folder: Path, agent: Agent | Sequence[str], *texts: str, options: Mapping[str, Any] | None = None, **limits: Any
) -> tuple[Played, Saying]:
    """Play an episode with a function as the agent, or a command."""
    chosen: dict[str, Any] = {"command": agent}
    if callable(agent):
        AGENTS["current"] = agent
        (folder / "agents_of_test.py").write_text(MODULE)
        chosen = {"function": "agents_of_test:current"}

    return played_at_once(folder, {**chosen, **(options or {})}, TASKS[0], texts, **limits)[0]


def played_at_once(
    folder: Path, options: Mapping[str, Any], task: Task, *episodes: Sequence[str], **limits: Any
) -> list[tuple[Played, Saying]]:
    """Play `task` once for each sequence of replies, all at the same time."""

    async def main() -> list[tuple[Played, Saying]]:
        environment = agent_of(folder, options)
        rollouts = [Saying(World(), "rollout-0", *texts) for texts in episodes]
        try:
            player = player_of(environment, **limits)
            plays = [player.play(cast("Rollout", rollout), task, greedy=False) for rollout in rollouts]
            return list(zip(await asyncio.gather(*plays), rollouts, strict=True))
        finally:
            await environment.close()

    return asyncio.run(main())


def task_of(line: str) -> Task:
    """The task that a line of a task file has."""
    extra = json.loads(line)
    return Task(extra.pop("prompt"), extra.pop("answer"), extra)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def ids(text: str) -> list[int]:
    return list(map(ord, text))
