"""Tasks from JSON Lines files, and the endless shuffled stream of them that training reads."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from weightlane.ckpt_engines import ConfigError

from ..config import DataConfig
from .conversations import check_messages, shown, template_options
from .json_lines import json_lines

_PART = "data"
_FEWEST = 2
"""Fewest completions of a group."""


class HasContent(Protocol):
    """A task or an example."""

    @property
    def content(self) -> bytes:
        """The content of its line, as bytes."""


_T = TypeVar("_T", bound=HasContent)


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
    group_size: int = 0
    """Number of completions of a group of it; 0: ``algorithm.group_size``."""

    def as_mapping(self) -> dict[str, Any]:
        """Return the task as a reward function gets it: ``prompt``, ``answer`` and every other key of the line."""
        return {**self.extra, "prompt": self.prompt, "answer": self.answer}

    @property
    def content(self) -> bytes:
        """The content of its line as bytes, without the chat template's text, which may have the current date."""
        prompt = None if "messages" in self.extra else self.prompt
        return json.dumps([prompt, self.answer, self.extra], sort_keys=True).encode()

    def to_plain(self) -> dict[str, Any]:
        """Return this task as JSON-representable data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Task:
        """Make a task from the data of `to_plain`. Raises `ConfigError` for anything else."""
        try:
            own = int(plain.get("group_size", 0))
            return cls(str(plain["prompt"]), plain["answer"], dict(plain["extra"]), str(plain["place"]), own)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a saved task is damaged: {error!r}.", part=_PART) from None


AsChat = Callable[..., str]
"""Function that formats messages with a model's chat template, which gets the keyword arguments."""


def load_tasks(
    path: Path,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    as_chat: AsChat | None = None,
    group_size_key: str | None = None,
) -> list[Task]:
    """Read one task per non-blank line. With `as_chat` prompts are conversations; `Task.extra` has their ``messages``.

    A line's value of `group_size_key`, if it has one, is the size of its groups.

    Raises `ConfigError` naming file and line for a line that is not a JSON object, lacks a key, has a further key ``messages``,
    or whose prompt is not a non-empty string; and for a file that is missing, unreadable or without tasks.
    """
    lines = json_lines(path, holds="task", setting="data.train and data.heldout")
    if prompt_key == answer_key:
        raise ConfigError(f"data.prompt_key and data.answer_key are both {prompt_key!r}.", part=_PART)
    if group_size_key in (prompt_key, answer_key):
        raise ConfigError(
            f"data.group_size_key is {group_size_key!r}, the key of the prompt or the answer.", part=_PART
        )
    return [
        replace(
            _task(data, where, prompt_key, answer_key, as_chat), group_size=_group_size(data, where, group_size_key)
        )
        for where, data in lines
    ]


def load_splits(config: DataConfig, as_chat: AsChat) -> tuple[list[Task], dict[str, list[Task]]]:
    """Read training tasks, and the sets of held-out ones. Raises `ConfigError` if a held-out prompt is also a training prompt.

    `as_chat` is for prompts that are conversations.
    """
    chat = as_chat if config.chat else None
    keys = (config.prompt_key, config.answer_key, chat, config.group_size_key)
    train = load_tasks(config.train, *keys)
    trained = {task.prompt for task in train}
    heldout: dict[str, list[Task]] = {}
    for name, path in config.heldout_sets.items():
        heldout[name] = load_tasks(path, *keys)
        shared = sorted(trained.intersection(task.prompt for task in heldout[name]))
        if shared:
            raise ConfigError(
                f"{len(shared)} held-out prompts of {path} are also in {config.train}, {shared[0]!r} for example.",
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
    prompt, answer = data.pop(prompt_key), data.pop(answer_key)
    if "messages" in data:
        raise ConfigError(
            f"{where}: 'messages' is neither the prompt nor the answer.",
            part=_PART,
            hint="Rename the key: an environment reads the prompt's conversation under it. See data.prompt_key.",
        )
    if as_chat is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        check_messages(messages, f"{where}: {prompt_key!r}")
        prompt = as_chat([shown(message) for message in messages], **template_options(data, where))
        data["messages"] = messages
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: {prompt_key!r} must be a non-empty string, not {prompt!r}.", part=_PART)
    return Task(prompt, answer, data, where)


def _group_size(data: Mapping[str, Any], where: str, key: str | None) -> int:
    size = data.get(key) if key is not None else None
    if size is None:
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or size < _FEWEST:
        raise ConfigError(
            f"{where}: {key!r} is {size!r}.",
            part=_PART,
            hint=f"data.group_size_key names a whole number of {_FEWEST} or more: completions whose rewards are compared.",
        )
    return size


class TaskStream(Generic[_T]):
    """An endless stream of at least one task or other item, reshuffled in every epoch; the same seed gives the same stream."""

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
        """Return the next `count` tasks."""
        return [next(self) for _ in range(count)]

    def judged(self, task: _T, rewards: Sequence[float]) -> None:
        """Note the rewards of a task's completions; the order of this stream does not depend on them."""

    def state(self) -> dict[str, Any]:
        """Return the position of the stream, as JSON-representable data for `restore`."""
        place = {"epoch": self._epoch, "position": self._position}
        return {"seed": self._seed, "tasks": len(self._tasks), **place, "digest": self._digest}

    def restore(self, state: Mapping[str, Any], *, may_change: bool = False) -> None:
        """Resume from `state`. Raises `ConfigError` if it belongs to another seed or number of tasks.

        Also if it belongs to tasks of other content, unless they `may_change`.
        """
        for key, here in (("seed", self._seed), ("tasks", len(self._tasks))):
            if state.get(key) != here:
                raise ConfigError(
                    f"the saved data position belongs to a run with {key} = {state.get(key)}, this one has {here}.",
                    part=_PART,
                    hint="Resume with the configuration and task file the run was started with.",
                )
        if state.get("digest", self._digest) != self._digest and not may_change:
            raise ConfigError(
                "the training data is not what the run was started with: as many lines, and other content.",
                part=_PART,
                hint='Resume with the file of then, or go on with this one by --set data.changed="accept".',
            )
        epoch, position = state.get("epoch", -1), state.get("position", -1)
        if epoch < 0 or not 0 <= position <= len(self._tasks):
            raise ConfigError(f"the saved data position is not valid: {dict(state)}.", part=_PART)
        self._epoch, self._position = epoch, position
        self._order = self._shuffled(epoch)

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for task in self._tasks:
            digest.update(len(task.content).to_bytes(8, "little") + task.content)
        return digest.hexdigest()

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}:{epoch}").shuffle(order)  # noqa: S311 - an order of data, not a secret
        return order
