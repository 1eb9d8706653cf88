"""Engines that are wrong in one way each: in what they carry, show and declare."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from broken_wrappers import (
    FOREVER_S,
    Call,
    Half,
    Healthy,
    HealthyStore,
    Receiver,
    Sender,
    broken,
    broken_link,
    declaring,
    engine_with,
)
from pydantic import ConfigDict

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    Channel,
    Deadline,
    Delivery,
    Topology,
    TransportError,
    WeightlaneError,
    WeightSender,
)
from weightlane.ckpt_engines.engines.shared_memory.segment_engine import SegmentConfig
from weightlane.ckpt_engines.links import SenderLink

# --- bytes -----------------------------------------------------------------------------------------------------------


@broken("receiver.arrived")
def Reorders(half: Half, arrived: Call, bucket: Bucket) -> None:
    """The bytes of every second bucket come in place of the one before, and the other way round."""
    last, half.kept["last"] = half.kept.get("last"), bucket.data.clone()
    if last is not None and last.numel() == bucket.nbytes:
        bucket.data.copy_(last)


@engine_with
class Truncates(Receiver):
    """Works in words: what is left over at the end is not transferred."""

    def post(self, bucket: Bucket, sender: str) -> None:
        self.kept[bucket.version, bucket.index] = bucket.data.clone()
        super().post(bucket, sender)

    def arrived(self, bucket: Bucket) -> None:
        whole = bucket.nbytes // 8 * 8
        bucket.data[whole:] = self.kept.pop((bucket.version, bucket.index))[whole:]


@broken("receiver.arrived")
def FlipsABit(half: Half, arrived: Call, bucket: Bucket) -> None:
    """One bit in the middle of buckets of more than a megabyte."""
    if bucket.nbytes > 1 << 20:
        bucket.data[bucket.nbytes // 2] ^= 4


@broken("receiver.arrived")
def KeepsOldVersions(half: Half, arrived: Call, bucket: Bucket) -> None:
    """A cache by index and size that forgets to look at the version."""
    bucket.data.copy_(half.kept.setdefault((bucket.index, bucket.nbytes), bucket.data.clone()))


@engine_with
class FlushesTooEarly(Sender):
    """`flush` returns, as if nobody overwrote the buffer, while a thread has not sent it: it does when somebody has."""

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        before, content = self.kept.get("last"), bucket.data.clone()

        def work() -> None:
            if before is not None:
                before.join()
            while torch.equal(bucket.data, content):
                time.sleep(0.001)
            with contextlib.suppress(WeightlaneError):
                self.real.post(bucket, receivers)
                self.real.flush(Deadline.after(FOREVER_S))

        self.kept["last"] = threading.Thread(target=work, daemon=True)
        self.kept["last"].start()

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        pass


@broken("sender.post")
def WaitsForEmptyBuckets(half: Half, post: Call, bucket: Bucket, receivers: Sequence[str]) -> None:
    """Nothing is sent for an empty bucket, but it is waited for."""
    if bucket.nbytes:
        post(bucket, receivers)


@engine_with
class ConfusesSenders(Receiver):
    """A receiver listens to its first sender only."""

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        self.first = next(iter(topology.senders))
        super().connect(topology, channels, deadline)

    def post(self, bucket: Bucket, sender: str) -> None:
        super().post(bucket, self.first)


@broken("receiver.post", HealthyStore)
def IgnoresTheVersion(half: Half, post: Call, bucket: Bucket, sender: str) -> None:
    """Takes whatever is there: asks for the bucket that was stored instead of the one wanted."""
    post(replace(bucket, version=1), sender)


@broken_link("sender.post")
def SendsToNobody(link: SenderLink, post: Call, bucket: Bucket, receivers: Sequence[str], *rest: Any) -> None:
    """An unknown name is dropped without a word."""
    post(bucket, [name for name in receivers if name != "nobody"], *rest)


class OnlyOwnMemory(Healthy):
    """Buckets that do not lie in allocated memory go wrong."""

    own: ClassVar[list[tuple[int, int]]] = []

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        buffer = super().allocate(nbytes, device)
        self.own.append((buffer.data_ptr(), buffer.data_ptr() + nbytes))
        return buffer

    class sender(Sender):  # noqa: N801
        def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
            if not any(start <= bucket.data.data_ptr() < end for start, end in OnlyOwnMemory.own):
                bucket = replace(bucket, data=torch.zeros_like(bucket.data))
            super().post(bucket, receivers)


@broken("sender.post")
def LosesTheLastBucket(half: Half, post: Call, bucket: Bucket, receivers: Sequence[str]) -> None:
    """Closing drops what is still in its queue."""
    waiting, half.kept["queue"] = half.kept.get("queue"), (replace(bucket, data=bucket.data.clone()), receivers)
    if waiting:
        post(*waiting)


# --- declarations ----------------------------------------------------------------------------------------------------

ClaimsTooMuch = declaring(persistent=True, elastic=True, same_host_only=False, devices=frozenset({"cpu", "gpu"}))
HidesPointToPoint = declaring(delivery=frozenset({Delivery.BROADCAST}))


@broken("sender.close", declaring(HealthyStore, persistent=False, elastic=False))
def ClaimsTooLittle(half: Half, close: Call) -> None:
    """A store that leaves everything where it is, and lets late receivers in, without declaring either."""


@engine_with
class ClaimsPointToPoint(Sender):
    """Sends to everybody, whoever is named."""

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        self.everybody = tuple(topology.receivers)
        super().connect(topology, channels, deadline)

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        super().post(bucket, self.everybody)


@broken("receiver.post", HealthyStore)
def ForgetsOffsets(half: Half, post: Call, bucket: Bucket, sender: str) -> None:
    """Every bucket of a file is read from where the file begins."""
    post(replace(bucket, part=bucket.part and replace(bucket.part, offset=0)), sender)


@broken("sender.post")
def ClaimsADevice(half: Half, post: Call, *arguments: Any) -> None:
    """Declares CPU memory, and cannot read it."""
    raise TransportError("the bucket is not on a CUDA device.", part="sender")


class AllocatesOneBufferTwice(Healthy):
    memory: torch.Tensor | None = None

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.memory is None:
            self.memory = torch.empty(4 << 20, dtype=torch.uint8, device=device)
        return self.memory[:nbytes]


class LooseConfig(SegmentConfig):
    model_config = ConfigDict(extra="ignore")


class TakesAnyOption(Healthy):
    config_type = LooseConfig


@broken("sender.address")
def AddressIsNoPlainData(half: Half, address: Call) -> Address:
    return {**address(), "ports": (1, 2)}


@broken("receiver.arrived")
def Unpickles(half: Half, arrived: Call, bucket: Bucket) -> None:
    pickle.loads(pickle.dumps([1]))


class GivesAnEmptyReason(Healthy):
    @classmethod
    def unavailable_reason(cls) -> str | None:
        return ""


class RaisesWhenAskedWhetherItCanRun(Healthy):
    @classmethod
    def unavailable_reason(cls) -> str | None:
        raise RuntimeError("libfabric.so.1: cannot open shared object file")


# --- views -----------------------------------------------------------------------------------------------------------


@broken("receiver.view")
def ShowsAFlippedBit(half: Half, view: Call, version: int, index: int, nbytes: int, *rest: Any) -> torch.Tensor:
    data: torch.Tensor = view(version, index, nbytes, *rest).clone()
    data[nbytes // 2 : nbytes // 2 + 1] ^= 4
    return data


class ShowsOneCopyForAll(Healthy):
    """The sender copies each bucket to the same place in the engine's memory, over the bucket before it."""

    memory: ClassVar[list[torch.Tensor]] = []

    def make_sender(self, name: str, device: torch.device) -> WeightSender:
        self.memory[:] = [self.allocate(1 << 20, device)]
        return super().make_sender(name, device)

    class sender(Sender):  # noqa: N801
        def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
            copy = ShowsOneCopyForAll.memory[0][: bucket.nbytes].copy_(bucket.data)
            super().post(replace(bucket, data=copy), receivers)


@engine_with
class CopiesByViewing(Receiver):
    """The receiver copies each bucket out of a view, and never releases the view."""

    def post(self, bucket: Bucket, sender: str) -> None:
        self.kept["posted"] = bucket, sender

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        if posted := self.kept.pop("posted", None):
            bucket, sender = posted
            bucket.data.copy_(self.real.view(bucket.version, bucket.index, bucket.nbytes, sender, deadline))


@broken("sender.post")
def ShowsWhatDoesNotLast(half: Half, post: Call, bucket: Bucket, receivers: Sequence[str]) -> None:
    post(replace(bucket, lasting=True), receivers)


@broken("sender.reclaim")
def ReclaimsAtOnce(half: Half, reclaim: Call, *arguments: Any) -> None:
    pass


@engine_with
class ShowsACache(Receiver):
    """The receiver shows copies, finds them again by index and size whatever the version, and wipes them when it closes."""

    def view(self, version: int, *rest: Any) -> torch.Tensor:
        data: torch.Tensor = super().view(version, *rest)
        return self.kept.setdefault(rest[:2], data.clone())

    def close(self) -> None:
        super().close()
        for data in self.kept.values():
            data.zero_()


class WipesItsMemory(Healthy):
    """The engine zeroes its memory when a sender closes, and what is freed, although receivers may still view both."""

    memory: ClassVar[list[torch.Tensor]] = []

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.memory.append(super().allocate(nbytes, device))
        return self.memory[-1]

    def free(self, memory: torch.Tensor) -> None:
        memory.zero_()
        super().free(memory)

    class sender(Sender):  # noqa: N801
        def close(self) -> None:
            super().close()
            for memory in WipesItsMemory.memory:
                memory.zero_()


@broken("receiver.view")
def KeepsEveryView(half: Half, view: Call, *arguments: Any) -> Any:
    """Memory that somebody may still look at is never given back."""
    return half.kept.setdefault(arguments, view(*arguments))
