"""Tasks from JSON Lines files, and the endless order in which training takes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from weightlane.ckpt_engines import ConfigError

from ..config import DataConfig
from .json_lines import json_lines

_PART = "data"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with its reference answer."""

    prompt: str
    answer: Any
    """Any JSON value but null, as the file has it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other key of the line."""
    place: str = field(default="", compare=False)
    """File and line, for messages."""

    def as_mapping(self) -> dict[str, Any]:
        """The task as a reward function gets it: ``prompt``, ``answer`` and every other key of the line."""
        return {**self.extra, "prompt": self.prompt, "answer": self.answer}

    def to_plain(self) -> dict[str, Any]:
        """This task as JSON-representable data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Task:
        """Make a task of what `to_plain` gave. Raises `ConfigError` for anything else."""
        try:
            return cls(str(plain["prompt"]), plain["answer"], dict(plain["extra"]), str(plain["place"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a saved task is damaged: {error!r}.", part=_PART) from None


AsChat = Callable[[Sequence[Mapping[str, Any]]], str]
"""Puts messages into the words of a model's chat template."""


def load_tasks(
    path: Path, prompt_key: str = "prompt", answer_key: str = "answer", as_chat: AsChat | None = None
) -> list[Task]:
    """Read one task per non-blank line. With `as_chat` prompts are conversations; `Task.extra` has their ``messages``.

    Raises `ConfigError` naming file and line for a line that is not a JSON object, lacks a key, or whose prompt is not a
    non-empty string; and for a file that is missing, unreadable or without tasks.
    """
    lines = json_lines(path, holds="task", setting="data.train and data.heldout")
    return [_task(data, where, prompt_key, answer_key, as_chat) for where, data in lines]


def load_splits(config: DataConfig, as_chat: AsChat) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks; `ConfigError` when a held-out prompt is also a training prompt.

    `as_chat` is for prompts that are conversations.
    """
    chat = as_chat if config.chat else None
    train, heldout = (
        load_tasks(path, config.prompt_key, config.answer_key, chat) for path in (config.train, config.heldout)
    )
    shared = sorted({task.prompt for task in train} & {task.prompt for task in heldout})
    if shared:
        raise ConfigError(
            f"{len(shared)} held-out prompts of {config.heldout} are also in {config.train}, {shared[0]!r} for example.",
            part=_PART,
            hint="Remove them from one of the files: accuracy on them would prove nothing.",
        )
    return train, heldout


def _task(data: dict[str, Any], where: str, prompt_key: str, answer_key: str, as_chat: AsChat | None) -> Task:
    for key in (prompt_key, answer_key):
        if data.get(key) is None:
            raise ConfigError(
                f"{where}: the key {key!r} is missing or null.",
                part=_PART,
                hint=f"The line has {', '.join(map(repr, data)) or 'no keys'}; see data.prompt_key and data.answer_key.",
            )
    prompt = data.pop(prompt_key)
    if as_chat is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        _check_messages(messages, f"{where}: {prompt_key!r}")
        prompt, data["messages"] = as_chat(messages), messages
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: {prompt_key!r} must be a non-empty string, not {prompt!r}.", part=_PART)
    return Task(prompt, data.pop(answer_key), data, where)


def _check_messages(messages: Any, what: str) -> None:
    whole = isinstance(messages, list) and bool(messages)
    if not whole or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in messages
    ):
        raise ConfigError(
            f"{what} must be a string or a list of messages, each with role and content, not {messages!r}.",
            part=_PART,
            hint="Or set data.chat to false.",
        )


class TaskStream(Generic[_T]):
    """An endless stream of tasks, or other items, shuffled anew in every epoch; the same seed gives the same stream.

    Args:
        tasks: at least one.
        seed: of the order.
    """

    def __init__(self, tasks: Sequence[_T], seed: int) -> None:
        if not tasks:
            raise ConfigError("a task stream needs at least one task.", part=_PART)
        self._tasks = tasks
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    def __iter__(self) -> TaskStream[_T]:
        return self

    def __next__(self) -> _T:
        if self._position == len(self._tasks):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        self._position += 1
        return self._tasks[self._order[self._position - 1]]

    def take(self, count: int) -> list[_T]:
        """The next `count` tasks."""
        return [next(self) for _ in range(count)]

    def state(self) -> dict[str, int]:
        """Where the stream stands, as JSON-representable data for `restore`."""
        return {"seed": self._seed, "tasks": len(self._tasks), "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from `state`. Raises `ConfigError` when it belongs to another seed or number of tasks."""
        for key, here in (("seed", self._seed), ("tasks", len(self._tasks))):
            if state.get(key) != here:
                raise ConfigError(
                    f"the saved data position belongs to a run with {key} = {state.get(key)}, this one has {here}.",
                    part=_PART,
                    hint="Resume with the configuration and task file the run was started with.",
                )
        epoch, position = state.get("epoch", -1), state.get("position", -1)
        if epoch < 0 or not 0 <= position <= len(self._tasks):
            raise ConfigError(f"the saved data position is not valid: {dict(state)}.", part=_PART)
        self._epoch, self._position = epoch, position
        self._order = self._shuffled(epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)  # noqa: S311 - an order of data, not a secret
        return order
