"""Where a sending rank takes the bytes of its buckets from."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from weightlane.ckpt_engines import ProtocolError

from ..version.manifest import Manifest
from ..version.packing import CopyTable, copy_runs
from .snapshot.progress import SourceBytes
from .snapshot.send_memory import PACKING_BUFFERS, PackingBuffers


class BucketSource(ABC):
    """The buckets of one version, taken in order.

    Attributes:
        packing_buffers: Number of buffers that buckets are packed into in turn, so that only the newest keep their bytes. None
            while no bucket had to be packed.
    """

    packing_buffers: int | None = None

    @abstractmethod
    def bucket(self, index: int) -> torch.Tensor:
        """The bytes of bucket `index` (1-D uint8), once they are there; the device may still be writing them."""


class SnapshotBuckets(BucketSource):
    """Buckets whose bytes this rank has: windows on its memory where that looks like the stream, else packed.

    Args:
        source: The rank's bytes.
        table: Where they belong in the stream.
        manifest: Where the buckets lie in the stream.
        buffers: Memory to pack into; allocated when a bucket is packed.
    """

    def __init__(self, source: SourceBytes, table: CopyTable, manifest: Manifest, buffers: PackingBuffers) -> None:
        self._source = source
        self._table = table
        self._manifest = manifest
        self._buffers = buffers
        self._packed = 0

    def bucket(self, index: int) -> torch.Tensor:
        """See `BucketSource.bucket`."""
        start, stop = self._manifest.window(index)
        memory = self._source.memory
        if start == stop:
            return memory[:0]
        window = self._table.window(start, stop)
        self._source.wait(window.snapshot_end)
        if window.shift is not None and start + window.shift >= 0 and stop + window.shift <= memory.numel():
            return memory[start + window.shift : stop + window.shift]
        if self._manifest.lasting:
            raise ProtocolError(
                f"receivers shall read bucket {index} in place, and it does not lie in the snapshot.", part="send"
            )
        self.packing_buffers = PACKING_BUFFERS
        buffers = self._buffers.of(self._manifest.largest_bucket_bytes)
        data = buffers[self._packed % len(buffers)][: stop - start]
        self._packed += 1
        copy_runs(memory, self._table, start, stop, data)
        return data
