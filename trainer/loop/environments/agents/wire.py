"""OpenAI's chat completions as JSON: requests are read and checked, replies and errors are written.

The format is that of https://platform.openai.com/docs/api-reference/chat, as far as a policy in training can serve it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightlane.ckpt_engines import ProtocolError

from ..contract import Message, Reply
from ..tools.calls import ToolCall

_PART = "agent endpoint"
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
"""Roles of messages, and what chat templates call them."""
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "seed": (),
    "stop": ([], ""),
}
"""Parameters that change the distribution of tokens, and the values that do not."""
_FORM: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
}
"""Parameters that change what a reply consists of, and the values that are served."""
_READ = {"messages", "model", "tools", "temperature", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
_READ |= {"chat_template_kwargs", "parallel_tool_calls"}
_TEMPLATES_OWN = {"self", "news", "after", "max_new_tokens", "messages", "answered", "tools"}
_TEMPLATES_OWN |= {"conversation", "add_generation_prompt", "tokenize"}
"""Arguments of the chat template that a call gives otherwise, or not at all."""
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "reasoning_effort", "verbosity"}
_WITHOUT_EFFECT |= {"safety_identifier", "prompt_cache_key", "prompt_cache_retention"}


class CallError(ProtocolError):
    """A call that is not answered by a reply, with its HTTP status, and with OpenAI's code of the error."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_value", param: str = "") -> None:
        super().__init__(message, part=_PART)
        self.status, self.code, self.param, self.said = status, code, param, message

    def as_json(self) -> dict[str, Any]:
        """The error as OpenAI's SDK shows it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004 - HTTP's border
        return {"error": {"message": self.said, "type": kind, "param": self.param or None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one chat completion."""

    messages: Sequence[Message]
    """The conversation as chat templates read it."""
    keys: Sequence[str]
    """A text for each message. Two messages with the same text are the same one."""
    model: str = ""
    tools: Sequence[Message] = ()
    offers_tools: bool = False
    """Whether calls of `tools` are looked for in the reply."""
    most_calls: int | None = None
    """Most tool calls that the agent gets of a reply."""
    max_new_tokens: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    stream: bool = False
    include_usage: bool = False


def chat_request(body: object, temperature: float, *, ignores_sampling: bool) -> ChatRequest:
    """Read a request. Raises `CallError` for one that is malformed, or that asks for another sampling than the run's.

    With `ignores_sampling`, the latter is sampled as the run samples.
    """
    if not isinstance(body, dict):
        raise CallError("the body must be a JSON object.")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_parameter(name, value, ignores_sampling=ignores_sampling)
    if not ignores_sampling and given.get("temperature", temperature) != temperature:
        raise CallError(
            f"temperature is {given['temperature']!r}, and the run samples with {temperature:g}"
            " (algorithm.temperature): tokens of another distribution would be trained on as this one's."
            " Leave it out, or set environment.options.other_sampling to ignore.",
            param="temperature",
        )
    tools = given.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise CallError("tools must be a list of functions.", param="tools")
    template = given.get("chat_template_kwargs", {})
    if not isinstance(template, dict) or template.keys() & _TEMPLATES_OWN:
        raise CallError(
            f"chat_template_kwargs must be an object without {', '.join(sorted(_TEMPLATES_OWN))}.",
            param="chat_template_kwargs",
        )
    stream = given.get("stream_options", {})
    messages = _messages(given.get("messages"))
    return ChatRequest(
        messages,
        [message_key(message) for message in messages],
        str(given.get("model", "")),
        tools,
        bool(tools) and given.get("tool_choice", "auto") == "auto",
        1 if given.get("parallel_tool_calls") is False else None,
        _max_new_tokens(given),
        template,
        given.get("stream") is True,
        isinstance(stream, dict) and stream.get("include_usage") is True,
    )


def _check_parameter(name: str, value: object, *, ignores_sampling: bool) -> None:
    if name in _SAMPLING:
        if not ignores_sampling and value not in _SAMPLING[name]:
            raise CallError(
                f"{name} would draw tokens from another distribution than the one that is trained."
                " Leave it out, or set environment.options.other_sampling to ignore.",
                param=name,
            )
    elif name in _FORM:
        if value not in _FORM[name]:
            raise CallError(f"{name} = {value!r} is not offered: a reply is one text of the policy.", param=name)
    elif name not in _READ | _WITHOUT_EFFECT:
        raise CallError(f"the parameter {name!r} is unknown here.", code="unknown_parameter", param=name)


def _max_new_tokens(given: Mapping[str, Any]) -> int | None:
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    if most is not None and (not isinstance(most, int) or most < 1):
        raise CallError(f"the most tokens of a reply must be a positive number, not {most!r}.", param="max_tokens")
    return most


def _messages(given: object) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise CallError("messages must be a list with at least one message.", param="messages")
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for place, raw in enumerate(given):
        here = f"messages[{place}]"
        role = _ROLES.get(str(raw.get("role"))) if isinstance(raw, dict) else None
        if role is None or not isinstance(raw, dict):
            raise CallError(f"{here} must be an object with one of the roles {', '.join(_ROLES)}.", param=here)
        message: dict[str, Any] = {"role": role, "content": _text(raw.get("content"), here)}
        if role == "assistant" and raw.get("tool_calls"):
            if not isinstance(raw["tool_calls"], list):
                raise CallError(f"{here}: tool_calls must be a list.", param=here)
            message["tool_calls"] = [_call(call, here) for call in raw["tool_calls"]]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if role == "tool":
            message["tool_call_id"] = str(raw.get("tool_call_id", ""))
            message["name"] = names.get(message["tool_call_id"], "tool")
        messages.append(message)
    return messages


def _text(content: object, here: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise CallError(f"{here}: its content must be text.", param=here)
    return "".join(map(str, texts))


def _call(call: object, here: str) -> dict[str, Any]:
    try:
        function = call["function"]  # type: ignore[index]
        made = _tool_call(call["id"], ToolCall(function["name"], json.loads(function["arguments"])))  # type: ignore[index]
    except (KeyError, TypeError, ValueError, RecursionError) as cause:
        raise CallError(f"{here}: a tool call must have id, name, and arguments in JSON.", param=here) from cause
    return made


def _tool_call(call_id: str, call: ToolCall) -> dict[str, Any]:
    return {"id": str(call_id), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_key(message: Message) -> str:
    """Return a text that is the same for the same message. Blanks around a content do not count."""
    calls = [[call["id"], call["function"]] for call in message.get("tool_calls", ())]
    key = [message["role"], message["content"].strip(), calls, message.get("tool_call_id", "")]
    return json.dumps(key, sort_keys=True)


def assistant_message(text: str, calls: Sequence[ToolCall], reply_id: str) -> dict[str, Any]:
    """Return a reply as a message: its text, and the tool calls that were found next to it."""
    named = [_tool_call(f"call_{reply_id}_{number}", call) for number, call in enumerate(calls)]
    return {"role": "assistant", "content": text} | ({"tool_calls": named} if named else {})


def completion(
    message: Message, reply: Reply, request: ChatRequest, reply_id: str, prompt_tokens: int
) -> dict[str, Any]:
    """Return a chat completion."""
    shown = dict(message)
    if calls := message.get("tool_calls"):
        shown["content"] = message["content"] or None
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    written = len(reply.token_ids)
    finish = "length" if reply.ended == "length" else "tool_calls" if calls else "stop"
    return {
        "id": f"chatcmpl-{reply_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": 0, "message": shown, "logprobs": None, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written,
            "total_tokens": prompt_tokens + written,
        },
    }


def as_events(whole: Mapping[str, Any], *, include_usage: bool) -> str:
    """Return a completion as the events of a stream, in which the message is one piece."""
    (choice,) = whole["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    chunk = {**whole, "object": "chat.completion.chunk"}
    del chunk["usage"]
    pieces: list[dict[str, Any]] = [
        {**chunk, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]},
        {**chunk, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}]},
    ]
    if include_usage:
        pieces.append({**chunk, "choices": [], "usage": whole["usage"]})
    return "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
