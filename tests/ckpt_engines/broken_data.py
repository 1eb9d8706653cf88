"""Engines that are wrong in one way each: in what they carry, what they show, and what they declare."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from broken_wrappers import Half, Healthy, HealthyStore, Receiver, Sender, broken, declaring, engine_with
from pydantic import ConfigDict, Field

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    Deadline,
    Delivery,
    EngineConfig,
    Mailbox,
    PeerLostError,
    Topology,
    TransportError,
    WeightlaneError,
    WeightSender,
)
from weightlane.ckpt_engines.shm import ShmConfig

Call = Callable[..., Any]

# --- bytes -----------------------------------------------------------------------------------------------------------


@broken("receiver.receive")
def Reorders(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """The bytes of every second bucket come in place of the one before, and the other way round."""
    receive(bucket, *rest)
    last, half.kept["last"] = half.kept.get("last"), bucket.data.clone()
    if last is not None and last.numel() == bucket.nbytes:
        bucket.data.copy_(last)


@broken("receiver.receive")
def Truncates(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """Works in words: what is left over at the end is not transferred."""
    before = bucket.data.clone()
    receive(bucket, *rest)
    whole = bucket.nbytes // 8 * 8
    bucket.data[whole:] = before[whole:]


@broken("receiver.receive")
def FlipsABit(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """One bit in the middle of buckets of more than a megabyte."""
    receive(bucket, *rest)
    if bucket.nbytes > 1 << 20:
        bucket.data[bucket.nbytes // 2] ^= 4


@broken("receiver.receive")
def KeepsOldVersions(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """A cache by index and size that forgets to look at the version."""
    receive(bucket, *rest)
    bucket.data.copy_(half.kept.setdefault((bucket.index, bucket.nbytes), bucket.data.clone()))


@broken("sender.send")
def ReturnsTooEarly(half: Half, send: Call, bucket: Bucket, *rest: Any) -> None:
    """`send` hands the buffer to a thread and returns, as if nobody overwrote it: the thread sends when somebody has."""
    before, content = half.kept.get("last"), bucket.data.clone()

    def work() -> None:
        if before is not None:
            before.join()
        while torch.equal(bucket.data, content):
            time.sleep(0.001)
        with contextlib.suppress(WeightlaneError):
            send(bucket, *rest)

    half.kept["last"] = threading.Thread(target=work, daemon=True)
    half.kept["last"].start()


@broken("receiver.receive")
def OverrunsSlowReceivers(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """A ring that is overwritten when nobody empties it for 50 ms."""
    overrun = "looked" in half.kept and time.monotonic() - half.kept["looked"] > 0.05
    receive(bucket, *rest)
    half.kept["looked"] = time.monotonic()
    if overrun:
        bucket.data.zero_()


@broken("receiver.receive")
def FillsOneSocketBuffer(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """One write, whose return value nobody looks at."""
    receive(bucket, *rest)
    bucket.data[4 << 20 :] = 0x55


@broken("sender.send")
def WaitsForEmptyBuckets(half: Half, send: Call, bucket: Bucket, *rest: Any) -> None:
    """Nothing is sent for an empty bucket, but it is waited for."""
    if bucket.nbytes:
        send(bucket, *rest)


@broken("sender.send")
def ServesFourReceivers(half: Half, send: Call, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
    """The fifth one is forgotten."""
    send(bucket, receivers[:4], deadline)


@engine_with
class ConfusesSenders(Receiver):
    """A receiver listens to its first sender only."""

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        self.first = next(iter(topology.senders))
        super().connect(topology, mailbox, deadline)

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        super().receive(bucket, self.first, deadline)


@broken("receiver.receive")
def IgnoresTheVersion(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """Takes whatever comes: asks for the bucket that is under way instead of the one wanted."""
    receive(replace(bucket, version=1), *rest)


@broken("sender.send")
def SendsToNobody(half: Half, send: Call, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
    """An unknown name is dropped without a word."""
    send(bucket, [name for name in receivers if name != "nobody"], deadline)


class OnlyOwnMemory(Healthy):
    """Buckets that do not lie in allocated memory go wrong."""

    own: ClassVar[list[tuple[int, int]]] = []

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        buffer = super().allocate(nbytes, device)
        self.own.append((buffer.data_ptr(), buffer.data_ptr() + nbytes))
        return buffer

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, *rest: Any) -> None:
            if not any(start <= bucket.data.data_ptr() < end for start, end in OnlyOwnMemory.own):
                bucket = replace(bucket, data=torch.zeros_like(bucket.data))
            super().send(bucket, *rest)


@broken("sender.send")
def LosesTheLastBucket(half: Half, send: Call, bucket: Bucket, *rest: Any) -> None:
    """Closing drops what is still in its queue."""
    waiting, half.kept["queue"] = half.kept.get("queue"), (replace(bucket, data=bucket.data.clone()), *rest)
    if waiting:
        send(*waiting)


# --- views -----------------------------------------------------------------------------------------------------------


@broken("receiver.view")
def ShowsAFlippedBit(half: Half, view: Call, version: int, index: int, nbytes: int, *rest: Any) -> torch.Tensor:
    data: torch.Tensor = view(version, index, nbytes, *rest).clone()
    data[nbytes // 2 : nbytes // 2 + 1] ^= 4
    return data


@broken("receiver.view")
def ShowsCopies(half: Half, view: Call, *arguments: Any) -> Any:
    return view(*arguments).clone()


class ShowsOneCopyForAll(Healthy):
    """What does not lie in the engine's memory is copied to one place there, bucket after bucket."""

    memory: ClassVar[list[torch.Tensor]] = []

    def make_sender(self, name: str) -> WeightSender:
        self.memory[:] = [self.allocate(1 << 20, torch.device("cpu"))]
        return super().make_sender(name)

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, *rest: Any) -> None:
            copy = ShowsOneCopyForAll.memory[0][: bucket.nbytes].copy_(bucket.data)
            super().send(replace(bucket, data=copy), *rest)


@broken("receiver.receive")
def CopiesByViewing(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """Who copies counts as one who looks, and never says that it is done."""
    bucket.data.copy_(half.real.view(bucket.version, bucket.index, bucket.nbytes, *rest))


@broken("sender.send")
def ShowsWhatDoesNotLast(half: Half, send: Call, bucket: Bucket, *rest: Any) -> None:
    send(replace(bucket, lasting=True), *rest)


@broken("sender.reclaim")
def ReclaimsAtOnce(half: Half, reclaim: Call, *arguments: Any) -> None:
    pass


@broken("receiver.release")
def ReleasesEverything(half: Half, release: Call, version: int, deadline: Deadline) -> None:
    """The release of a version counts for those before it and behind it, too."""
    for each in range(version - 3, version + 4):
        release(each, deadline)


@broken("receiver.view")
def ShowsOldVersions(half: Half, view: Call, version: int, *rest: Any) -> Any:
    """A cache by index and size that forgets to look at the version."""
    data = view(version, *rest)
    return half.kept.setdefault(rest[:2], data.clone())


class WipesItsMemoryOnClose(Healthy):
    """A sender takes for its own what belongs to the engine."""

    memory: ClassVar[list[torch.Tensor]] = []

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.memory.append(super().allocate(nbytes, device))
        return self.memory[-1]

    class sender(Sender):  # noqa: N801
        def close(self) -> None:
            super().close()
            for memory in WipesItsMemoryOnClose.memory:
                memory.zero_()


class WipesWhatIsFreed(Healthy):
    """As if it were handed out again while somebody still looks."""

    def free(self, memory: torch.Tensor) -> None:
        memory.zero_()
        super().free(memory)


@engine_with
class UnmapsOnClose(Receiver):
    """What was viewed is gone with its receiver: zeros, as if the pages had been dropped."""

    def view(self, version: int, index: int, *rest: Any) -> torch.Tensor:
        data: torch.Tensor = super().view(version, index, *rest).clone()
        return self.kept.setdefault((version, index), data)

    def close(self) -> None:
        super().close()
        for data in self.kept.values():
            data.zero_()


@broken("sender.reclaim")
def TakesDeathForRelease(half: Half, reclaim: Call, *arguments: Any) -> None:
    with contextlib.suppress(PeerLostError):
        reclaim(*arguments)


@broken("receiver.view")
def KeepsEveryView(half: Half, view: Call, *arguments: Any) -> Any:
    """Memory that somebody may still look at is never given back."""
    return half.kept.setdefault(arguments, view(*arguments))


# --- declarations ----------------------------------------------------------------------------------------------------

ClaimsPersistence = declaring(persistent=True)
ClaimsElasticity = declaring(elastic=True)
ClaimsToCrossHosts = declaring(same_host_only=False)
ClaimsNoDeviceOfTorch = declaring(devices=frozenset({"cpu", "gpu"}))
HidesPointToPoint = declaring(delivery=frozenset({Delivery.BROADCAST}))


@engine_with
class ClaimsPointToPoint(Sender):
    """Sends to everybody, whoever is named."""

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        self.everybody = tuple(topology.receivers)
        super().connect(topology, mailbox, deadline)

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        super().send(bucket, self.everybody, deadline)


class ClaimsZeroCopy(Healthy):
    """`allocate` hands out ordinary memory, which `send` copies."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@broken("sender.close", declaring(HealthyStore, persistent=False))
def HidesPersistence(half: Half, close: Call) -> None:
    """Leaves everything where it is without declaring it."""


@broken("receiver.receive", HealthyStore)
def ForgetsOffsets(half: Half, receive: Call, bucket: Bucket, *rest: Any) -> None:
    """Every bucket of a file is read from where the file begins."""
    receive(replace(bucket, part=bucket.part and replace(bucket.part, offset=0)), *rest)


@broken("receiver.connect")
def HidesElasticity(half: Half, connect: Call, topology: Topology, *rest: Any) -> None:
    """Lets late receivers in without declaring it."""
    if len(topology.receivers) != 2:
        connect(topology, *rest)


@broken("sender.send")
def ClaimsADevice(half: Half, send: Call, *arguments: Any) -> None:
    """Declares CPU memory, and cannot read it."""
    raise TransportError("the bucket is not on a CUDA device.", part="sender")


class AllocatesOneBufferTwice(Healthy):
    memory: torch.Tensor | None = None

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.memory is None:
            self.memory = torch.empty(4 << 20, dtype=torch.uint8, device=device)
        return self.memory[:nbytes]


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


@broken("sender.address")
def AddressIsNoPlainData(half: Half, address: Call) -> Address:
    return {**address(), "ports": (1, 2)}


@broken("receiver.receive")
def Unpickles(half: Half, receive: Call, *arguments: Any) -> None:
    pickle.loads(pickle.dumps([1]))
    receive(*arguments)


class GivesAnEmptyReason(Healthy):
    @classmethod
    def unavailable_reason(cls) -> str | None:
        return ""


class RaisesWhenAskedWhetherItCanRun(Healthy):
    @classmethod
    def unavailable_reason(cls) -> str | None:
        raise RuntimeError("libfabric.so.1: cannot open shared object file")
