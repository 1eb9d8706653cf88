"""Renders what an environment says as the tokens that follow a conversation, without tokenizing the conversation again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from weightlane.ckpt_engines import ConfigError

from .contract import Message

_REPLY = "WEIGHTLANE-REPLY"
"""Stands for the model's reply in a conversation that is rendered only to see what the template writes after a reply."""
_NEWS = "WEIGHTLANE-NEWS"
_QUESTION = {"role": "user", "content": "?"}
_PART = "environment"


class EpisodeTokenizer(Protocol):
    """Turns text and conversations into tokens, and tokens into text."""

    def encode(self, text: str, *, within: bool = False) -> Sequence[int]:
        """Token ids of a prompt, or, `within` a sequence, of a text that no token begins."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens included."""

    def as_chat(self, messages: Sequence[Message], *, answered: bool = False, **options: Any) -> str:
        """Conversation by the chat template, up to where the answer begins. Raises `ConfigError`."""


class Renderer:
    """Turns an environment's messages and texts into tokens.

    A chat template writes whole conversations only. The tokens after a reply are therefore those that it writes after the
    reply of a stand-in conversation: the end of the reply's turn, the new messages, and the beginning of the next reply. The
    tokens of the conversation so far stay as they are, also where the template would write it differently now, as that of
    Qwen3 leaves out thoughts.

    `stop_ids` are the tokens that end a reply.
    """

    def __init__(self, tokenizer: EpisodeTokenizer, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._stop_texts = [tokenizer.decode([token]) for token in stop_ids]

    def opening(self, news: str | Sequence[Message], template: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a first prompt, up to where the reply begins."""
        if isinstance(news, str):
            return list(self._tokenizer.encode(news))
        return list(self._tokenizer.encode(self._tokenizer.as_chat(news, **template), within=True))

    def continuation(
        self, news: str | Sequence[Message], template: Mapping[str, Any], written: Sequence[int]
    ) -> list[int]:
        """Return the tokens between the reply whose tokens are `written` and the next reply.

        Raises `ConfigError` if the chat template cannot write `news` after a reply.
        """
        if isinstance(news, str):
            return list(self._tokenizer.encode(news, within=True)) if news else []
        ids = list(self._tokenizer.encode(self._after_a_reply(news, template), within=True))
        has_ended = bool(written) and written[-1] in self._stop_ids
        return ids[1:] if has_ended and ids[:1] == [written[-1]] else ids

    def text(self, written: Sequence[int]) -> str:
        """Return the text of a reply, without its stop tokens."""
        tokens = list(written)
        while tokens and tokens[-1] in self._stop_ids:
            tokens.pop()
        return self._tokenizer.decode(tokens)

    def _after_a_reply(self, news: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Return what the chat template writes after a reply that `news` follow.

        Some templates refuse a tool's answer that follows no call, and others leave it out without a word.
        """
        stand_ins = [{**message, "content": _NEWS} for message in news]
        ways = (self._after_text, self._after_a_call) if any(map(_is_tool, news)) else (self._after_text,)
        for way in ways:
            try:
                if way(stand_ins, template).count(_NEWS) == len(news):
                    return way(news, template)
            except ConfigError:
                if way is ways[-1]:
                    raise
        raise ConfigError(
            "the chat template does not write all messages that follow a reply.",
            part=_PART,
            hint="It may end a call of a tool by a token that eos_token_id of the model's generation_config.json lacks.",
        )

    def _after_text(self, news: Sequence[Message], template: Mapping[str, Any]) -> str:
        text = self._tokenizer.as_chat([_QUESTION, {"role": "assistant", "content": _REPLY}, *news], **template)
        if text.count(_REPLY) != 1:
            raise ConfigError(
                "the chat template does not write a reply as it stands, so nothing can be added after one.",
                part=_PART,
                hint="Give news as text, or use a template that does.",
            )
        return text.partition(_REPLY)[2]

    def _after_a_call(self, news: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Return what follows a reply that ends with calls, from the first stop token after them on."""
        reply = {"role": "assistant", "content": _REPLY, "tool_calls": [_call(each) for each in news if _is_tool(each)]}
        text = self._tokenizer.as_chat([_QUESTION, reply, *news], **template)
        last = text.rfind(_REPLY)
        ends = [at for stop in self._stop_texts if last >= 0 and (at := text.find(stop, last)) >= 0]
        return text[min(ends) :] if ends else ""


def _is_tool(message: Message) -> bool:
    return message.get("role") == "tool"


def _call(answer: Message) -> dict[str, Any]:
    function = {"name": answer.get("name") or "tool", "arguments": {"of": _REPLY}}
    return {"id": answer.get("tool_call_id") or "000000000", "type": "function", "function": function}
