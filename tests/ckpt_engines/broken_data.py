"""Engines that are wrong in one way each: in what they carry, and in what they declare."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from broken_wrappers import (
    Healthy,
    HealthyStore,
    Receiver,
    Sender,
    declared,
    engine_with,
)
from pydantic import ConfigDict, Field

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    Deadline,
    Delivery,
    EngineConfig,
    Mailbox,
    Topology,
    TransportError,
    WeightlaneError,
    WeightReceiver,
    WeightSender,
)
from weightlane.ckpt_engines.shm import ShmConfig

# --- bytes -----------------------------------------------------------------------------------------------------------


@engine_with
class Reorders(Receiver):
    """The bytes of every second bucket come in place of the one before, and the other way round."""

    last: torch.Tensor | None = None

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        super().receive(bucket, sender, deadline)
        if self.last is not None and self.last.numel() == bucket.nbytes:
            current = bucket.data.clone()
            bucket.data.copy_(self.last)
            self.last = current
        else:
            self.last = bucket.data.clone()


@engine_with
class Truncates(Receiver):
    """Works in words: what is left over at the end is not transferred."""

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        before = bucket.data.clone()
        super().receive(bucket, sender, deadline)
        whole = bucket.nbytes // 8 * 8
        bucket.data[whole:] = before[whole:]


@engine_with
class FlipsABit(Receiver):
    """One bit in the middle of buckets of more than a megabyte."""

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        super().receive(bucket, sender, deadline)
        if bucket.nbytes > 1 << 20:
            bucket.data[bucket.nbytes // 2] ^= 4


@engine_with
class KeepsOldVersions(Receiver):
    """A cache by index and size that forgets to look at the version."""

    def __init__(self, real: WeightReceiver) -> None:
        super().__init__(real)
        self.cache: dict[tuple[int, int], torch.Tensor] = {}

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        super().receive(bucket, sender, deadline)
        bucket.data.copy_(self.cache.setdefault((bucket.index, bucket.nbytes), bucket.data.clone()))


@engine_with
class ReturnsTooEarly(Sender):
    """`send` hands the buffer to a thread and returns, as if nobody overwrote it: the thread sends when somebody has."""

    last: threading.Thread | None = None

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        before, content = self.last, bucket.data.clone()

        def work() -> None:
            if before is not None:
                before.join()
            while torch.equal(bucket.data, content):
                time.sleep(0.001)
            with contextlib.suppress(WeightlaneError):
                self.real.send(bucket, receivers, deadline)

        self.last = threading.Thread(target=work, daemon=True)
        self.last.start()


@engine_with
class OverrunsSlowReceivers(Receiver):
    """A ring that is overwritten when nobody empties it for 50 ms."""

    looked = 0.0

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        overrun = bool(self.looked) and time.monotonic() - self.looked > 0.05
        super().receive(bucket, sender, deadline)
        self.looked = time.monotonic()
        if overrun:
            bucket.data.zero_()


@engine_with
class FillsOneSocketBuffer(Receiver):
    """One write, whose return value nobody looks at."""

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        super().receive(bucket, sender, deadline)
        bucket.data[4 << 20 :] = 0x55


@engine_with
class WaitsForEmptyBuckets(Sender):
    """Nothing is sent for an empty bucket, but it is waited for."""

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        if bucket.nbytes:
            super().send(bucket, receivers, deadline)


@engine_with
class ServesFourReceivers(Sender):
    """The fifth one is forgotten."""

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        super().send(bucket, receivers[:4], deadline)


@engine_with
class ConfusesSenders(Receiver):
    """A receiver listens to its first sender only."""

    first = ""

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        self.first = next(iter(topology.senders))
        super().connect(topology, mailbox, deadline)

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        super().receive(bucket, self.first, min(deadline, Deadline.after(1.0), key=lambda each: each.at))


@engine_with
class IgnoresTheVersion(Receiver):
    """Takes whatever comes: asks for the bucket that is under way instead of the one wanted."""

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        super().receive(replace(bucket, version=1), sender, deadline)


@engine_with
class SendsToNobody(Sender):
    """An unknown name is dropped without a word."""

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        super().send(bucket, [name for name in receivers if name != "nobody"], deadline)


class OnlyOwnMemory(Healthy):
    """Buckets that do not lie in allocated memory go wrong."""

    own: ClassVar[list[tuple[int, int]]] = []

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        buffer = super().allocate(nbytes, device)
        self.own.append((buffer.data_ptr(), buffer.data_ptr() + nbytes))
        return buffer

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            if not any(start <= bucket.data.data_ptr() < end for start, end in OnlyOwnMemory.own):
                bucket = replace(bucket, data=torch.zeros_like(bucket.data))
            super().send(bucket, receivers, deadline)


@engine_with
class LosesTheLastBucket(Sender):
    """Closing drops what is still in its queue."""

    queue: list[Any]

    def __init__(self, real: WeightSender) -> None:
        super().__init__(real)
        self.queue = []

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        queued, self.queue = self.queue, [(replace(bucket, data=bucket.data.clone()), receivers, deadline)]
        for waiting in queued:
            super().send(*waiting)


# --- declarations ----------------------------------------------------------------------------------------------------


class HidesPointToPoint(Healthy):
    """Reaches some receivers without declaring it."""

    capabilities = declared(delivery=frozenset({Delivery.BROADCAST}))


@engine_with
class ClaimsPointToPoint(Sender):
    """Sends to everybody, whoever is named."""

    everybody: tuple[str, ...] = ()

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        self.everybody = tuple(topology.receivers)
        super().connect(topology, mailbox, deadline)

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        super().send(bucket, self.everybody, deadline)


class ClaimsZeroCopy(Healthy):
    """`allocate` hands out ordinary memory, which `send` copies."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class ClaimsPersistence(Healthy):
    capabilities = declared(persistent=True)


class HidesPersistence(HealthyStore):
    """Leaves everything where it is without declaring it."""

    capabilities = replace(HealthyStore.capabilities, persistent=False)

    class sender(Sender):  # noqa: N801
        def close(self) -> None:
            pass


class ForgetsOffsets(HealthyStore):
    """Every bucket of a file is read from where the file begins."""

    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            first = bucket.part and replace(bucket.part, offset=0)
            super().receive(replace(bucket, part=first), sender, deadline)


class ClaimsElasticity(Healthy):
    capabilities = declared(elastic=True)


@engine_with
class HidesElasticity(Receiver):
    """Lets late receivers in without declaring it."""

    late = False

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        self.late = len(topology.receivers) == 2
        if not self.late:
            super().connect(topology, mailbox, deadline)


class ClaimsToCrossHosts(Healthy):
    capabilities = declared(same_host_only=False)


@engine_with
class ClaimsADevice(Sender):
    """Declares CPU memory, and cannot read it."""

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        raise TransportError("the bucket is not on a CUDA device.", part="sender")


class ClaimsNoDeviceOfTorch(Healthy):
    capabilities = declared(devices=frozenset({"cpu", "gpu"}))


class AllocatesOneBufferTwice(Healthy):
    pool: torch.Tensor | None = None

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.pool is None:
            self.pool = torch.empty(4 << 20, dtype=torch.uint8, device=device)
        return self.pool[:nbytes]


class LooseConfig(ShmConfig):
    model_config = ConfigDict(extra="ignore")


class TakesAnyOption(Healthy):
    config_type = LooseConfig


class SilentConfig(EngineConfig):
    socket_dir: str = "/dev/shm"
    max_shared_mib: int | None = None
    retries: int = Field(3)


class DescribesNoOption(Healthy):
    config_type = SilentConfig


@engine_with
class AddressIsNoPlainData(Sender):
    def address(self) -> Address:
        return {**super().address(), "ports": (1, 2)}


@engine_with
class Unpickles(Receiver):
    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        pickle.loads(pickle.dumps([1]))
        super().receive(bucket, sender, deadline)


class GivesAnEmptyReason(Healthy):
    @classmethod
    def unavailable_reason(cls) -> str | None:
        return ""


class RaisesWhenAskedWhetherItCanRun(Healthy):
    @classmethod
    def unavailable_reason(cls) -> str | None:
        raise RuntimeError("libfabric.so.1: cannot open shared object file")
