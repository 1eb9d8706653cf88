"""What the model is told in a turn, and which part of its reply counts: options that the environments share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from weightlane.trainer.loop.environments import Message, Options


class TurnOptions(Options):
    """Options of an environment with several turns."""

    after: str = Field(
        default="", description="Only what follows the last of these in a reply is the action, such as </think>."
    )
    text: str = Field(
        default="\n{observation}\n",
        description="How an observation is written for a model without a chat template (data.chat = false).",
    )

    def opening(self, task: Mapping[str, Any], observation: str) -> str | Sequence[Message]:
        """Return what the model reads first: `observation`, after the system messages of the task."""
        system = [message for message in task.get("messages", ()) if message["role"] == "system"]
        news = self.news(task, observation)
        return news.lstrip("\n") if isinstance(news, str) else [*system, *news]

    def news(self, task: Mapping[str, Any], observation: str) -> str | Sequence[Message]:
        """Return `observation` as the model reads it after a reply."""
        if "messages" in task:
            return [{"role": "user", "content": observation}]
        return self.text.replace("{observation}", observation)

    def action_of(self, reply: str) -> str:
        """Return the part of a reply that counts."""
        return reply.rpartition(self.after)[2] if self.after else reply
