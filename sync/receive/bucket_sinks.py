"""Bucket sinks: each provides the memory that a bucket is received into, and takes the received bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from weightlane.ckpt_engines import ReceiverLink

from ..codecs.delta.decoding import DeltaDecoding
from .live_stream import LiveStream
from .receive_session import ExpectedBucket


class BucketSink:
    """The destination of one version's buckets. The threads of several links call it concurrently."""

    most_in_flight: ClassVar[int] = 8
    """Most buckets posted to one link at a time: enough to keep the link busy while buckets are verified."""
    needs_verified: ClassVar[bool] = False
    """Whether `on_bucket` needs verified buckets: the receive loop then waits for the checksums of a stored version first."""

    def memory_for(self, bucket: ExpectedBucket) -> torch.Tensor | None:  # noqa: ARG002
        """The memory to receive `bucket` into, 1-D uint8 of its size; None to view the bucket in its sender's memory."""
        return None

    def on_bucket(self, bucket: ExpectedBucket, data: torch.Tensor) -> None:
        """Take a received bucket."""


@dataclass(frozen=True)
class StagedBuckets(BucketSink):
    """Receives every bucket into its place in `stream`, the staging memory for the full version (1-D uint8)."""

    stream: torch.Tensor

    def memory_for(self, bucket: ExpectedBucket) -> torch.Tensor:
        """See `BucketSink.memory_for`."""
        return self.stream[bucket.offset : bucket.offset + bucket.nbytes]


@dataclass(frozen=True)
class ViewedBuckets(BucketSink):
    """Collects views of buckets in their senders' memory, by index in this rank's stream."""

    views: dict[int, torch.Tensor] = field(default_factory=dict)

    def on_bucket(self, bucket: ExpectedBucket, data: torch.Tensor) -> None:
        """See `BucketSink.on_bucket`."""
        self.views[bucket.index] = data


@dataclass(frozen=True)
class DeltaBuckets(BucketSink):
    """Receives the buckets of a delta into new memory on `device` and passes them to `decoding`."""

    most_in_flight = 2
    """Each bucket takes memory in addition to the decoded delta."""
    needs_verified = True
    decoding: DeltaDecoding
    device: torch.device

    def memory_for(self, bucket: ExpectedBucket) -> torch.Tensor:
        """See `BucketSink.memory_for`."""
        return torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)

    def on_bucket(self, bucket: ExpectedBucket, data: torch.Tensor) -> None:
        """See `BucketSink.on_bucket`."""
        self.decoding.arrived(bucket.index, data)


@dataclass(frozen=True)
class LiveBuckets(BucketSink):
    """Passes every bucket to a live stream.

    `buffers` has one buffer for each sender on each link, large enough for any bucket. If it is empty, buckets are viewed.
    """

    most_in_flight = 1
    """A sender's next bucket is received into the same buffer, so a bucket must be written before the next is posted."""
    needs_verified = True
    stream: LiveStream
    buffers: Mapping[tuple[ReceiverLink, str], torch.Tensor]

    def memory_for(self, bucket: ExpectedBucket) -> torch.Tensor | None:
        """See `BucketSink.memory_for`."""
        return self.buffers[bucket.source.link, bucket.sender][: bucket.nbytes] if self.buffers else None

    def on_bucket(self, bucket: ExpectedBucket, data: torch.Tensor) -> None:
        """See `BucketSink.on_bucket`."""
        self.stream.offer(bucket.index, data)
