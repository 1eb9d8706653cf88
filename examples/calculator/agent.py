"""Answers a question with a calculator. It is written against OpenAI's SDK, and knows nothing of weightlane.

OPENAI_API_KEY=... python examples/calculator/agent.py "Multiply 123 and 456 by the tool."
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
MULTIPLY = {"name": "multiply", "description": "Multiplies two numbers.", "parameters": PARAMETERS}


def answer(question: str) -> str | None:
    """Let the model call the calculator until it replies without a call. Returns that reply."""
    client = OpenAI()
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        made = client.chat.completions.create(
            model="gpt-5-mini", messages=messages, tools=[{"type": "function", "function": MULTIPLY}]
        )
        reply = made.choices[0].message
        if not reply.tool_calls:
            return reply.content
        messages.append(reply)
        for call in reply.tool_calls:
            try:
                product = str(multiply(**json.loads(call.function.arguments)))
            except TypeError as error:
                product = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": product})


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


if __name__ == "__main__":
    print(answer(sys.argv[1]))
