"""Links around halves without a transport, which do what a test says, and a sender's end that says what a test says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from sessions import soon

from weightlane.ckpt_engines import (
    API_VERSION,
    Address,
    Bucket,
    Capabilities,
    Channel,
    CheckpointEngine,
    Deadline,
    Delivery,
    EngineConfig,
    ReceiverLink,
    Topology,
    ViewableSender,
    ViewingReceiver,
)
from weightlane.ckpt_engines.channels.joining import accept_receivers, welcome
from weightlane.ckpt_engines.channels.socket_factory import TcpSocketFactory
from weightlane.ckpt_engines.runtime.devices import HOST
from weightlane.ckpt_engines.waits import Lifecycle

KEY, SESSION = b"k" * 32, "session"


class _Half:
    """Half that notices nothing of its peers. Calls named in `waits` wait until `over` is set or the half is closed."""

    def __init__(self, name: str) -> None:
        self.life = Lifecycle(f"still half of {name}", lambda: None)
        self.posted: list[Bucket] = []
        self.waits: set[str] = {"flush", "reclaim", "view"}
        """Names of the calls that wait."""
        self.over = threading.Event()
        self.entered = threading.Event()
        self.fails: Exception | None = None
        """Error that `wait` raises instead of waiting, if any."""

    def wait(self, call: str, deadline: Deadline) -> None:
        with self.life.call():
            self.entered.set()
            if self.fails is not None:
                raise self.fails
            while call in self.waits and not self.over.is_set():
                self.life.wait({}, min(0.01, deadline.remaining_s))
                deadline.check(call, part=self.life.part)

    def address(self) -> Address:
        with self.life.call():
            return {}

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        self.channels = dict(channels)
        self.wait("connect", deadline)

    def post(self, bucket: Bucket, peers: Any) -> None:
        with self.life.call():
            self.posted.append(bucket)

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        self.wait("flush", deadline)

    def close(self) -> None:
        self.life.close()


class StillSender(_Half, ViewableSender):
    def reclaim(self, version: int, deadline: Deadline) -> None:
        self.wait("reclaim", deadline)


class StillReceiver(_Half, ViewingReceiver):
    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        self.wait("view", deadline)
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, version: int, deadline: Deadline) -> None:
        pass


class StillEngine(CheckpointEngine):
    """Engine that moves nothing."""

    api_version = API_VERSION
    capabilities = Capabilities(
        frozenset({"cpu"}), frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}), views=True, channels=False
    )

    def make_sender(self, name: str, device: torch.device) -> StillSender:
        return StillSender(name)

    def make_receiver(self, name: str, device: torch.device) -> StillReceiver:
        return StillReceiver(name)


def still_engine() -> StillEngine:
    return StillEngine(EngineConfig())


@contextlib.contextmanager
def told_by(say: Callable[[Channel], None]) -> Iterator[ReceiverLink]:
    """The link of receiver ``r``, connected to somebody who knows the session's key and then does `say` with its connection."""
    with contextlib.ExitStack() as opened:
        threads = opened.enter_context(ThreadPoolExecutor(1))
        life = Lifecycle("sender s", lambda: None)
        opened.callback(life.close)  # ends what the thread waits for
        listener = TcpSocketFactory("127.0.0.1").listen("sender s")
        opened.callback(listener.close)
        link = ReceiverLink.of(still_engine(), "r", HOST)
        opened.callback(link.close)

        def serve() -> Channel:
            (control,) = accept_receivers(listener, life, SESSION, ["r"], soon(), lanes=("control",), key=KEY)
            opened.callback(control["r"].close)
            welcome(control.values(), soon())
            return control["r"]

        serving = threads.submit(serve)
        addresses = {"s": {"sockets": dict(listener.address), "engine": {}}}, {"r": link.address()}
        link.connect(Topology(SESSION, *addresses, KEY), soon())
        say(serving.result())
        yield link
