"""The environment of tool calls: calls in the model's format, answers and errors that the model reads, and the sandbox."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.config import EnvironmentConfig
from weightlane.trainer.loop.environments import Environment, EnvironmentContext, Message, Reply
from weightlane.trainer.loop.environments.registry import make_environment
from weightlane.trainer.loop.environments.tools.calls import hermes_reply
from weightlane.trainer.loop.environments.tools.sandbox import SandboxLimits, can_isolate, check_sandbox, run_python

TOOLS = '''
import asyncio, threading

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def look_up(name: str) -> dict:
    """Looks something up.

    Args:
        name: Its name.
    """
    await asyncio.sleep(0)
    return {"name": name}

def fails() -> str:
    """Fails."""
    raise asyncio.CancelledError("no such island")

def leaves() -> str:
    """Ends the program."""
    raise SystemExit(3)

def hangs() -> str:
    """Hangs."""
    threading.Event().wait()

def long() -> str:
    """Says a lot."""
    return "\\ud83d" + "x" * 10000

def undocumented(a):
    return a

def upper(text):
    from weightlane.trainer.loop.environments.tools.calls import ToolCall
    return [ToolCall("add", {"a": 1, "b": 1})] if text.startswith("CALL") else []
'''


class Scripted:
    """An episode whose model says what it is given; keeps what it read."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.read, self.template = list(texts), list[Any](), dict[str, Any]()

    async def reply(self, news: str | Sequence[Message] | None = None, **template: Any) -> Reply:
        self.read.append(news)
        self.template.update(template)
        return Reply(self.texts.pop(0), "stop") if self.texts else Reply("", "turns")

    async def judge(self, reply: Reply) -> float:
        return float(reply.text == "done")

    @property
    def token_ids(self) -> Sequence[int]:
        return []


def tools(folder: Path, *names: str, **options: Any) -> Environment:
    (folder / "tools_of_test.py").write_text(TOOLS)
    functions = [f"tools_of_test:{name}" for name in names]
    config = EnvironmentConfig(name="tools", options={"functions": functions, **options})
    made = make_environment(config, EnvironmentContext([folder]))
    assert made is not None
    return made


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no call", []),
        (f"first {call('add', a=1)} and {call('add', b='</x>')}", [("add", {"a": 1}, ""), ("add", {"b": "</x>"}, "")]),
        ('<tool_call>{"name": "add"}', [("add", {}, "")]),
        ("<tool_call>{name}</tool_call>" + call("\ud83d"), [("", {}, "not valid JSON"), ("", {}, "surrogates not")]),
        ("<tool_call>[1]</tool_call>", [("", {}, "a call must be")]),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', [("add", {}, "a call must be")]),
        ("<tool_call>" + "[" * 100_000, [("", {}, "not valid JSON")]),
    ],
)
def test_calls_are_found_as_they_are_written_and_bad_ones_say_why(text: str, found: list[Any]) -> None:
    calls = hermes_reply(text).calls
    assert [(each.name, each.arguments) for each in calls] == [(name, arguments) for name, arguments, _ in found]
    for each, (_, _, says) in zip(calls, found, strict=True):
        assert says in each.error
        assert bool(says) == bool(each.error)


def test_the_model_reads_what_its_tools_return_and_why_they_fail_and_its_last_reply_is_judged(tmp_path: Path) -> None:
    names = ("add", "look_up", "fails", "leaves", "hangs", "long")
    environment = tools(tmp_path, *names, call_time_limit_s=0.2, answer_chars=50)
    first = call("add", a=2, b=3) + call("look_up", name="Ithaca") + call("long")
    second = "".join(call(name) for name in ("fails", "leaves", "hangs", "sing")) + call("add", a=2) + "<tool_call>x"
    episode = Scripted(first, second, "done")
    verdict = asyncio.run(environment.play({"prompt": "p"}, episode))
    assert (verdict.reward, verdict.metrics) == (1.0, {"tool_calls": 9, "tool_errors": 6})
    opening, *news = episode.read
    assert opening is None
    answers = [[message["content"] for message in each] for each in news]
    assert answers[0] == ["5", '{"name": "Ithaca"}', "?" + "x" * 49]
    for text, says in zip(
        answers[1],
        (
            "CancelledError: no such island",
            "SystemExit: 3",
            "longer than 0.2 s",
            "no tool 'sing', but add,",
            "missing",
            "JSON",
        ),
        strict=True,
    ):
        assert text.startswith("error: ")
        assert says in text or len(text) == 50
    assert {(message["role"], message["name"]) for message in news[0]} == {
        ("tool", "add"),
        ("tool", "look_up"),
        ("tool", "long"),
    }
    schema = episode.template["tools"][0]["function"]
    assert (schema["name"], schema["parameters"]["properties"]["a"]) == (
        "add",
        {"type": "integer", "description": "The first."},
    )
    asyncio.run(environment.close())
    cut_short = Scripted(call("add", a=1, b=1))
    assert asyncio.run(tools(tmp_path, "add").play({}, cut_short)).reward == 0
    own = Scripted("CALL", "done")
    assert asyncio.run(tools(tmp_path, "add", format="tools_of_test:upper").play({}, own)).metrics["tool_calls"] == 1
    assert own.read[1][0]["content"] == "2"


def test_tools_that_cannot_be_offered_are_refused_before_the_run(tmp_path: Path) -> None:
    for names, options, says in (
        ((), {}, "there is no tool"),
        (("add", "add"), {}, "two have the same name"),
        (("undocumented",), {}, "'undocumented' cannot be described to the model"),
        (("missing",), {}, "has no 'missing'"),
        (("add",), {"format": "xml"}, "no tool format 'xml'"),
    ):
        with pytest.raises(ConfigError, match=says):
            tools(tmp_path, *names, **options)


needs_namespaces = pytest.mark.skipif(
    not can_isolate(), reason="this system lets no process have namespaces of its own"
)
_DAEMON = """
import fcntl, os, time
ready, here = os.pipe()
if not os.fork():
    os.setsid()
    file = open({path!r}, "r+")
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(str(os.getpid()))
    file.flush()
    os.write(here, b"x")
    time.sleep(1e6)
os.read(ready, 1)
"""
_NETWORK = "import socket; socket.create_connection(('127.0.0.1', {port}), 5)"


@needs_namespaces
def test_code_runs_within_its_limits_without_network_and_leaves_nothing_behind(tmp_path: Path, free_port: int) -> None:
    limits = SandboxLimits(seconds=HANG_S, memory_mib=256, output_chars=100, file_mib=1)

    def run(code: str, **other: Any) -> str:
        return asyncio.run(run_python(code, limits.model_copy(update=other)))

    assert run("import os\nprint(6 * 7, os.getcwd() == os.environ['HOME'], os.listdir())") == "42 True []"
    assert run("1 / 0", output_chars=1000).endswith("ZeroDivisionError: division by zero\nexit status 1")
    assert "MemoryError" in run("x = bytearray(1 << 30)", output_chars=1000)
    assert run("while True: print('ab' * 1000)") == "ab" * 50 + "\noutput cut after 100 characters"
    assert run("import time; time.sleep(1e6)", seconds=0.2) == "ended after 0.2 s"
    held = tmp_path / "held"
    held.touch()
    assert run(_DAEMON.format(path=str(held))) == ""
    assert held.read_text().isdigit(), "written by a process that left its group"
    with held.open() as file:
        wait_until(lambda: is_free(file), "the end of a process that left its group")
    with open_port(free_port):
        assert "OSError" in run(_NETWORK.format(port=free_port), output_chars=2000)
        assert run(_NETWORK.format(port=free_port), isolate=False) == "", "it is the namespace that has no network"
    assert "File too large" in run("open('big', 'wb').write(bytes(2 << 20))", output_chars=1000)
    held.write_text("")

    async def give_up() -> None:
        running = asyncio.create_task(run_python(_DAEMON.format(path=str(held)), SandboxLimits(isolate=False)))
        while not held.read_text():  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running], timeout=HANG_S)
        assert running.cancelled(), "a process that left its group has the other end of the pipe"

    try:
        asyncio.run(asyncio.wait_for(give_up(), HANG_S))
    finally:
        os.kill(int(held.read_text()), signal.SIGKILL)


@needs_namespaces
def test_the_sandbox_is_a_tool_and_a_system_without_namespaces_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tools(tmp_path, python={"seconds": HANG_S}, call_time_limit_s=HANG_S)
    episode = Scripted(call("python", code="print(2 ** 10)"), "done")
    assert asyncio.run(environment.play({}, episode)).reward == 1
    assert episode.read[1][0]["content"] == "1024"
    monkeypatch.setenv("PATH", str(tmp_path))
    can_isolate.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"namespaces.*isolate = false"):
            check_sandbox(SandboxLimits())
        check_sandbox(SandboxLimits(isolate=False))
    finally:
        can_isolate.cache_clear()


def is_free(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_port(port: int) -> Any:
    import socket

    return socket.create_server(("127.0.0.1", port))
