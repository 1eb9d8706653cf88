"""Halves of an engine in real processes. An engine's own suite overrides `engine_name` and `engine_options`."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from weightlane.ckpt_engines import Capabilities, CheckpointEngineRegistry, error_from_wire

_PROGRAM = str(Path(__file__).with_name("half_process.py"))
_ANSWER_TIMEOUT_S = 60.0
_sessions = itertools.count()


class RemoteHalf:
    """A `half_process.py`: `start` an operation, then take its `result`."""

    def __init__(self, process: subprocess.Popen[str], name: str = "") -> None:
        self.process = process
        self.name = name
        self.seconds = 0.0
        """How long the last operation took."""
        self.owed = 1
        """Operations whose answer was not taken yet; the first is the greeting."""

    def start(self, op: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        self.owed += 1

    def result(self) -> Any:
        """What the oldest running operation returned; raises what it raised."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(_ANSWER_TIMEOUT_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line, f"{self.name} died with {self.process.wait(5)}"
        self.owed -= 1
        answer = json.loads(line)
        self.seconds = answer["s"]
        if "error" in answer:
            raise error_from_wire(answer["error"])
        return answer["ok"]

    def call(self, op: str, **arguments: Any) -> Any:
        self.start(op, **arguments)
        return self.result()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(10)


class Connection:
    """A sender and its receivers, each in its own process."""

    def __init__(self, sender: RemoteHalf, receivers: list[RemoteHalf], mailbox: Path) -> None:
        self.sender = sender
        self.receivers = receivers
        self.mailbox = mailbox
        self.topology: dict[str, Any] = {}

    @property
    def halves(self) -> list[RemoteHalf]:
        return [self.sender, *self.receivers]

    def exchange_addresses(self, session: str | None = None) -> None:
        self.topology = {
            "session": session or f"test-{os.getpid()}-{next(_sessions)}",
            "senders": {self.sender.name: self.sender.call("address")},
            "receivers": {half.name: half.call("address") for half in self.receivers},
        }

    def start_connect(self, half: RemoteHalf, deadline_s: float = 20.0) -> None:
        half.start("connect", topology=self.topology, mailbox=str(self.mailbox), deadline_s=deadline_s)

    def connect(self) -> None:
        self.exchange_addresses()
        for half in self.halves:
            self.start_connect(half)
        for half in self.halves:
            half.result()

    def start_send(
        self,
        buckets: list[list[int]],
        to: list[RemoteHalf] | None = None,
        deadline_s: float = 20.0,
        *,
        allocated: bool = True,
    ) -> None:
        names = [half.name for half in (self.receivers if to is None else to)]
        self.sender.start("send", buckets=buckets, receivers=names, deadline_s=deadline_s, allocated=allocated)

    def start_receive(self, half: RemoteHalf, buckets: list[list[int]], deadline_s: float = 20.0) -> None:
        half.start("receive", buckets=buckets, sender=self.sender.name, deadline_s=deadline_s)

    def deliver(self, buckets: list[list[int]], **options: Any) -> None:
        """Send `buckets` to every receiver and check every byte."""
        self.start_send(buckets, **options)
        for half in self.receivers:
            self.start_receive(half, buckets)
        for half in self.receivers:
            assert half.result() == [True] * len(buckets)
        self.sender.result()

    def close(self) -> None:
        for half in self.halves:
            half.call("close")


class Pool:
    """Half processes that are used again: starting one costs more than most tests."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]]) -> None:
        self._start = start
        self._idle: list[RemoteHalf] = []
        self._lent: list[RemoteHalf] = []

    def lend(self, count: int) -> list[RemoteHalf]:
        fresh = [
            RemoteHalf(self._start([_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(count - len(self._idle))
        ]
        for half in fresh:
            assert half.result() == "ready"
        taken, self._idle = [*self._idle, *fresh][:count], self._idle[count:]
        self._lent += taken
        return taken

    def take_back(self) -> None:
        """Keep the processes that are in order, kill the others."""
        for half in self._lent:
            if (
                half.owed == 0
                and half.process.poll() is None
                and psutil.Process(half.process.pid).status() != "stopped"
            ):
                half.call("close")
                self._idle.append(half)
            else:
                half.process.kill()
                half.process.wait(10)
        self._lent.clear()


@pytest.fixture(scope="session")
def _pool(session_children: Any) -> Pool:
    return Pool(session_children.start)


@pytest.fixture(params=["gloo", "shm", "filesystem"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine_options(engine_name: str, tmp_path: Path) -> dict[str, Any]:
    return {"path": str(tmp_path / "store")} if engine_name == "filesystem" else {}


@pytest.fixture
def capabilities(engine_name: str) -> Capabilities:
    return CheckpointEngineRegistry().engine_class(engine_name).capabilities


@pytest.fixture
def halves(
    _pool: Pool, engine_name: str, engine_options: dict[str, Any], tmp_path: Path, no_shared_memory_left: None
) -> Iterator[Callable[[int], Connection]]:
    """Makes an unconnected sender and `count` receivers."""

    def make(count: int) -> Connection:
        sender, *receivers = _pool.lend(count + 1)
        sender.name = "trainer/0"
        sender.call("make", side="sender", engine=engine_name, options=engine_options, name=sender.name)
        for number, half in enumerate(receivers):
            half.name = f"rollout-{number}/tp0"
            half.call("make", side="receiver", engine=engine_name, options=engine_options, name=half.name)
        mailbox = tmp_path / "mailbox"
        mailbox.mkdir(exist_ok=True)
        return Connection(sender, receivers, mailbox)

    yield make
    _pool.take_back()


@pytest.fixture
def connected(halves: Callable[[int], Connection]) -> Callable[[int], Connection]:
    """Makes a connected sender and `count` receivers."""

    def make(count: int) -> Connection:
        connection = halves(count)
        connection.connect()
        return connection

    return make
