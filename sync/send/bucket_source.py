"""Bucket sources: they give a sending rank the bytes of its buckets."""

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
        packing_buffers: Number of buffers that buckets are packed into in turn: the bytes of older buckets are overwritten. None
            until a bucket has to be packed.
    """

    packing_buffers: int | None = None

    @abstractmethod
    def bucket(self, index: int) -> torch.Tensor:
        """Wait for the bytes of bucket `index` and return them (1-D uint8); the device may still be writing them."""


class SnapshotBuckets(BucketSource):
    """Buckets that this rank has all bytes of: a view of its memory if the bytes lie there as in the stream, else packed.

    Args:
        source: The rank's bytes.
        table: Copies from these bytes to the stream.
        manifest: The version, with the windows of its buckets.
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
