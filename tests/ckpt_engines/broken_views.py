"""Engines that are wrong in one way each: in how receivers look at buckets, and in the memory that belongs to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from broken_wrappers import FOREVER_S, Healthy, Receiver, Sender

from weightlane.ckpt_engines import Bucket, Deadline, PeerLostError, WeightReceiver, WeightSender


class ShowsAFlippedBit(Healthy):
    class receiver(Receiver):  # noqa: N801
        def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
            data = super().view(version, index, nbytes, sender, deadline).clone()
            data[nbytes // 2 : nbytes // 2 + 1] ^= 4
            return data


class ShowsToTheFirst(Healthy):
    """Only one receiver at a time may map the memory; the others never hear of it."""

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            super().send(bucket, receivers[:1], deadline)


class ShowsCopies(Healthy):
    class receiver(Receiver):  # noqa: N801
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


class CopiesByViewing(Healthy):
    """Who copies counts as one who looks, and never says that it is done."""

    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
            bucket.data.copy_(self.real.view(bucket.version, bucket.index, bucket.nbytes, sender, deadline))


class ShowsWhatDoesNotLast(Healthy):
    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
            super().send(replace(bucket, lasting=True), receivers, deadline)


class ReclaimsAtOnce(Healthy):
    class sender(Sender):  # noqa: N801
        def reclaim(self, version: int, deadline: Deadline) -> None:
            pass


class ReleasesEverything(Healthy):
    """The release of a version counts for all of them."""

    class receiver(Receiver):  # noqa: N801
        viewed: tuple[int, ...] = ()

        def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
            self.viewed = *self.viewed, version
            return super().view(version, index, nbytes, sender, deadline)

        def release(self, version: int, deadline: Deadline) -> None:
            for each in self.viewed:
                super().release(each, deadline)


class ShowsOldVersions(Healthy):
    """A cache by index and size that forgets to look at the version."""

    class receiver(Receiver):  # noqa: N801
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


class UnmapsOnClose(Healthy):
    """What was viewed is gone with its receiver: zeros, as if the pages had been dropped."""

    class receiver(Receiver):  # noqa: N801
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


class TakesDeathForRelease(Healthy):
    class sender(Sender):  # noqa: N801
        def reclaim(self, version: int, deadline: Deadline) -> None:
            with contextlib.suppress(PeerLostError):
                super().reclaim(version, deadline)


class ReclaimIgnoresDeadline(Healthy):
    class sender(Sender):  # noqa: N801
        def reclaim(self, version: int, deadline: Deadline) -> None:
            super().reclaim(version, Deadline.after(FOREVER_S))


class KeepsEveryView(Healthy):
    """Memory that somebody may still look at is never given back."""

    class receiver(Receiver):  # noqa: N801
        def __init__(self, real: WeightReceiver) -> None:
            super().__init__(real)
            self.viewed: list[torch.Tensor] = []

        def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
            self.viewed.append(super().view(version, index, nbytes, sender, deadline))
            return self.viewed[-1]
