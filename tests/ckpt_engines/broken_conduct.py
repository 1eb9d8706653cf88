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
from collections.abc import Sequence
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
    WeightSender,
)

# --- time ------------------------------------------------------------------------------------------------------------


def ignoring_the_deadline(side: type[Half], of: str) -> type[Half]:
    """A half whose calls of that name know no deadline."""

    class Patient(side):  # type: ignore[misc, valid-type]
        def around(self, call: str, *arguments: Any) -> Any:
            if call == of:
                arguments = (*arguments[:-1], Deadline.after(FOREVER_S))
            return super().around(call, *arguments)

    return Patient


class ConnectOfSenderIgnoresDeadline(Healthy):
    sender = ignoring_the_deadline(Sender, "connect")


class ConnectOfReceiverIgnoresDeadline(Healthy):
    receiver = ignoring_the_deadline(Receiver, "connect")


class SendIgnoresDeadline(Healthy):
    sender = ignoring_the_deadline(Sender, "send")


class ReceiveOverGlooIgnoresDeadline(HealthyGloo):
    receiver = ignoring_the_deadline(Receiver, "receive")


class ReclaimIgnoresDeadline(Healthy):
    sender = ignoring_the_deadline(Sender, "reclaim")


@engine_with
class AddsATimeoutOfItsOwn(Receiver):
    """Gives up long before the deadline."""

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        super().receive(bucket, sender, Deadline.after(0.1))


@engine_with
class BlamesNobody(Sender):
    """The error does not say who was waited for."""

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        try:
            super().send(bucket, receivers, deadline)
        except DeadlineExceededError:
            raise DeadlineExceededError("too late.", part="sender") from None


class OfAnySession(Half):
    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        super().connect(replace(topology, session="any", key=b"any"), mailbox, deadline)


class LetsAnybodyIn(Healthy):
    """Does not look at the session."""

    class sender(OfAnySession, Sender):  # noqa: N801
        pass

    class receiver(OfAnySession, Receiver):  # noqa: N801
        pass


class OneCallAtATime(Half):
    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.lock = threading.Lock()

    def around(self, call: str, *arguments: Any) -> Any:
        with self.lock:
            return super().around(call, *arguments)


class CloseWaitsForCalls(Healthy):
    """A lock around every call, which `close` takes too."""

    class sender(OneCallAtATime, Sender):  # noqa: N801
        pass

    class receiver(OneCallAtATime, Receiver):  # noqa: N801
        pass


@engine_with
class ReopensWhenClosed(Sender):
    """A closed half connects again."""

    closed = False

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        if not self.closed:
            super().connect(topology, mailbox, deadline)

    def close(self) -> None:
        self.closed = True
        super().close()


# --- deaths ----------------------------------------------------------------------------------------------------------


def hanging_when_a_peer_is_lost(side: type[Half], of: str) -> type[Half]:
    """A half whose calls of that name do not come back when a peer dies."""

    class Hanging(side):  # type: ignore[misc, valid-type]
        def around(self, call: str, *arguments: Any) -> Any:
            try:
                return super().around(call, *arguments)
            except PeerLostError:
                if call != of:
                    raise
                time.sleep(FOREVER_S)

    return Hanging


class HangsInReceiveWhenTheSenderDies(Healthy):
    receiver = hanging_when_a_peer_is_lost(Receiver, "receive")


class HangsInConnectWhenAReceiverDies(Healthy):
    sender = hanging_when_a_peer_is_lost(Sender, "connect")


class HangsInConnectWhenTheSenderDies(Healthy):
    receiver = hanging_when_a_peer_is_lost(Receiver, "connect")


@engine_with
class IgnoresDeadReceivers(Sender):
    """The others are served, and nobody learns of the loss."""

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        with contextlib.suppress(PeerLostError):
            super().send(bucket, receivers, deadline)


@engine_with
class TakesHalfABucketForAWhole(Receiver):
    """A sender that dies is taken for the end of the data."""

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        with contextlib.suppress(PeerLostError):
            super().receive(bucket, sender, deadline)
            bucket.data[bucket.nbytes // 2 :] = 0


@engine_with
class NoticesDeathsAtTheDeadline(Sender):
    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        try:
            super().send(bucket, receivers, deadline)
        except PeerLostError:
            time.sleep(max(0.0, deadline.remaining_s - 0.5))
            raise


@engine_with
class RaisesWhatItLikes(Receiver):
    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        try:
            super().receive(bucket, sender, deadline)
        except PeerLostError as error:
            raise RuntimeError("NCCL error 6") from error


@engine_with
class ExitsTheProcess(Sender):
    """As a library does whose network error handler calls ``exit``."""

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        try:
            super().send(bucket, receivers, deadline)
        except PeerLostError:
            os._exit(1)


@engine_with
class CloseWaitsForThePeer(Sender):
    """A farewell that a dead peer never answers."""

    sent = False

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        super().send(bucket, receivers, deadline)
        self.sent = True

    def close(self) -> None:
        super().close()
        if self.sent:
            time.sleep(FOREVER_S)


# --- leftovers -------------------------------------------------------------------------------------------------------

_ports: list[socket.socket] = []


@engine_with
class LeaksWhatAProcessHolds(Sender):
    """A descriptor, a port, a thread and a process with each connection."""

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        super().connect(topology, mailbox, deadline)
        os.dup(0)
        _ports.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=time.sleep, args=(FOREVER_S,), daemon=True).start()
        subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with the process that leaked it


@engine_with
class LeaksTemporaryFiles(Sender):
    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        super().connect(topology, mailbox, deadline)
        os.close(tempfile.mkstemp()[0])


@engine_with
class LeaksSharedMemory(Sender):
    """Names with `SHARED_MEMORY_PREFIX`, which its test removes."""

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        super().connect(topology, mailbox, deadline)
        Path(f"/dev/shm/{SHARED_MEMORY_PREFIX}{secrets.token_hex(8)}").touch()


@engine_with
class OpensAPortWhenMade(Sender):
    def __init__(self, real: WeightSender) -> None:
        super().__init__(real)
        self.listener = socket.create_server(("127.0.0.1", 0))

    def close(self) -> None:
        super().close()
        self.listener.close()


@engine_with
class KeepsItsPortUnlessConnected(Sender):
    def address(self) -> Address:
        _ports.append(socket.create_server(("127.0.0.1", 0)))
        return super().address()


@engine_with
class RaisesOnTheSecondClose(Receiver):
    closed = False

    def close(self) -> None:
        super().close()
        if self.closed:
            raise ProtocolError("closed already.", part="receiver")
        self.closed = True
