"""Where the sending rank takes the bytes of its buckets from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from .manifest import Manifest


class BucketSource(ABC):
    """The buckets of one version, taken in order."""

    @abstractmethod
    def bucket(self, index: int) -> torch.Tensor:
        """The bytes of bucket `index` (1-D uint8), once they are there; they stay until two more have been taken."""


class InPlace(BucketSource):
    """Windows on a snapshot that is the stream itself.

    Args:
        snapshot: The stream's bytes, 1-D uint8.
        layout: Where its buckets lie.
        ready: Blocks until the snapshot's bytes before the given one are there.
    """

    def __init__(self, snapshot: torch.Tensor, layout: Manifest, ready: Callable[[int], None]) -> None:
        self._snapshot = snapshot
        self._layout = layout
        self._ready = ready

    def bucket(self, index: int) -> torch.Tensor:
        """See `BucketSource.bucket`."""
        start, stop = self._layout.window(index)
        self._ready(stop)
        return self._snapshot[start:stop]


class Packed(BucketSource):
    """Buckets filled from several ranks' snapshots, in two buffers in turn.

    Args:
        buffers: At least two, each as long as the largest bucket, 1-D uint8.
        layout: Where the buckets lie in the stream.
        fill: Fills the bucket with the given index; blocks until its bytes are there.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], layout: Manifest, fill: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._buffers = buffers
        self._layout = layout
        self._fill = fill

    def bucket(self, index: int) -> torch.Tensor:
        """See `BucketSource.bucket`."""
        start, stop = self._layout.window(index)
        data = self._buffers[index % len(self._buffers)][: stop - start]
        self._fill(index, data)
        return data
