"""Conversations in lines of data: the keys they may have, and the messages that are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightlane.ckpt_engines import ConfigError

_PART = "data"
_MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "weight", "train"}
)
"""Keys of a message that chat templates read, or that say whether it is trained on."""
_REFUSED_KEYS = ("loss_mask", "weight", "train")
"""Keys of a line that other programs read as a choice of what is trained on, and that are refused here."""


def check_messages(messages: Any, what: str) -> None:
    """Raise `ConfigError` unless `messages` is a list of messages with known keys. `what` begins the error."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{what} must be a list of messages, not {messages!r}.", part=_PART)
    for number, message in enumerate(messages):
        here = f"{what}, message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{here}: it must be an object with a role and a content, not {message!r}.", part=_PART)
        calls = message.get("tool_calls")
        if not isinstance(message.get("content"), str) and not (message.get("content") is None and calls):
            raise ConfigError(
                f"{here}: its content must be a string, not {message.get('content')!r}.",
                part=_PART,
                hint="Only a message with tool_calls may do without.",
            )
        if unknown := sorted(message.keys() - _MESSAGE_KEYS):
            raise ConfigError(
                f"{here}: unknown key {unknown[0]!r}.",
                part=_PART,
                hint=f"A message has {', '.join(sorted(_MESSAGE_KEYS))}.",
            )
        is_trained(message, here)


def is_trained(message: Mapping[str, Any], what: str = "the message") -> bool:
    """Return whether an assistant's message is trained on: not with ``"weight": 0`` or ``"train": false``.

    Raises `ConfigError` for other values of these keys.
    """
    weight, train = message.get("weight", 1), message.get("train", True)
    if weight not in (0, 1) or not isinstance(train, bool):
        raise ConfigError(
            f"{what}: weight must be 0 or 1 and train a truth value, not {weight!r} and {train!r}.", part=_PART
        )
    return bool(weight) and train


def shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as a chat template gets it."""
    return {key: value for key, value in message.items() if key not in {"weight", "train"}}


def template_options(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a line's arguments for the chat template, in addition to its messages. Raises `ConfigError` for wrong types."""
    tools, more = data.get("tools"), data.get("chat_template_kwargs") or {}
    if not isinstance(tools, list | None):
        raise ConfigError(f"{where}: 'tools' must be a list of tools, not {tools!r}.", part=_PART)
    if not isinstance(more, dict):
        raise ConfigError(f"{where}: 'chat_template_kwargs' must be an object, not {more!r}.", part=_PART)
    return {**more, **({"tools": tools} if tools else {})}


def refuse_unread(data: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` if a line has a key that other programs read as a choice of what is trained on."""
    if found := [key for key in _REFUSED_KEYS if key in data]:
        raise ConfigError(
            f"{where}: the key {found[0]!r} is not read.",
            part=_PART,
            hint='Leave out what is not to be trained on, or give its message "weight": 0.',
        )
