"""Tasks from JSON Lines files, and the endless order in which training takes them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError

from ..config import DataConfig

_PART = "data"


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
    tasks = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    tasks.append(_task(line, f"{path}, line {number}", prompt_key, answer_key, as_chat))
    except FileNotFoundError as cause:
        raise ConfigError(
            f"there is no task file {path}.", part=_PART, hint="Check data.train and data.heldout."
        ) from cause
    except UnicodeDecodeError as cause:
        raise ConfigError(f"{path} is not UTF-8 text: {cause}.", part=_PART) from cause
    except OSError as cause:
        raise ConfigError(f"{path} cannot be read: {cause.strerror}.", part=_PART) from cause
    if not tasks:
        raise ConfigError(f"{path} holds no task.", part=_PART, hint="It needs one JSON object per line.")
    return tasks


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


def _task(line: str, where: str, prompt_key: str, answer_key: str, as_chat: AsChat | None) -> Task:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as cause:
        raise ConfigError(f"{where}: not valid JSON: {cause.msg} at column {cause.colno}.", part=_PART) from cause
    except (ValueError, RecursionError) as cause:  # a number of thousands of digits; brackets too deep
        raise ConfigError(f"{where}: JSON that cannot be read: {cause}.", part=_PART) from cause
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(data).__name__}.", part=_PART)
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


class TaskStream:
    """An endless stream of tasks, shuffled anew in every epoch; the same seed gives the same stream.

    Args:
        tasks: at least one.
        seed: of the order.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ConfigError("a task stream needs at least one task.", part=_PART)
        self._tasks = tasks
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    def __iter__(self) -> TaskStream:
        return self

    def __next__(self) -> Task:
        if self._position == len(self._tasks):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        self._position += 1
        return self._tasks[self._order[self._position - 1]]

    def take(self, count: int) -> list[Task]:
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
