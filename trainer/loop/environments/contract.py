"""The contract of environments: a class that plays one episode of a task with the model, and judges it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

Message = Mapping[str, Any]
"""A message as chat templates read it: ``role``, ``content``, and what else the template knows."""
Ending = Literal["stop", "length", "full", "turns"]
"""Why a reply ended. ``stop``: the model ended it. ``length``: it has `algorithm.max_new_tokens`, or the model's longest sequence
was reached. ``full`` and ``turns``: nothing was generated, because the sequence has no room left, or the episode has
`environment.max_turns` replies."""


class Options(BaseModel):
    """The options of an environment, ``[environment.options]``. A subclass declares each with its type and default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's part of one turn."""

    text: str
    """The text as the model wrote it, special tokens included, without the token that ended it."""
    ended: Ending
    token_ids: Sequence[int] = ()
    """The generated tokens, the stop token included. Empty if `is_last`."""
    logprobs: Sequence[float] = ()
    """The log-probability of each, under the distribution that it was drawn from."""

    @property
    def is_last(self) -> bool:
        """Whether the episode can have no further reply, and this one is empty. `Environment.play` now has to judge it."""
        return self.ended in {"full", "turns"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an episode."""

    reward: float
    """A finite number. The rewards of a task's episodes are compared with each other."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by name. Each step reports their means over its episodes, as ``environment/NAME``."""


class EpisodeView(Protocol):
    """One episode as `Environment.play` sees it. The tokens are its own affair: nothing is ever tokenized twice."""

    async def reply(
        self,
        news: str | Sequence[Message] | None = None,
        *,
        after: int | None = None,
        max_new_tokens: int | None = None,
        **template: Any,
    ) -> Reply:
        """Have the model read `news`, and write the next reply.

        Args:
            news: What the model reads before it replies, in addition to everything before: messages, which the chat template
                writes, or a text, which is taken as it stands. The first time None is the task's own prompt.
            after: The number of the reply, from 1, that `news` follow; None: the last one. After an earlier one the
                conversation takes another course, and after 0 another conversation begins. Both begin a further sequence
                of the episode's tokens, in which what was generated before is only read.
            max_new_tokens: Most tokens of the reply, if fewer than `algorithm.max_new_tokens`.
            template: Further arguments of the chat template, such as ``tools``. They hold for the rest of the conversation.

        Raises:
            EpisodeError: It is called again after a reply that `Reply.is_last`, or twice at once.
            WeightlaneError: The replica failed. Let the error pass: the episode is lost, or starts over, whatever is returned.
        """

    async def judge(self, reply: Reply) -> float:
        """Return the reward of `reply` by the run's `reward.function`. Raises `RewardError`, also if there is none."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens up to the last reply: those that the model read, and those that it wrote."""


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """The facts of its run that an environment is made with."""

    search_path: Sequence[Path] = ()
    """Folders in which modules that options name are looked for first: that of the configuration file, the working directory."""
    model_dir: Path | None = None
    """Hugging Face directory of the model that is trained."""
    temperature: float = 1.0
    """The run's sampling temperature, `algorithm.temperature`."""


class Environment(ABC):
    """Plays episodes. A run makes one object, and plays many episodes with it at the same time, on one event loop.

    Subclass it, register the class under the entry-point group ``weightlane.environments``, and name it in ``[environment]``.

    - `play` must not block the event loop: run a slow function in a thread, and a hanging one in a process.
    - An exception costs the episode, and so does a turn or an episode beyond its time limit. `play` is cancelled then.
    """

    options_type: ClassVar[type[Options]] = Options
    """The type of ``[environment.options]``."""
    needs_reward = False
    """Whether episodes cannot end without `EpisodeView.judge`, so that the run must have a reward function."""

    def __init__(self, options: Any, context: EnvironmentContext) -> None:
        """Keep `options`, an instance of `options_type`. Raises `ConfigError` for values that cannot work.

        ``weightlane check`` calls it, so that it must not start anything that needs an end.
        """
        self.options = options
        self.context = context

    @abstractmethod
    async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:
        """Play one episode: ask `episode` for at least one reply, and judge the whole.

        Args:
            task: The line of the task file: ``prompt``, ``answer``, and every other key; ``messages`` with `data.chat`.
            episode: The episode.
        """

    async def close(self) -> None:  # noqa: B027 - most environments have nothing to close
        """End what the object has started. No episode is running then."""
