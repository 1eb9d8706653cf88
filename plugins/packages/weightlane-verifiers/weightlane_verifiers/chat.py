"""`Chat`: a harness of verifiers that talks in the process of the run, instead of a program for each turn."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

_ENDINGS = ("context_length_exceeded", "episode_over")
"""Codes of a refused call after which the conversation is judged as it stands."""
Wire = dict[str, Any]
"""Part of a request or reply, as JSON."""


class Chat(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Asks the model, and calls the task's tools, until a reply has no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002 - verifiers' signature
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """See `verifiers.v1.Harness.launch`. No wait has a limit here: the run's for a turn and an episode hold."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Wire] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        specs = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp({"mcpServers": specs}, stack)
            headers, unlimited = {"Authorization": f"Bearer {secret}"}, aiohttp.ClientTimeout()
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=unlimited))
            request: Wire = {"model": ctx.model, "messages": messages}
            if tools:
                request["tools"] = tools
            while (reply := await _reply(http, endpoint, request)) is not None:
                messages.append(reply)
                calls = reply.get("tool_calls") or ()
                for call in calls:
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                    if name in dispatch:
                        said = await call_mcp(servers, dispatch, name, json.loads(arguments))
                    else:
                        said = f"error: unknown tool {name!r}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
                if not calls:
                    break
        return vf.ProgramResult(0, "", "")


async def _reply(http: aiohttp.ClientSession, endpoint: str, request: Wire) -> Wire | None:
    """Return the model's message, or None if the conversation can have no further one."""
    async with http.post(f"{endpoint}/chat/completions", json=request) as answer:
        body = await answer.text()
        if answer.ok:
            message: Wire = json.loads(body)["choices"][0]["message"]
            return message
        if any(code in body for code in _ENDINGS):
            return None
        raise RuntimeError(f"status {answer.status} of the model: {body}")
