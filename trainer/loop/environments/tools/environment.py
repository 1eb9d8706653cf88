"""`Tools`: the model calls functions in its own format, reads what they return, and its last reply is judged."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.runtime.threads import DaemonThreads

from ....data.named_function import function_named
from ..contract import Environment, EnvironmentContext, EpisodeView, Message, Options, Reply, Verdict
from .calls import ToolCall, parser_named
from .sandbox import SandboxLimits, check_sandbox, run_python

_PART = "environment tools"


class ToolOptions(Options):
    """Options of the environment ``tools``."""

    functions: tuple[str, ...] = Field(
        default=(),
        description="Tools, each 'module:function', also async. The model is told name, types and docstring (Google style).",
    )
    python: SandboxLimits | None = Field(
        default=None,
        description="Limits of a tool python(code), which runs code in a process of its own; none: no such tool.",
    )
    format: str = Field(
        default="hermes",
        description="How the model writes calls: hermes (also Qwen's), vllm:NAME for one of vLLM's tool parsers, or"
        " 'module:function'.",
    )
    call_time_limit_s: float = Field(
        default=30.0,
        gt=0,
        description="Most seconds of a call; the model reads of one that takes longer as of any error.",
    )
    answer_chars: int = Field(default=4000, ge=1, description="Most characters of an answer; the rest is cut.")


class Tools(Environment):
    """Lets the model call tools until a reply has no call; the run's reward function judges that reply.

    An error of a tool, or of a call, is the tool's answer. Metrics: ``tool_calls`` and ``tool_errors`` of an episode.
    """

    options_type = ToolOptions
    needs_reward = True
    options: ToolOptions

    def __init__(self, options: ToolOptions, context: EnvironmentContext) -> None:
        super().__init__(options, context)
        self._tools: dict[str, Callable[..., Any]] = {}
        for name in options.functions:
            function = function_named(name, context.search_path, part=_PART, setting="environment.options.functions")
            self._tools[function.__name__] = function
        if options.python is not None:
            check_sandbox(options.python)
            self._tools["python"] = self._python
        if not self._tools or len(self._tools) != len(options.functions) + (options.python is not None):
            raise ConfigError(
                "there is no tool, or two have the same name.",
                part=_PART,
                hint="Name functions in environment.options.functions, or give environment.options.python its limits.",
            )
        self._schemas = [_schema(name, function) for name, function in self._tools.items()]
        self._parse = parser_named(options.format, context.search_path, context.model_dir, self._schemas)
        # No limit: a call beyond its time is left behind, and must not keep others waiting.
        self._threads = DaemonThreads(sys.maxsize, "weightlane-tool")

    async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:  # noqa: ARG002 - the episode knows it
        """See `Environment.play`."""
        calls = errors = 0
        reply: Reply = await episode.reply(tools=self._schemas)
        while not reply.is_last and (found := self._parse(reply.text).calls):
            answers = await asyncio.gather(*map(self._answer, found))
            calls += len(found)
            errors += sum(failed for _, failed in answers)
            reply = await episode.reply([message for message, _ in answers])
        return Verdict(await episode.judge(reply), {"tool_calls": calls, "tool_errors": errors})

    async def close(self) -> None:
        """See `Environment.close`."""
        self._threads.shutdown()

    async def _answer(self, call: ToolCall) -> tuple[Message, bool]:
        """Make a call. Returns the tool's message, and whether the call failed."""
        failed, limit_s = False, self.options.call_time_limit_s
        try:
            async with asyncio.timeout(
                limit_s
            ) as timer:  # not wait_for, whose task would end the program by SystemExit
                text = await self._made(call)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # whatever a tool raises is its answer
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the episode was cancelled, and not something inside the tool
            failed, text = True, f"error: {type(error).__name__}: {error}"
            if timer.expired():
                text = f"error: it took longer than {limit_s:g} s"
        message = {"role": "tool", "name": call.name, "content": text[: self.options.answer_chars]}
        # A tokenizer refuses half a surrogate pair, which a file's name, for example, can have.
        return {key: value.encode(errors="replace").decode() for key, value in message.items()}, failed

    async def _made(self, call: ToolCall) -> str:
        if call.error:
            raise ValueError(call.error)
        if (function := self._tools.get(call.name)) is None:
            raise LookupError(f"there is no tool {call.name!r}, but {', '.join(self._tools)}")
        inspect.signature(function).bind(**call.arguments)
        if inspect.iscoroutinefunction(function):
            value = await function(**call.arguments)
        else:
            value = await asyncio.wrap_future(self._threads.submit(function, **call.arguments))
        return value if isinstance(value, str) else json.dumps(value, default=str)

    async def _python(self, code: str) -> str:
        """
        Runs a Python program and returns what it prints.

        Args:
            code: The program.
        """  # noqa: D212 - the model reads it
        assert self.options.python is not None
        return await run_python(code, self.options.python)


def _schema(name: str, function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the JSON schema of a function, as chat templates read it. Raises `ConfigError` if it cannot be made."""
    from transformers.utils import get_json_schema  # noqa: PLC0415 - slow to import

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as cause:
        raise ConfigError(
            f"the tool {name!r} cannot be described to the model: {cause}.",
            part=_PART,
            hint="Give every argument a type and a line in the docstring's Args.",
        ) from cause
    schema["function"]["name"] = name
    return schema
