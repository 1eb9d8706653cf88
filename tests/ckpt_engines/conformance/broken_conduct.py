"""Engines that are wrong in one way each: about deadlines and closing, when a peer dies, and in what they leave behind."""

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
from collections.abc import Mapping
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

# --- time ------------------------------------------------------------------------------------------------------------


def ignores_the_deadline(half: Half, call: Call, *arguments: Any) -> Any:
    forever = Deadline.after(FOREVER_S)
    return call(*(forever if isinstance(argument, Deadline) else argument for argument in arguments))


ConnectOfReceiverIgnoresDeadline = broken("receiver.connect", HealthyStore)(ignores_the_deadline)
FlushOfSenderIgnoresDeadline = broken("sender.flush")(ignores_the_deadline)
FlushOverGlooIgnoresDeadline = broken("receiver.flush", HealthyGloo)(ignores_the_deadline)
ReclaimIgnoresDeadline = broken("sender.reclaim")(ignores_the_deadline)


@broken("sender.connect", HealthyStore)
def WaitsForItsReaders(half: Half, connect: Call, *arguments: Any) -> None:
    """The sender of a store waits for its readers, although a store is usable without them."""
    time.sleep(FOREVER_S)


@broken("receiver.flush", HealthyStore)
def AddsATimeoutOfItsOwn(half: Half, flush: Call, deadline: Deadline, pending: int = 0) -> None:
    """Gives up long before the deadline."""
    flush(Deadline.after(0.1), pending)


@broken("sender.flush")
def BlamesNobody(half: Half, flush: Call, *arguments: Any) -> None:
    """The error does not say who was waited for."""
    try:
        flush(*arguments)
    except DeadlineExceededError:
        raise DeadlineExceededError("too late.", part="sender") from None


class OfAnySession(Half):
    def connect(self, topology: Topology, *rest: Any) -> None:
        super().connect(replace(topology, session="any"), *rest)  # type: ignore[misc]


class LetsAnybodyIn(HealthyStore):
    """Does not look at the session."""

    sender = type("AnySender", (OfAnySession, Sender), {})
    receiver = type("AnyReceiver", (OfAnySession, Receiver), {})


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
HangsInConnectWhenTheSenderIsDead = broken("receiver.connect", HealthyStore)(hangs_when_a_peer_is_lost)
LinkHangsInConnectWhenAReceiverDies = broken_link("sender.connect")(hangs_when_a_peer_is_lost)
LinkHangsInConnectWhenTheSenderDies = broken_link("receiver.connect")(hangs_when_a_peer_is_lost)


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


@broken("sender.flush")
def ExitsTheProcess(half: Half, flush: Call, *arguments: Any) -> None:
    """The process exits when a peer is lost, like a library whose network error handler calls ``exit``."""
    try:
        flush(*arguments)
    except PeerLostError:
        os._exit(1)


@engine_with
class ExitsWhileIdle(Sender):
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

_ports: list[socket.socket] = []


@broken("sender.connect")
def LeaksWhatAProcessHolds(half: Half, connect: Call, *arguments: Any) -> None:
    """A descriptor, a port, a thread and a process with each connection."""
    connect(*arguments)
    os.dup(0)
    _ports.append(socket.create_server(("127.0.0.1", 0)))
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
class OpensAPortWhenMade(Sender):
    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.listener = socket.create_server(("127.0.0.1", 0))

    def close(self) -> None:
        super().close()
        self.listener.close()


@broken("sender.address")
def KeepsItsPortUnlessConnected(half: Half, address: Call) -> Address:
    _ports.append(socket.create_server(("127.0.0.1", 0)))
    return address()


@broken("receiver.close")
def RaisesOnTheSecondClose(half: Half, close: Call) -> None:
    close()
    if half.kept.setdefault("closed", 0):
        raise ProtocolError("closed already.", part="receiver")
    half.kept["closed"] = 1
