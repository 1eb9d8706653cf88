"""Finds the tool calls in a reply, in the format that the model writes them in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError

from ....data.named_function import function_named
from ..contract import Message

_PART = "environment tools"
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool as the model wrote it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """The fault of the call, as the model is told; empty if it can be made."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply's tool calls and the text next to them."""

    calls: Sequence[ToolCall]
    """In their order."""
    text: str = ""
    """What the model wrote before the first call, as far as the format tells."""


Parser = Callable[[str], ParsedReply]
"""Function that takes the text of a reply apart."""


def parser_named(name: str, search_path: Sequence[Path], model_dir: Path | None, tools: Sequence[Message]) -> Parser:
    """Return the parser that an option ``format`` names: ``hermes``, ``vllm:NAME``, or ``module:function``.

    Such a function takes a reply's text and returns its `ToolCall`s.

    Args:
        name: The format.
        search_path: Where a module of one's own is looked for first.
        model_dir: The model's directory, whose tokenizer vLLM's parsers read.
        tools: The JSON schemas of the tools.

    Raises:
        ConfigError: There is no such parser, or vLLM refuses it.
    """
    if name == "hermes":
        return hermes_reply
    if name.startswith("vllm:"):
        return _vllm_parser(name.removeprefix("vllm:"), model_dir, tools)
    if ":" in name:
        calls_in = function_named(name, search_path, part=_PART, setting="environment.options.format")
        return lambda text: ParsedReply(calls_in(text))
    raise ConfigError(
        f"there is no tool format {name!r}.",
        part=_PART,
        hint="Set environment.options.format to hermes, to vllm:NAME with one of vLLM's tool parsers, or to 'module:function'.",
    )


def hermes_reply(text: str) -> ParsedReply:
    """Find ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write calls."""
    found = list(_HERMES.finditer(text))
    return ParsedReply([_from_json(match[1]) for match in found], text[: found[0].start()] if found else text)


def _from_json(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        return _checked(call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else _checked(None, None)
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the call is not valid JSON: {error}")


def _checked(name: object, arguments: object) -> ToolCall:
    """Return the call, or its fault. Raises `UnicodeEncodeError` for half a surrogate pair, which no tokenizer takes."""
    json.dumps([name, arguments], ensure_ascii=False).encode()
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(
            name if isinstance(name, str) else "", error='a call must be {"name": a string, "arguments": an object}'
        )
    return ToolCall(name, arguments)


def _vllm_parser(name: str, model_dir: Path | None, tools: Sequence[Message]) -> Parser:
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
        from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

        request = ChatCompletionRequest(messages=[], model="", tools=list(tools))
        parser_class = ToolParserManager.get_tool_parser(name)
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        parser_class(tokenizer, request.tools)
    except Exception as cause:
        raise ConfigError(f"vLLM has no tool parser {name!r} for this model: {cause}.", part=_PART) from cause

    def parse(text: str) -> ParsedReply:
        found = parser_class(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [_of_vllm(call.function.name, call.function.arguments) for call in found.tool_calls]
        return ParsedReply(calls, found.content or "")

    return parse


def _of_vllm(name: str, arguments: str) -> ToolCall:
    try:
        return _checked(name, json.loads(arguments))
    except (ValueError, RecursionError) as error:
        return ToolCall(name, error=f"the arguments are not valid JSON: {error}")
