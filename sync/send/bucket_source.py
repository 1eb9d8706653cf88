"""Where a sending rank takes the bytes of its buckets from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from weightlane.ckpt_engines import ProtocolError

from ..version.manifest import Manifest
from ..version.packing import CopyTable, copy_runs

BUFFERS = 2
"""How many buckets that have to be packed are on their way at a time."""
_IN_PLACE = 8
"""How many of those that lie in a snapshot: they take no memory, and fill a link that is long."""


class BucketSource(ABC):
    """The buckets of one version, taken in order.

    Attributes:
        most_at_a_time: So many of those taken last stay as they are: as many as there are buffers, or more where they lie in
        place.
    """

    most_at_a_time: int

    @abstractmethod
    def bucket(self, index: int) -> torch.Tensor:
        """The bytes of bucket `index` (1-D uint8), once they are there; the device may still be writing them."""


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
        table: CopyTable,
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
        self.most_at_a_time = _IN_PLACE

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
        self.most_at_a_time = BUFFERS
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
        self.most_at_a_time = BUFFERS

    def bucket(self, index: int) -> torch.Tensor:
        """See `BucketSource.bucket`."""
        start, stop = self._layout.window(index)
        data = self._buffers[index % len(self._buffers)][: stop - start]
        self._fill(index, data)
        return data
