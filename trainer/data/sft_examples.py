"""Examples of supervised fine-tuning: lines of prompts with completions, or of conversations, as token sequences.

- ``{"prompt": "12+34=", "completion": "46"}``: the completion's tokens are trained on, and an end-of-text token after them.
- ``{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}``: the chat template of the
  model's tokenizer writes the conversation; the tokens of the assistant's messages are trained on, up to the one that ends each,
  without those that have ``"weight": 0`` or ``"train": false``. ``tools`` and ``chat_template_kwargs`` of the line reach the
  template.

A text is tokenized in one piece, because its parts by themselves would have other tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from weightlane.ckpt_engines import ConfigError

from .conversations import check_messages, is_trained, refuse_unread, shown, template_options
from .json_lines import json_lines
from .sequences import IGNORED, TokenSequence
from .tokenizer import HfTokenizer

_PART = "data"
_log = logging.getLogger(__name__)
TooLong = Literal["refuse", "skip"]
"""Handling of a line with more tokens than the limit."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence to train on."""

    sequence: TokenSequence
    place: str
    """File and line, for messages."""
    content: bytes = b""
    """A digest of the line's data, not of its tokens: a chat template may write the current date."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of a file."""

    all: Sequence[Example]
    skipped: int
    """Number of sequences left out as too long."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Token ids of a sequence, and which of them are trained on."""

    ids: list[int]
    trained: list[bool]
    cuts_a_token: bool = False
    """Whether a prompt, or the text before an answer, ends inside a token."""

    def sequence(self) -> TokenSequence:
        """Make a sequence of these tokens, at least two."""
        targets = [token if trained else IGNORED for token, trained in zip(self.ids[1:], self.trained[1:], strict=True)]
        return TokenSequence(torch.tensor(self.ids[:-1]), torch.tensor(targets))


def load_examples(
    path: Path,
    tokenizer: HfTokenizer,
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
    of Qwen3 does with its thoughts. Each such message then ends a sequence, and the next sequence begins with the conversation
    as the model will see it.

    Args:
        path: The file.
        tokenizer: The model's tokenizer.
        eos_token_ids: Tokens that end a completion, the tokenizer's own first.
        max_tokens: Most tokens of a sequence, its completions included.
        too_long: ``skip`` leaves out longer ones and counts them, ``refuse`` raises.
        prompt_key: Key of the prompt in a line.
        completion_key: Key of the completion in a line.
        setting: The configuration key that names the file, for messages.

    Raises `ConfigError` naming file and line for a line that is neither of the two forms, has nothing to train on, or is too
    long; and if nothing is left.
    """
    found, skipped, cut = [], 0, []
    for where, data in json_lines(path, holds="example", setting=setting):
        refuse_unread(data, where)
        content = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).digest()
        if "messages" in data:
            _check_conversation(data["messages"], where)
            options = template_options(data, where)
            sequences = _conversation(data["messages"], where, tokenizer, frozenset(eos_token_ids), options)
        else:
            prompt, completion = _texts(data, where, (prompt_key, completion_key))
            sequences = iter([_answered(prompt, completion, where, tokenizer, eos_token_ids[:1])])
        for tokens in sequences:
            cut += [where] if tokens.cuts_a_token else []
            if not any(tokens.trained[1:]):
                raise ConfigError(f"{where}: the assistant says nothing, so there is nothing to train on.", part=_PART)
            if len(tokens.ids) <= max_tokens:
                found.append(Example(tokens.sequence(), where, content))
            elif too_long == "skip":
                skipped += 1
            else:
                raise ConfigError(
                    f"{where}: {len(tokens.ids)} tokens, and at most {max_tokens} are allowed.",
                    part=_PART,
                    hint='Raise data.max_tokens, shorten the line, or leave such lines out by data.too_long = "skip".',
                )
    if cut:
        _log.warning(
            "%d prompts end inside a token, that of %s for example: the token is trained on with the completion, and a model"
            " that is given the prompt alone sees another one. Let completions begin with the blank that prompts end with.",
            len(cut),
            cut[0],
        )
    if not found:
        raise ConfigError(
            f"all {skipped} examples of {path} have more than {max_tokens} tokens.",
            part=_PART,
            hint="Raise data.max_tokens.",
        )
    return Examples(found, skipped)


def _texts(data: Mapping[str, Any], where: str, keys: Sequence[str]) -> list[str]:
    """Return the values of `keys`. Raises `ConfigError` unless they are non-empty strings."""
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


def _answered(prompt: str, completion: str, where: str, tokenizer: HfTokenizer, end: Sequence[int]) -> _Tokens:
    ids, places = tokenizer.encode_with_places(prompt + completion)
    first = next((number for number, (start, _) in enumerate(places) if start >= len(prompt)), len(ids))
    cuts = first > 0 and places[first - 1][1] > len(prompt)
    first -= cuts
    if first < 1:
        raise ConfigError(f"{where}: the prompt has no token.", part=_PART)
    return _Tokens([*ids, *end], [*([False] * first), *([True] * (len(ids) - first + len(end)))], cuts)


def _conversation(
    messages: Sequence[Mapping[str, Any]],
    where: str,
    tokenizer: HfTokenizer,
    eos: Collection[int],
    options: Mapping[str, Any],
) -> Iterator[_Tokens]:
    text, answers = "", list[tuple[int, int]]()
    asked = [shown(message) for message in messages]
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = tokenizer.as_chat(asked[:index], **options)
            after = tokenizer.as_chat(asked[: index + 1], answered=True, **options)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", part=_PART, hint=error.hint) from error
        if not after.startswith(before):
            raise ConfigError(
                f"{where}: the chat template writes message {index} differently from how it asks the model for it.",
                part=_PART,
                hint="Give prompt and completion as the model is to see them, in the place of messages.",
            )
        if text and not before.startswith(text):
            if answers:
                yield _trained_on(text, answers, tokenizer, eos)
            answers = []
        if is_trained(message):
            answers.append((len(before), len(after)))
        text = after
    if answers:
        yield _trained_on(text, answers, tokenizer, eos)


def _trained_on(text: str, answers: Sequence[tuple[int, int]], tokenizer: HfTokenizer, eos: Collection[int]) -> _Tokens:
    """Tokenize a conversation; `answers`, ranges of characters, are trained on, each up to its last end-of-text token."""
    ids, places = tokenizer.encode_with_places(text, chat=True)
    trained, cuts = [False] * len(ids), False
    for start, stop in answers:
        mine = [number for number, (first, end) in enumerate(places) if end > start and first < stop]
        cuts = cuts or (bool(mine) and places[mine[0]][0] < start)
        ends = [number for number in mine if ids[number] in eos]
        for number in mine:
            trained[number] = not ends or number <= ends[-1]
    return _Tokens(list(ids), trained, cuts)


def _check_conversation(messages: Any, where: str) -> None:
    """Raise `ConfigError` unless the assistant says something to train on in `messages`, and not first."""
    check_messages(messages, f"{where}: 'messages'")
    if not any(each["role"] == "assistant" for each in messages):
        raise ConfigError(f"{where}: no message has the role 'assistant', so there is nothing to train on.", part=_PART)
    if messages[0]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the conversation begins with the assistant, which answers nobody.",
            part=_PART,
            hint="Begin with what the user, or the system, says.",
        )
    if not any(is_trained(each) for each in messages if each["role"] == "assistant"):
        raise ConfigError(
            f"{where}: every message of the assistant is left out, so there is nothing to train on.", part=_PART
        )
