"""What the broken engines are made of: wrappers around engines that are right, mostly around `shm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    Capabilities,
    Deadline,
    Mailbox,
    Topology,
    WeightReceiver,
    WeightSender,
)
from weightlane.ckpt_engines.filesystem import FilesystemEngine
from weightlane.ckpt_engines.shm import ShmEngine
from weightlane.ckpt_engines.torch_distributed import GlooEngine

FOREVER_S = 3600.0
SHARED_MEMORY_PREFIX = "broken-engine-"


class Sender(WeightSender):
    def __init__(self, real: WeightSender) -> None:
        self.real = real

    def address(self) -> Address:
        return self.real.address()

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        self.real.connect(topology, mailbox, deadline)

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        self.real.send(bucket, receivers, deadline)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        self.real.reclaim(version, deadline)

    def close(self) -> None:
        self.real.close()


class Receiver(WeightReceiver):
    def __init__(self, real: WeightReceiver) -> None:
        self.real = real

    def address(self) -> Address:
        return self.real.address()

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        self.real.connect(topology, mailbox, deadline)

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        self.real.receive(bucket, sender, deadline)

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        return self.real.view(version, index, nbytes, sender, deadline)

    def release(self, version: int, deadline: Deadline) -> None:
        self.real.release(version, deadline)

    def close(self) -> None:
        self.real.close()


class Wrapped:
    """Puts `sender` and `receiver` around an engine's halves."""

    sender: ClassVar[type[Sender]] = Sender
    receiver: ClassVar[type[Receiver]] = Receiver

    def make_sender(self, name: str) -> WeightSender:
        return self.sender(super().make_sender(name))  # type: ignore[misc]

    def make_receiver(self, name: str) -> WeightReceiver:
        return self.receiver(super().make_receiver(name))  # type: ignore[misc]


class Healthy(Wrapped, ShmEngine):
    """Passes everything."""


class HealthyGloo(Wrapped, GlooEngine):
    """Passes everything."""


class HealthyStore(Wrapped, FilesystemEngine):
    """Passes everything."""


def declared(**changes: Any) -> Capabilities:
    return replace(Healthy.capabilities, **changes)
