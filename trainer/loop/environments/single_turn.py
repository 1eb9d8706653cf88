"""The environment of one turn: the model replies to the task's prompt, and the run's reward function judges the reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .contract import Environment, EpisodeView, Verdict


class SingleTurn(Environment):
    """Plays what a run without an environment does, and trains the same sequences. For environments that begin with it."""

    needs_reward = True

    async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:  # noqa: ARG002 - the episode knows it
        """See `Environment.play`."""
        return Verdict(await episode.judge(await episode.reply()))
