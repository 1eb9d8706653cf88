"""`ReasoningGym`: the model replies to a problem of reasoning-gym, and the problem's dataset scores the reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.loop.environments import Environment, EnvironmentContext, EpisodeView, Verdict

from .library_process import LibraryOptions, LibraryProcesses


class ReasoningGymOptions(LibraryOptions):
    """Options of the environment ``reasoning-gym``."""

    answer_tag: str = Field(
        default="answer",
        description="Tag around the answer, <answer>...</answer>, of which the last one counts; empty: the reply is the answer.",
    )


class ReasoningGym(Environment):
    """Plays one turn: the model replies to the task's prompt.

    Metrics: whether the reply had an answer (``answered``), and whether the dataset raised an error for it (``unscorable``).
    A task's ``reasoning_gym`` names its problem; `weightlane_environments.tasks` writes such tasks.
    """

    options_type = ReasoningGymOptions
    options: ReasoningGymOptions

    def __init__(self, options: ReasoningGymOptions, context: EnvironmentContext) -> None:
        super().__init__(options, context)
        self._processes = LibraryProcesses("problems", library="reasoning-gym", name="reasoning-gym", options=options)
        self._processes.call_once("version")

    async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:
        """See `Environment.play`."""
        if not isinstance(spec := task.get("reasoning_gym"), dict):
            raise ConfigError(
                "the task has no key reasoning_gym, which names its problem.",
                part="environment reasoning-gym",
                hint="Write task files by python -m weightlane_environments.tasks reasoning-gym DATASET.",
            )
        reply = await episode.reply()
        arguments = {"answer": task["answer"], "reply": reply.text, "tag": self.options.answer_tag}
        return Verdict(*await self._processes.following().call("score", spec=spec, **arguments))

    async def close(self) -> None:
        """See `Environment.close`."""
        await self._processes.close()
