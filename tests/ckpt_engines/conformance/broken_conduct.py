"""Engines that are wrong in one way each: about deadlines, closing, deaths, strangers, and in what they leave behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from broken_wrappers import (
    FOREVER_S,
    SHARED_MEMORY_PREFIX,
    Call,
    Half,
    Healthy,
    HealthyGloo,
    HealthyStore,
    Receiver,
    Sender,
    broken,
    broken_link,
    declaring,
    engine_with,
)

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    Channel,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    Topology,
)
from weightlane.ckpt_engines.engines.torch_distributed.gloo import GlooEngine
from weightlane.ckpt_engines.links import ReceiverLink, SenderLink

# --- time ------------------------------------------------------------------------------------------------------------


class IgnoresDeadlines(Half):
    """Hands every deadline on as one that never passes."""

    def around(self, call: str, *arguments: Any) -> Any:
        forever = Deadline.after(FOREVER_S)
        return super().around(call, *(forever if isinstance(each, Deadline) else each for each in arguments))


def ignoring_deadlines(half: type[Half], of: type) -> type:
    return engine_with(type("Ignoring", (IgnoresDeadlines, half), {}), of)


SenderIgnoresDeadlines = ignoring_deadlines(Sender, Healthy)
ReceiverOfAStoreIgnoresDeadlines = ignoring_deadlines(Receiver, HealthyStore)
GlooIgnoresDeadlines = ignoring_deadlines(Receiver, HealthyGloo)


@broken("sender.connect", HealthyStore)
def WaitsForItsReaders(half: Half, connect: Call, *arguments: Any) -> None:
    """The sender of a store waits for its readers, although a store is usable without them."""
    time.sleep(FOREVER_S)


@broken("receiver.flush", HealthyStore)
def AddsATimeoutOfItsOwn(half: Half, flush: Call, deadline: Deadline, pending: int = 0) -> None:
    """Gives up long before the deadline."""
    flush(Deadline.after(0.1), pending)


@engine_with
class IsBoundToTheThreadThatConnects(Sender):
    """Finds its connections in a thread-local variable."""

    own = threading.local()

    def around(self, call: str, *arguments: Any) -> Any:
        if call in {"connect", "post"}:
            assert vars(self.own).setdefault("first call", call) == "connect", "connections of another thread"
        return super().around(call, *arguments)


class OneCallAtATime(Half):
    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.lock = threading.Lock()

    def around(self, call: str, *arguments: Any) -> Any:
        with self.lock:
            return super().around(call, *arguments)


LockedSender = type("LockedSender", (OneCallAtATime, Sender), {})
LockedReceiver = type("LockedReceiver", (OneCallAtATime, Receiver), {})


class CloseWaitsForCalls(Healthy):
    """A lock around every call, which `close` takes too."""

    sender, receiver = LockedSender, LockedReceiver


class CloseOfAStoreWaitsForCalls(HealthyStore):
    """A lock around every call of a store's half, which `close` takes too.

    A store's half waits by itself for what other halves learn through the framework's control connection.
    """

    sender, receiver = LockedSender, LockedReceiver


# --- deaths ----------------------------------------------------------------------------------------------------------


def hangs_when_a_peer_is_lost(half: Any, call: Call, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except (PeerLostError, DeadlineExceededError):
        time.sleep(FOREVER_S)


HangsInFlushWhenTheSenderDies = broken("receiver.flush", HealthyStore)(hangs_when_a_peer_is_lost)
HangsInConnectWhenAPeerDies = broken_link("sender.connect", "receiver.connect")(hangs_when_a_peer_is_lost)


@engine_with
class TakesHalfABucketForAWhole(Receiver):
    """A sender that dies is taken for the end of the data."""

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        with contextlib.suppress(PeerLostError):
            super().flush(deadline, pending)

    def arrived(self, bucket: Bucket) -> None:
        bucket.data[bucket.nbytes // 2 :] = 0


@broken("sender.flush")
def NoticesDeathsAtTheDeadline(half: Half, flush: Call, deadline: Deadline, pending: int = 0) -> None:
    try:
        flush(deadline, pending)
    except PeerLostError:
        time.sleep(0.9 * deadline.remaining_s)
        raise


@engine_with
class ExitsWithAPeer(Sender):
    """A thread of the sender exits the process when a peer is gone, like a library that watches its peers in a thread."""

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        super().connect(topology, channels, deadline)
        poller = select.poll()
        for channel in channels.values():
            poller.register(os.dup(channel.fileno()), select.POLLRDHUP)
        threading.Thread(target=lambda: poller.poll() and os._exit(1), daemon=True).start()


@engine_with
class CloseWaitsForThePeer(Sender):
    """A farewell that a dead peer never answers."""

    sent = False

    def post(self, *arguments: Any) -> None:
        super().post(*arguments)
        self.sent = True

    def close(self) -> None:
        super().close()
        if self.sent:
            time.sleep(FOREVER_S)


# --- leftovers -------------------------------------------------------------------------------------------------------

_left: list[socket.socket] = []


@broken("sender.connect")
def LeaksWhatAProcessHolds(half: Half, connect: Call, *arguments: Any) -> None:
    """A descriptor, a port, a thread and a process with each connection."""
    connect(*arguments)
    os.dup(0)
    _left.append(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=time.sleep, args=(FOREVER_S,), daemon=True).start()
    subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with the process that leaked it


@broken("sender.connect")
def LeaksTemporaryFiles(half: Half, connect: Call, *arguments: Any) -> None:
    connect(*arguments)
    os.close(tempfile.mkstemp()[0])


@broken("sender.connect")
def LeaksSharedMemory(half: Half, connect: Call, *arguments: Any) -> None:
    """Names with `SHARED_MEMORY_PREFIX`, which its test removes."""
    connect(*arguments)
    Path(f"/dev/shm/{SHARED_MEMORY_PREFIX}{secrets.token_hex(8)}").touch()


@engine_with
class KeepsAPortFromTheStart(Sender):
    def __init__(self, real: Any) -> None:
        super().__init__(real)
        _left.append(socket.create_server(("127.0.0.1", 0)))


@broken("receiver.close")
def RaisesOnTheSecondClose(half: Half, close: Call) -> None:
    close()
    if half.kept.setdefault("closed", 0):
        raise ProtocolError("closed already.", part="receiver")
    half.kept["closed"] = 1


# --- strangers -------------------------------------------------------------------------------------------------------


def connecting_with(changed: Callable[[Topology], Topology]) -> dict[type, type]:
    """Links whose session is another than the one they were told of."""

    def connect(self: Any, topology: Topology, deadline: Deadline) -> None:
        super(type(self), self).connect(changed(topology), deadline)

    calls = {"connect": connect}
    return {link: type(f"Other{link.__name__}", (link,), calls) for link in (SenderLink, ReceiverLink)}


class LetsAnybodyIn(Healthy):
    """Looks at names only, neither at the session nor at its key."""

    link_types = connecting_with(lambda topology: replace(topology, session="any", key=b"any"))


class SendsTheKey(HealthyGloo):
    """A password: who hears it once knows it."""

    link_types = connecting_with(
        lambda topology: replace(topology, session=f"{topology.session}-{topology.key.hex()}", key=b"")
    )


_open_to_all: list[socket.socket] = []


@broken("sender.address", HealthyGloo)
def ListensEverywhere(half: Half, address: Call) -> Address:
    _open_to_all.append(socket.create_server(("", 0)))
    return address()


class ServesWhoComesFirst(HealthyGloo):
    """Waits for what the first guest at a port of its own has to say, and takes it for a receiver's greeting."""

    class sender(Sender):  # noqa: N801
        def address(self) -> Address:
            if "greeter" not in self.kept:
                self.kept["greeter"] = socket.create_server(("127.0.0.1", 0))
            return super().address()

        def connect(self, topology: Topology, channels: Any, deadline: Deadline) -> None:
            super().connect(topology, channels, deadline)
            self.kept["greeter"].setblocking(False)
            with contextlib.suppress(BlockingIOError), self.kept["greeter"].accept()[0] as guest:
                guest.settimeout(deadline.remaining_s)
                try:
                    raise ProtocolError(f"{guest.recv(5)!r} is no greeting.", part="sender")
                except TimeoutError:
                    raise DeadlineExceededError("nobody has greeted it.", part="sender") from None

        def close(self) -> None:
            super().close()
            if "greeter" in self.kept:
                self.kept["greeter"].close()


# --- declarations ----------------------------------------------------------------------------------------------------


class ClaimsViewsOnOneHost(declaring(HealthyGloo, views=True, same_host_only=True)):  # type: ignore[misc]
    """Its halves are those of an engine that shows nothing, and it takes addresses of other hosts."""

    make_sender = GlooEngine.make_sender
    make_receiver = GlooEngine.make_receiver
