"""Where a sending rank takes the bytes of its buckets from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from weightlane.ckpt_engines import ProtocolError

from .manifest import Manifest
from .packing import RunTable, copy_runs


class BucketSource(ABC):
    """The buckets of one version, taken in order."""

    @abstractmethod
    def bucket(self, index: int) -> torch.Tensor:
        """The bytes of bucket `index` (1-D uint8), once they are there; they stay until two more have been taken."""


class FromSnapshot(BucketSource):
    """Buckets of which this rank has everything: windows on its snapshot where that looks like the stream, else packed.

    Args:
        snapshot: The rank's, 1-D uint8.
        table: Where its bytes belong in the stream.
        layout: Where the buckets lie in the stream.
        ready: Blocks until the snapshot's bytes before the given one are there.
        buffers: Gives two runs of memory, each as long as the largest bucket, 1-D uint8; asked for when something is packed.
    """

    def __init__(
        self,
        snapshot: torch.Tensor,
        table: RunTable,
        layout: Manifest,
        ready: Callable[[int], None],
        buffers: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        self._snapshot = snapshot
        self._table = table
        self._layout = layout
        self._ready = ready
        self._buffers = buffers
        self._packed = 0

    def bucket(self, index: int) -> torch.Tensor:
        """See `BucketSource.bucket`."""
        start, stop = self._layout.window(index)
        if start == stop:
            return self._snapshot[:0]
        window = self._table.window(start, stop)
        self._ready(window.snapshot_end)
        if window.shift is not None and start + window.shift >= 0 and stop + window.shift <= self._snapshot.numel():
            return self._snapshot[start + window.shift : stop + window.shift]
        if self._layout.lasting:
            raise ProtocolError(f"bucket {index} is to be looked at and does not lie in the snapshot.", part="send")
        buffers = self._buffers()
        data = buffers[self._packed % len(buffers)][: stop - start]
        self._packed += 1
        copy_runs(self._snapshot, self._table, start, stop, data)
        return data


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
