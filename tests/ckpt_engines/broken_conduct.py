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

import torch
from broken_wrappers import (
    FOREVER_S,
    SHARED_MEMORY_PREFIX,
    Healthy,
    HealthyGloo,
    Receiver,
    Sender,
)

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    ClosedError,
    Deadline,
    DeadlineExceededError,
    Mailbox,
    PeerLostError,
    ProtocolError,
    Topology,
    WeightReceiver,
    WeightSender,
)

# --- time ------------------------------------------------------------------------------------------------------------


class ConnectOfSenderIgnoresDeadline(Healthy):
    class sender(Sender):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            super().connect(topology, mailbox, Deadline.after(FOREVER_S))


class ConnectOfReceiverIgnoresDeadline(Healthy):
    class receiver(Receiver):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            super().connect(topology, mailbox, Deadline.after(FOREVER_S))


class SendIgnoresDeadline(Healthy):
    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            super().send(bucket, receivers, Deadline.after(FOREVER_S))


class ReceiveIgnoresDeadline(Healthy):
    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            super().receive(bucket, sender, Deadline.after(FOREVER_S))


class ReceiveOverGlooIgnoresDeadline(HealthyGloo):
    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            super().receive(bucket, sender, Deadline.after(FOREVER_S))


class AddsATimeoutOfItsOwn(Healthy):
    """Gives up long before the deadline."""

    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            super().receive(bucket, sender, Deadline.after(0.1))


class BlamesNobody(Healthy):
    """The error does not say who was waited for."""

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            try:
                super().send(bucket, receivers, deadline)
            except DeadlineExceededError:
                raise DeadlineExceededError("too late.", part="sender") from None


class LetsAnybodyIn(Healthy):
    """Does not look at the session."""

    class sender(Sender):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            super().connect(replace(topology, session="any", key=b"any"), mailbox, deadline)

    class receiver(Receiver):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            super().connect(replace(topology, session="any", key=b"any"), mailbox, deadline)


class CloseWaitsForCalls(Healthy):
    """A lock around every call, which `close` takes too."""

    class sender(Sender):  # noqa: N801
        def __init__(self, real: WeightSender) -> None:
            super().__init__(real)
            self.lock = threading.Lock()

        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            with self.lock:
                super().connect(topology, mailbox, deadline)

        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            with self.lock:
                super().send(bucket, receivers, deadline)

        def reclaim(self, version: int, deadline: Deadline) -> None:
            with self.lock:
                super().reclaim(version, deadline)

        def close(self) -> None:
            with self.lock:
                super().close()

    class receiver(Receiver):  # noqa: N801
        def __init__(self, real: WeightReceiver) -> None:
            super().__init__(real)
            self.lock = threading.Lock()

        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            with self.lock:
                super().receive(bucket, sender, deadline)

        def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
            with self.lock:
                return super().view(version, index, nbytes, sender, deadline)

        def close(self) -> None:
            with self.lock:
                super().close()


class SaysLostWhenClosed(Healthy):
    """A close is taken for the death of a peer."""

    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            try:
                super().receive(bucket, sender, deadline)
            except ClosedError:
                raise PeerLostError("gone.", part="receiver", peer=sender) from None


class ReopensWhenClosed(Healthy):
    """A closed half connects again."""

    class sender(Sender):  # noqa: N801
        closed = False

        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            if not self.closed:
                super().connect(topology, mailbox, deadline)

        def close(self) -> None:
            self.closed = True
            super().close()


# --- deaths ----------------------------------------------------------------------------------------------------------


class IgnoresDeadReceivers(Healthy):
    """The others are served, and nobody learns of the loss."""

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            with contextlib.suppress(PeerLostError):
                super().send(bucket, receivers, deadline)


class HangsInSendWhenAReceiverDies(Healthy):
    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            try:
                super().send(bucket, receivers, deadline)
            except PeerLostError:
                time.sleep(FOREVER_S)


class HangsInReceiveWhenTheSenderDies(Healthy):
    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            try:
                super().receive(bucket, sender, deadline)
            except PeerLostError:
                time.sleep(FOREVER_S)


class HangsInConnectWhenAReceiverDies(Healthy):
    class sender(Sender):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            try:
                super().connect(topology, mailbox, deadline)
            except PeerLostError:
                time.sleep(FOREVER_S)


class HangsInConnectWhenTheSenderDies(Healthy):
    class receiver(Receiver):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            try:
                super().connect(topology, mailbox, deadline)
            except PeerLostError:
                time.sleep(FOREVER_S)


class TakesHalfABucketForAWhole(Healthy):
    """A sender that dies is taken for the end of the data."""

    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            with contextlib.suppress(PeerLostError):
                super().receive(bucket, sender, deadline)
                bucket.data[bucket.nbytes // 2 :] = 0


class NoticesDeathsAtTheDeadline(Healthy):
    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            try:
                super().send(bucket, receivers, deadline)
            except PeerLostError:
                time.sleep(max(0.0, deadline.remaining_s - 0.5))
                raise


class RaisesWhatItLikes(Healthy):
    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            try:
                super().receive(bucket, sender, deadline)
            except PeerLostError as error:
                raise RuntimeError("NCCL error 6") from error


class ExitsTheProcess(Healthy):
    """As a library does whose network error handler calls ``exit``."""

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            try:
                super().send(bucket, receivers, deadline)
            except PeerLostError:
                os._exit(1)


class CloseWaitsForThePeer(Healthy):
    """A farewell that a dead peer never answers."""

    class sender(Sender):  # noqa: N801
        dead = False

        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            super().send(bucket, receivers, deadline)
            self.dead = True

        def close(self) -> None:
            super().close()
            if self.dead:
                time.sleep(FOREVER_S)


# --- leftovers -------------------------------------------------------------------------------------------------------


class LeaksADescriptor(Healthy):
    class sender(Sender):  # noqa: N801
        def close(self) -> None:
            os.dup(0)
            super().close()


class LeaksAThread(Healthy):
    class receiver(Receiver):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            super().connect(topology, mailbox, deadline)
            threading.Thread(target=time.sleep, args=(FOREVER_S,), daemon=True).start()


_ports: list[socket.socket] = []


class LeaksAPort(Healthy):
    class sender(Sender):  # noqa: N801
        def address(self) -> Address:
            _ports.append(socket.create_server(("127.0.0.1", 0)))
            return super().address()


class LeaksTemporaryFiles(Healthy):
    class sender(Sender):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            super().connect(topology, mailbox, deadline)
            os.close(tempfile.mkstemp()[0])


class LeaksSharedMemory(Healthy):
    """Names with `SHARED_MEMORY_PREFIX`, which its test removes."""

    class sender(Sender):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            super().connect(topology, mailbox, deadline)
            Path(f"/dev/shm/{SHARED_MEMORY_PREFIX}{secrets.token_hex(8)}").touch()


class LeaksAProcess(Healthy):
    class receiver(Receiver):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            super().connect(topology, mailbox, deadline)
            subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with the process that leaked it


class OpensAPortWhenMade(Healthy):
    class sender(Sender):  # noqa: N801
        def __init__(self, real: WeightSender) -> None:
            super().__init__(real)
            self.listener = socket.create_server(("127.0.0.1", 0))

        def close(self) -> None:
            super().close()
            self.listener.close()


class KeepsItsPortUnlessConnected(Healthy):
    class sender(Sender):  # noqa: N801
        connected = False

        def address(self) -> Address:
            if not self.connected:
                _ports.append(socket.create_server(("127.0.0.1", 0)))
            return super().address()


class RaisesOnTheSecondClose(Healthy):
    class receiver(Receiver):  # noqa: N801
        closed = False

        def close(self) -> None:
            super().close()
            if self.closed:
                raise ProtocolError("closed already.", part="receiver")
            self.closed = True
