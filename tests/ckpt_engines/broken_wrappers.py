"""What the broken engines are made of: wrappers around engines that are right, mostly around `shm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    VersionFiles,
    WeightReceiver,
    WeightSender,
)
from weightlane.ckpt_engines.filesystem import FilesystemEngine
from weightlane.ckpt_engines.shm import ShmEngine
from weightlane.ckpt_engines.torch_distributed import GlooEngine

FOREVER_S = 3600.0
SHARED_MEMORY_PREFIX = "broken-engine-"


class Half:
    """Hands every call on to the half of a right engine."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def around(self, call: str, *arguments: Any) -> Any:
        """All of them come by here; a deadline is the last argument."""
        return getattr(self.real, call)(*arguments)

    def address(self) -> Address:
        return self.around("address")

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        self.around("connect", topology, mailbox, deadline)

    def close(self) -> None:
        self.around("close")


class Sender(Half, WeightSender):
    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        self.around("send", bucket, receivers, deadline)

    def open_version(self, files: VersionFiles, deadline: Deadline) -> None:
        self.around("open_version", files, deadline)

    def commit_version(self, version: int, documents: Mapping[str, str], deadline: Deadline) -> None:
        self.around("commit_version", version, documents, deadline)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        self.around("reclaim", version, deadline)


class Receiver(Half, WeightReceiver):
    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        self.around("receive", bucket, sender, deadline)

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        return self.around("view", version, index, nbytes, sender, deadline)

    def release(self, version: int, deadline: Deadline) -> None:
        self.around("release", version, deadline)


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


HEALTHY = (Healthy, HealthyGloo, HealthyStore)


def engine_with(half: type[Half]) -> type[Healthy]:
    """The healthy engine with `half` in the place of its sender or its receiver. Decorates that half."""
    side = "sender" if issubclass(half, Sender) else "receiver"
    return type(half.__name__, (Healthy,), {"__doc__": half.__doc__, side: half})


def declared(**changes: Any) -> Capabilities:
    return replace(Healthy.capabilities, **changes)
