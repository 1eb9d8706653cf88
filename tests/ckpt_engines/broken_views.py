"""Engines that are wrong in one way each: in how receivers look at buckets, and in the memory that belongs to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from broken_wrappers import Healthy, Receiver, Sender, engine_with

from weightlane.ckpt_engines import Bucket, Deadline, PeerLostError, WeightReceiver, WeightSender


@engine_with
class ShowsAFlippedBit(Receiver):
    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        data = super().view(version, index, nbytes, sender, deadline).clone()
        data[nbytes // 2 : nbytes // 2 + 1] ^= 4
        return data


@engine_with
class ShowsCopies(Receiver):
    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        return super().view(version, index, nbytes, sender, deadline).clone()


class ShowsOneCopyForAll(Healthy):
    """What does not lie in the engine's memory is copied to one place there, bucket after bucket."""

    memory: ClassVar[list[torch.Tensor]] = []

    def make_sender(self, name: str) -> WeightSender:
        self.memory[:] = [self.allocate(1 << 20, torch.device("cpu"))]
        return super().make_sender(name)

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            copy = ShowsOneCopyForAll.memory[0][: bucket.nbytes].copy_(bucket.data)
            super().send(replace(bucket, data=copy), receivers, deadline)


@engine_with
class CopiesByViewing(Receiver):
    """Who copies counts as one who looks, and never says that it is done."""

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        bucket.data.copy_(self.real.view(bucket.version, bucket.index, bucket.nbytes, sender, deadline))


@engine_with
class ShowsWhatDoesNotLast(Sender):
    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        super().send(replace(bucket, lasting=True), receivers, deadline)


@engine_with
class ReclaimsAtOnce(Sender):
    def reclaim(self, version: int, deadline: Deadline) -> None:
        pass


@engine_with
class ReleasesEverything(Receiver):
    """The release of a version counts for all of them."""

    viewed: tuple[int, ...] = ()

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        self.viewed = *self.viewed, version
        return super().view(version, index, nbytes, sender, deadline)

    def release(self, version: int, deadline: Deadline) -> None:
        for each in self.viewed:
            super().release(each, deadline)


@engine_with
class ShowsOldVersions(Receiver):
    """A cache by index and size that forgets to look at the version."""

    def __init__(self, real: WeightReceiver) -> None:
        super().__init__(real)
        self.cache: dict[tuple[int, int], torch.Tensor] = {}

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        data = super().view(version, index, nbytes, sender, deadline)
        return self.cache.setdefault((index, nbytes), data.clone())


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

    def __init__(self, real: WeightReceiver) -> None:
        super().__init__(real)
        self.viewed: list[torch.Tensor] = []

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        self.viewed.append(super().view(version, index, nbytes, sender, deadline).clone())
        return self.viewed[-1]

    def close(self) -> None:
        super().close()
        for data in self.viewed:
            data.zero_()


@engine_with
class TakesDeathForRelease(Sender):
    def reclaim(self, version: int, deadline: Deadline) -> None:
        with contextlib.suppress(PeerLostError):
            super().reclaim(version, deadline)


@engine_with
class KeepsEveryView(Receiver):
    """Memory that somebody may still look at is never given back."""

    def __init__(self, real: WeightReceiver) -> None:
        super().__init__(real)
        self.viewed: list[torch.Tensor] = []

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        self.viewed.append(super().view(version, index, nbytes, sender, deadline))
        return self.viewed[-1]
