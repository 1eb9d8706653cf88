"""A sender and receivers of one session in this process, each called in a thread; and strangers at their sockets."""

from __future__ import annotations

import gc
import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import Bucket, CheckpointEngine, Deadline, Topology
from weightlane.ckpt_engines.channels.channel import Keys, tag
from weightlane.ckpt_engines.links import ReceiverLink, SenderLink
from weightlane.ckpt_engines.runtime.devices import HOST


def soon() -> Deadline:
    """Deadline of a call that is expected to succeed."""
    return Deadline.after(HANG_S)


def never() -> Deadline:
    """Deadline of a call that an event is to end."""
    return Deadline.after(NEVER_S)


KEYS = Keys(b"k" * 32, b"k" * 32)
"""Keys of a connection whose other end a test is."""


def frame(body: bytes) -> bytes:
    """A message of a handshake."""
    return struct.pack("<I", len(body)) + body


def signed(body: bytes, number: int = 0) -> bytes:
    """Message `number` on a connection with `KEYS`."""
    head = struct.pack("<BIH", 0, 0, 0)
    return frame(tag(KEYS.sending, number, head, hashlib.sha256(body).digest()) + head + body)


def send(link: SenderLink, bucket: Bucket, to: Sequence[str], deadline: Deadline | None = None) -> None:
    """Send one bucket, and wait until it has gone."""
    deadline = deadline or soon()
    link.post(bucket, to, deadline)
    link.flush(deadline)


def receive(link: ReceiverLink, bucket: Bucket, sender: str = "s", deadline: Deadline | None = None) -> None:
    """Receive one bucket, and wait until it has come."""
    deadline = deadline or soon()
    link.post(bucket, sender, deadline)
    link.flush(deadline)


class Session:
    """The links of one sender ``s`` and its receivers, connected unless told otherwise."""

    def __init__(
        self,
        engine: CheckpointEngine,
        *names: str,
        of_receivers: CheckpointEngine | None = None,
        connect: bool = True,
        key: bytes = b"key",
    ) -> None:
        self.engine = engine
        self.sender = SenderLink.of(engine, "s", HOST)
        self.receivers = {name: ReceiverLink.of(of_receivers or engine, name, HOST) for name in names}
        self.threads = ThreadPoolExecutor(2 + len(names))
        addresses = {name: receiver.address() for name, receiver in self.receivers.items()}
        self.topology = Topology("session", {"s": self.sender.address()}, addresses, key)
        if connect:
            for future in self.start_connect():
                future.result()

    @property
    def receiver(self) -> ReceiverLink:
        """The link of the first receiver."""
        return next(iter(self.receivers.values()))

    @property
    def halves(self) -> list[Any]:
        """Halves that the engine made: the sender's, then the receivers'."""
        return [link.half for link in (self.sender, *self.receivers.values())]

    def start_connect(self, deadline: Deadline | None = None) -> list[Future[None]]:
        links = (self.sender, *self.receivers.values())
        return [self.threads.submit(link.connect, self.topology, deadline or soon()) for link in links]

    def send(self, bucket: Bucket, to: Sequence[str] | None = None, deadline: Deadline | None = None) -> Future[None]:
        names = list(self.receivers) if to is None else to
        return self.threads.submit(send, self.sender, bucket, names, deadline or soon())

    def deliver(self, version: int, data: torch.Tensor) -> torch.Tensor:
        """Send one bucket to the only receiver, and return what it received."""
        sending = self.send(Bucket(version, 0, data))
        received = torch.full_like(data, 0x55)
        receive(self.receiver, Bucket(version, 0, received))
        sending.result()
        return received

    def view(self, name: str, version: int, nbytes: int, index: int = 0) -> Future[torch.Tensor]:
        receiver = self.receivers[name]
        return self.threads.submit(lambda: receiver.view(version, index, nbytes, "s", soon())[0])

    def show(self, version: int, data: torch.Tensor) -> list[torch.Tensor]:
        """Send one lasting bucket, which all view."""
        viewing = [self.view(name, version, data.numel()) for name in self.receivers]
        self.send(Bucket(version, 0, data, lasting=True)).result()
        return [future.result() for future in viewing]

    def release(self, version: int) -> None:
        """All release a version, and the sender reclaims it."""
        for receiver in self.receivers.values():
            receiver.release(version, soon())
        self.sender.reclaim(version, soon())

    def close(self) -> None:
        for link in (self.sender, *self.receivers.values()):
            link.close()
        self.threads.shutdown()


def descriptors() -> int:
    """How many open file descriptors this process has."""
    for _ in range(2):  # memory that a tensor kept alive is found only once the tensor is gone
        gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_until_closed(before: int) -> None:
    """Wait until no more file descriptors are open than `before`: links that were closed have threads that end a little later."""
    wait_until(lambda: descriptors() <= before, "end of what was opened")
