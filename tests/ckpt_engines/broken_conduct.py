"""Engines that are wrong in one way each: about deadlines and closing, when a peer dies, and in what they leave behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from broken_wrappers import (
    FOREVER_S,
    SHARED_MEMORY_PREFIX,
    Half,
    Healthy,
    HealthyGloo,
    Receiver,
    Sender,
    broken,
    engine_with,
)

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    Deadline,
    DeadlineExceededError,
    Mailbox,
    PeerLostError,
    ProtocolError,
    Topology,
)

Call = Callable[..., Any]

# --- time ------------------------------------------------------------------------------------------------------------


def ignores_the_deadline(half: Half, call: Call, *arguments: Any) -> Any:
    return call(*arguments[:-1], Deadline.after(FOREVER_S))


ConnectOfSenderIgnoresDeadline = broken("sender.connect")(ignores_the_deadline)
ConnectOfReceiverIgnoresDeadline = broken("receiver.connect")(ignores_the_deadline)
SendIgnoresDeadline = broken("sender.send")(ignores_the_deadline)
ReceiveOverGlooIgnoresDeadline = broken("receiver.receive", HealthyGloo)(ignores_the_deadline)
ReclaimIgnoresDeadline = broken("sender.reclaim")(ignores_the_deadline)


@broken("receiver.receive")
def AddsATimeoutOfItsOwn(half: Half, receive: Call, bucket: Bucket, sender: str, deadline: Deadline) -> None:
    """Gives up long before the deadline."""
    receive(bucket, sender, Deadline.after(0.1))


@broken("sender.send")
def BlamesNobody(half: Half, send: Call, *arguments: Any) -> None:
    """The error does not say who was waited for."""
    try:
        send(*arguments)
    except DeadlineExceededError:
        raise DeadlineExceededError("too late.", part="sender") from None


class OfAnySession(Half):
    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        super().connect(replace(topology, session="any", key=b"any"), mailbox, deadline)  # type: ignore[misc]


class LetsAnybodyIn(Healthy):
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


class CloseWaitsForCalls(Healthy):
    """A lock around every call, which `close` takes too."""

    sender = type("LockedSender", (OneCallAtATime, Sender), {})
    receiver = type("LockedReceiver", (OneCallAtATime, Receiver), {})


@engine_with
class ReopensWhenClosed(Sender):
    """A closed half connects again."""

    closed = False

    def connect(self, *arguments: Any) -> None:
        if not self.closed:
            super().connect(*arguments)

    def close(self) -> None:
        self.closed = True
        super().close()


# --- deaths ----------------------------------------------------------------------------------------------------------


def hangs_when_a_peer_is_lost(half: Half, call: Call, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except PeerLostError:
        time.sleep(FOREVER_S)


HangsInReceiveWhenTheSenderDies = broken("receiver.receive")(hangs_when_a_peer_is_lost)
HangsInConnectWhenAReceiverDies = broken("sender.connect")(hangs_when_a_peer_is_lost)
HangsInConnectWhenTheSenderDies = broken("receiver.connect")(hangs_when_a_peer_is_lost)


@broken("sender.send")
def IgnoresDeadReceivers(half: Half, send: Call, *arguments: Any) -> None:
    """The others are served, and nobody learns of the loss."""
    with contextlib.suppress(PeerLostError):
        send(*arguments)


@broken("receiver.receive")
def TakesHalfABucketForAWhole(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """A sender that dies is taken for the end of the data."""
    with contextlib.suppress(PeerLostError):
        receive(bucket, *rest)
        bucket.data[bucket.nbytes // 2 :] = 0


@broken("sender.send")
def NoticesDeathsAtTheDeadline(half: Half, send: Call, *arguments: Any) -> None:
    try:
        send(*arguments)
    except PeerLostError:
        time.sleep(0.9 * arguments[-1].remaining_s)
        raise


@broken("receiver.receive")
def RaisesWhatItLikes(half: Half, receive: Call, *arguments: Any) -> None:
    try:
        receive(*arguments)
    except PeerLostError as error:
        raise RuntimeError("NCCL error 6") from error


@broken("sender.send")
def ExitsTheProcess(half: Half, send: Call, *arguments: Any) -> None:
    """As a library does whose network error handler calls ``exit``."""
    try:
        send(*arguments)
    except PeerLostError:
        os._exit(1)


@engine_with
class CloseWaitsForThePeer(Sender):
    """A farewell that a dead peer never answers."""

    sent = False

    def send(self, *arguments: Any) -> None:
        super().send(*arguments)
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
