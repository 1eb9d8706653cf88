"""`Session`: the calls of one agent, as the turns of its episode."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import ConfigError, EpisodeError, WeightlaneError, as_weightlane_error

from ..contract import EpisodeView, Message, Reply
from ..tools.calls import ParsedReply, Parser
from .wire import CallError, ChatRequest, as_events, assistant_message, completion, message_key

_PART = "environment agent"

ParserOf = Callable[[Sequence[Message]], Parser]
"""Returns the function that finds calls of given tools in a reply."""


@dataclass(frozen=True, slots=True)
class _Point:
    """The conversation up to the end of a reply."""

    keys: Sequence[str]
    """The messages before the reply, by `message_key`."""
    replies: Collection[str]
    """The reply by `message_key`. One with tool calls is the same without its text, which some agents leave out."""
    setting: str
    """Tools and template arguments: another setting has another first prompt."""

    def begins(self, request: ChatRequest) -> bool:
        """Whether `request` goes on from here."""
        before = len(self.keys)
        return (
            len(request.keys) > before
            and list(request.keys[:before]) == list(self.keys)
            and request.keys[before] in self.replies
            and self.setting == _setting(request)
        )


class Session:
    """Answers the calls of one episode's agent, one after the other.

    A call has the whole conversation. If it begins with what was said up to an earlier reply, the model reads the tokens of that
    as they were, and then what is new. Otherwise a further sequence of the episode begins.
    """

    def __init__(self, episode: EpisodeView, parser_of: ParserOf) -> None:
        self._episode, self._parser_of = episode, parser_of
        self._one_at_a_time = asyncio.Lock()
        self._answering: set[asyncio.Task[Any]] = set()
        self._points: list[_Point] = []
        self._over = ""
        self.last: Reply | None = None
        """The last reply that is not empty."""
        self.cut_short = False
        """Whether a call was refused because the episode has no room or no turn left."""
        self.failure: WeightlaneError | None = None
        """The error that a reply failed with, which costs the episode."""
        self.failed: Callable[[], object] = lambda: None
        """Is called once `failure` is there."""

    def close(self) -> None:
        """Refuse further calls, and give up those that are being answered: their replies are no part of the episode."""
        self._over = self._over or "the episode has ended."
        for answering in self._answering:
            answering.cancel()

    async def chat(self, request: ChatRequest, gone: Coroutine[Any, Any, None]) -> dict[str, Any] | str:
        """Return the completion, or the events of its stream. Raises `CallError`.

        When `gone` returns, because the client has left, the reply is given up: the agent does not know it, and may ask again.
        """
        answering, leaving = asyncio.create_task(self._chat(request)), asyncio.create_task(gone)
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if answering.cancelled():
            raise CallError(self._over or "the client has gone.", status=410, code="episode_over")
        return answering.result()

    async def _chat(self, request: ChatRequest) -> dict[str, Any] | str:
        async with self._one_at_a_time:
            if self._over:
                raise CallError(self._over, status=410, code="episode_over")
            after = self._point_before(request)
            template = {**request.template, "tools": list(request.tools) or None}
            parse = self._parser(request)
            try:
                reply = await self._episode.reply(
                    request.messages[len(self._points[after - 1].keys) + 1 if after else 0 :],
                    after=after,
                    max_new_tokens=request.max_new_tokens,
                    **template,
                )
                parsed = _parsed(parse, reply) if parse else ParsedReply([], reply.text)
            except Exception as raised:
                error = as_weightlane_error(raised, _PART)
                self._over, self.failure = f"the episode was lost: {error}", error
                self.failed()
                raise CallError(self._over, status=410, code="episode_over") from raised
            if reply.is_last:
                raise self._cut_short(reply)
            self.last = reply
            reply_id = secrets.token_hex(12)
            message = assistant_message(parsed.text, parsed.calls[: request.most_calls], reply_id)
            replies = {message_key(message)} | ({message_key({**message, "content": ""})} if parsed.calls else set())
            self._points.append(_Point(request.keys, replies, _setting(request)))
            read = len(self._episode.token_ids) - len(reply.token_ids)
            whole = completion(message, reply, request, reply_id, read)
            return as_events(whole, include_usage=request.include_usage) if request.stream else whole

    def _parser(self, request: ChatRequest) -> Parser | None:
        try:
            return self._parser_of(request.tools) if request.offers_tools else None
        except ConfigError as error:  # without tools it was made before the run
            raise CallError(f"the tool parser refuses the tools: {error}", param="tools") from error

    def _point_before(self, request: ChatRequest) -> int:
        """Return the number of the reply, from 1, up to which the request is what was said; 0 if there is none.

        If several match, the longest counts, and among equals the last.
        """
        lengths = [(len(point.keys), number) for number, point in enumerate(self._points, 1) if point.begins(request)]
        return max(lengths)[1] if lengths else 0

    def _cut_short(self, reply: Reply) -> CallError:
        self.cut_short = True
        if reply.ended == "full":
            self._over = "the conversation has rollout.max_model_len tokens."
            return CallError(self._over, code="context_length_exceeded", param="messages")
        self._over = "the episode has environment.max_turns replies."
        return CallError(self._over, status=410, code="episode_over")


def _parsed(parse: Parser, reply: Reply) -> ParsedReply:
    """Return the calls of a reply and the text next to them. If one is malformed, all is text."""
    try:
        parsed = parse(reply.text)
    except Exception as cause:
        raise EpisodeError(
            f"environment.options.format raised {type(cause).__name__}: {cause} for the reply {reply.text!r}.",
            part=_PART,
        ) from cause
    as_text = not parsed.calls or any(call.error for call in parsed.calls)
    return ParsedReply([], reply.text) if as_text else parsed


def _setting(request: ChatRequest) -> str:
    return json.dumps([request.tools, request.template], sort_keys=True, default=str)
