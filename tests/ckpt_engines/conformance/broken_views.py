"""Engines that are wrong in one way each: in what they show of a bucket, and in when its memory goes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from broken_wrappers import Call, Half, Healthy, Receiver, Sender, broken, engine_with

from weightlane.ckpt_engines import Bucket, Deadline, PeerLostError, WeightSender


@broken("receiver.view")
def ShowsAFlippedBit(half: Half, view: Call, version: int, index: int, nbytes: int, *rest: Any) -> torch.Tensor:
    data: torch.Tensor = view(version, index, nbytes, *rest).clone()
    data[nbytes // 2 : nbytes // 2 + 1] ^= 4
    return data


@broken("receiver.view")
def ShowsCopies(half: Half, view: Call, *arguments: Any) -> Any:
    return view(*arguments).clone()


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
    """`free` zeroes the memory, as if it were reused while a receiver still views it."""

    def free(self, memory: torch.Tensor) -> None:
        memory.zero_()
        super().free(memory)


@engine_with
class UnmapsOnClose(Receiver):
    """Closing the receiver zeroes everything that it has viewed, as if the pages had been dropped."""

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
