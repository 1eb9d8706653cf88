"""Examples of supervised fine-tuning: lines of prompts with completions, or of conversations, as token sequences.

- ``{"prompt": "12+34=", "completion": "46"}``: the completion's tokens are trained on, and an end-of-text token after them.
- ``{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}``: the chat template of the
  model's tokenizer writes the conversation; the tokens of the assistant's messages are trained on, up to the one that ends each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from weightlane.ckpt_engines import ConfigError

from .batch import IGNORED, TokenSequence
from .json_lines import json_lines

_PART = "data"
TooLong = Literal["refuse", "skip"]
"""Handling of a line with more tokens than the limit."""


class ChatTokenizer(Protocol):
    """The parts of `HfTokenizer` that examples are made with."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text, without special tokens around it."""

    def as_chat(self, messages: Sequence[Mapping[str, Any]], *, answered: bool = False) -> str:
        """See `HfTokenizer.as_chat`."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence to train on."""

    sequence: TokenSequence
    place: str
    """File and line, for messages."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a file."""

    all: Sequence[Example]
    skipped: int
    """Sequences that were left out as too long."""


@dataclass(slots=True)
class _Tokens:
    """Token ids of a sequence, and which of them are trained on."""

    ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, trained: int = 0) -> None:
        """Append `ids`, of which the first `trained` ones are trained on."""
        self.ids += ids
        self.trained += [index < trained for index in range(len(ids))]

    def sequence(self) -> TokenSequence:
        """The sequence of these tokens, at least two."""
        targets = [token if trained else IGNORED for token, trained in zip(self.ids[1:], self.trained[1:], strict=True)]
        return TokenSequence(torch.tensor(self.ids[:-1]), torch.tensor(targets))


def load_examples(
    path: Path,
    tokenizer: ChatTokenizer,
    eos_token_ids: Sequence[int],
    *,
    max_tokens: int,
    too_long: TooLong = "refuse",
    prompt_key: str = "prompt",
    completion_key: str = "completion",
    setting: str = "data.train",
) -> Examples:
    """Read the examples of a JSON Lines file.

    A conversation is one sequence, unless the template writes an assistant's message differently once others follow it, as that
    of Qwen3 does with its thoughts. Then each message for which that is so ends a sequence, and the next one begins with the
    conversation as the model will see it.

    Args:
        path: The file.
        tokenizer: The model's.
        eos_token_ids: Tokens that end a completion, the tokenizer's own first.
        max_tokens: Most tokens of a sequence, its completions included.
        too_long: ``skip`` leaves out longer ones and counts them, ``refuse`` raises.
        prompt_key: Key of the prompt in a line.
        completion_key: Key of the completion in a line.
        setting: The configuration key that names the file, for messages.

    Raises `ConfigError` naming file and line for a line that is neither of the two forms, has nothing to train on, or is too
    long; and if nothing is left.
    """
    found, skipped = [], 0
    for where, data in json_lines(path, holds="example", setting=setting):
        if "messages" in data:
            _check_messages(data["messages"], where)
            sequences = _conversation(data["messages"], where, tokenizer, frozenset(eos_token_ids))
        else:
            prompt, completion = _texts(data, where, (prompt_key, completion_key))
            sequences = iter([_answered(prompt, completion, where, tokenizer, eos_token_ids[:1])])
        for tokens in sequences:
            if not any(tokens.trained[1:]):
                raise ConfigError(f"{where}: the assistant says nothing, so there is nothing to train on.", part=_PART)
            if len(tokens.ids) <= max_tokens:
                found.append(Example(tokens.sequence(), where))
            elif too_long == "skip":
                skipped += 1
            else:
                raise ConfigError(
                    f"{where}: {len(tokens.ids)} tokens, and at most {max_tokens} are allowed.",
                    part=_PART,
                    hint='Raise data.max_tokens, shorten the line, or leave such lines out by data.too_long = "skip".',
                )
    if not found:
        raise ConfigError(
            f"all {skipped} examples of {path} have more than {max_tokens} tokens.",
            part=_PART,
            hint="Raise data.max_tokens.",
        )
    return Examples(found, skipped)


def _texts(data: Mapping[str, Any], where: str, keys: Sequence[str]) -> list[str]:
    """The values of `keys`. Raises `ConfigError` unless they are texts."""
    for key in keys:
        if not isinstance(data.get(key), str) or not data[key]:
            has = ", ".join(map(repr, data)) or "no keys"
            raise ConfigError(
                f"{where}: {key!r} must be a non-empty string, not {data.get(key)!r}.",
                part=_PART,
                hint=f"A line has {keys[0]} and {keys[1]}, or messages; this one has {has}. See data.prompt_key and"
                " data.completion_key.",
            )
    return [data[key] for key in keys]


def _answered(prompt: str, completion: str, where: str, tokenizer: ChatTokenizer, end: Sequence[int]) -> _Tokens:
    tokens, prompt_ids, answer = _Tokens(), tokenizer.encode(prompt), [*tokenizer.encode(completion), *end]
    if not prompt_ids:
        raise ConfigError(f"{where}: the prompt has no token.", part=_PART)
    tokens.add(prompt_ids)
    tokens.add(answer, trained=len(answer))
    return tokens


def _conversation(
    messages: Sequence[Mapping[str, Any]], where: str, tokenizer: ChatTokenizer, eos: Collection[int]
) -> Iterator[_Tokens]:
    tokens, text = _Tokens(), ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = tokenizer.as_chat(messages[:index])
            after = tokenizer.as_chat(messages[: index + 1], answered=True)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", part=_PART, hint=error.hint) from error
        if not after.startswith(before):
            raise ConfigError(
                f"{where}: the chat template writes message {index} differently from how it asks the model for it.",
                part=_PART,
                hint="Give prompt and completion as the model is to see them, in the place of messages.",
            )
        if tokens.ids and not before.startswith(text):
            yield tokens
            tokens, text = _Tokens(), ""
        tokens.add(tokenizer.encode(before[len(text) :]))
        answer = tokenizer.encode(after[len(before) :])
        ends = [place for place, token in enumerate(answer, start=1) if token in eos]
        tokens.add(answer, trained=ends[-1] if ends else len(answer))
        text = after
    yield tokens


def _check_messages(messages: Any, where: str) -> None:
    """Raise `ConfigError` unless `messages` is a conversation in which the assistant speaks, and not first."""
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in messages
    ):
        raise ConfigError(
            f"{where}: 'messages' must be a list of messages, each with a role and a content that are strings.",
            part=_PART,
        )
    if not any(each["role"] == "assistant" for each in messages):
        raise ConfigError(f"{where}: no message has the role 'assistant', so there is nothing to train on.", part=_PART)
