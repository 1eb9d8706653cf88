"""`SendPipeline`: sends the buckets of a version. While the engine sends one bucket, the next is packed and checksummed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weightlane.ckpt_engines import Bucket, ClosedError, Deadline, ProtocolError, SenderLink
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime
from weightlane.ckpt_engines.runtime.threads import DaemonThreads, start_call
from weightlane.ckpt_engines.waits import GRACE_S, HINT, result_of

from ..plan.session_plan import SessionPlan
from ..version.bucket_checksums import CHECKSUMS_FILE, StoredChecksums, checksum_of, checksums_document
from ..version.manifest import Manifest
from ..version.packing import CopyTable
from ..version.safetensors_files import version_files
from .sending_rank import PACKING_BUFFERS
from .shard_gather import ShardGather
from .snapshot.snapshot import Progress

_PART = "send pipeline"
MOST_IN_FLIGHT = 8
"""Most buckets in flight if they are views of a snapshot. They need no extra memory, and keep a link with high latency busy."""
_MESSAGE_BYTES = 1 << 20
"""Bytes of a bucket that one message between trainer ranks covers, a multiple of any alignment. It limits the memory needed
besides snapshots and buckets."""
_KEPT_CHECKSUMS = 2
"""Number of newest versions whose checksums are kept: the one before the last may still be committed."""

OnSent = Callable[[int, int, int, float], None]
"""Callback for every sent bucket, with its version, index, number of bytes, and the seconds it was in the engine."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The link and the receivers of a bucket."""

    link: SenderLink
    receivers: Sequence[str]


def destinations_of(rank: str, planned: SessionPlan, senders: Mapping[int, SenderLink]) -> list[dict[int, Destination]]:
    """For each link on which `rank` sends, the destination of each lane, in the order in which it sends them.

    Args:
        rank: A trainer rank, or a rollout rank that relays.
        planned: The session's plan.
        senders: The rank's connected sender links, by number.
    """
    return [
        {lane: Destination(senders[link.number], planned.routes[lane].next_after(rank)) for lane in link.lanes[rank]}
        for link in planned.sent_by(rank)
    ]


class BucketSource:
    """The buckets of one version: views of this rank's memory where the bytes lie there as in the stream, else packed.

    Args:
        memory: The bytes that this rank sends, 1-D uint8: its snapshot, or its segments of a delta.
        progress: Progress of the snapshot; None if all bytes are final.
        deadline: Limit for all waits for bytes.
        manifest: The version, with the windows of its buckets.
        tables: Copies from the memory to the stream; with `gather`, those of every rank, by rank.
        buffers: Returns memory to pack into, for buckets of so many bytes.
        gather: Brings the bytes of the other ranks to rank 0; None if this rank has all bytes of its buckets.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        progress: Progress | None,
        deadline: Deadline,
        manifest: Manifest,
        tables: Sequence[CopyTable],
        buffers: Callable[[int], Sequence[torch.Tensor]],
        gather: ShardGather | None = None,
    ) -> None:
        self._memory, self._progress, self._deadline = memory, progress, deadline
        self._manifest, self._tables, self._buffers, self._gather = manifest, tables, buffers, gather
        self._packed = 0
        self.packing_buffers: int | None = None
        """Number of buffers that buckets are packed into in turn: the bytes of older buckets are overwritten. None until a bucket
        has to be packed."""

    def _wait(self, until_bytes: int) -> None:
        if self._progress is not None:
            self._progress.wait(until_bytes, self._deadline)

    def bucket(self, index: int) -> torch.Tensor:
        """Wait for the bytes of bucket `index` and return them (1-D uint8); the device may still be writing them."""
        start, stop = self._manifest.window(index)
        memory, own = self._memory, self._tables[0]
        if start == stop:
            return memory[:0]
        window = own.window(start, stop)
        self._wait(window.snapshot_end)
        shift = window.shift if self._gather is None else None
        if shift is not None and start + shift >= 0 and stop + shift <= memory.numel():
            return memory[start + shift : stop + shift]
        if self._manifest.lasting:
            raise ProtocolError(
                f"receivers shall read bucket {index} in place, and it does not lie in the snapshot.", part="send"
            )
        self.packing_buffers = PACKING_BUFFERS
        buffers = self._buffers(self._manifest.largest_bucket_bytes)
        data = buffers[self._packed % len(buffers)][: stop - start]
        self._packed += 1
        own.pack(memory, start, stop, data)
        if self._gather is not None:
            self._add_other_ranks(self._gather, start, stop, data)
        return data

    def _add_other_ranks(self, gather: ShardGather, start: int, stop: int, data: torch.Tensor) -> None:
        for rank, table in enumerate(self._tables[1:], 1):
            for low, high in _messages(start, stop):
                if nbytes := table.window(low, high).packed_bytes:
                    packed = gather.receive(rank, nbytes, self._deadline)
                    table.scatter(packed, low, high, data[low - start : high - start])

    def give(self, gather: ShardGather, rank: int) -> int:
        """[other ranks] Send this rank's bytes of every bucket to rank 0. Returns their number."""
        table, total = self._tables[rank], 0
        for index in range(self._manifest.bucket_count):
            for low, high in _messages(*self._manifest.window(index)):
                if (window := table.window(low, high)).pieces:
                    self._wait(window.snapshot_end)
                    packed = gather.room(window.packed_bytes)
                    table.gather(self._memory, low, high, packed)
                    gather.give(packed, self._deadline)
                    total += window.nbytes
        return total


def _messages(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Divide the window from `start` to `stop` into one window for each message between trainer ranks."""
    for low in range(start, stop, _MESSAGE_BYTES):
        yield low, min(low + _MESSAGE_BYTES, stop)


class OutgoingBuckets:
    """Buckets of one version that some threads make ready, and others send, each of these over links of its own. Thread-safe.

    Args:
        version: The version.
        deadline: Limit for the full version.
        stall_s: Longest time for one bucket, in seconds.
        part: The sending participant, for errors.
        on_sent: Called for each bucket when its memory may be overwritten.
        turn: Held during calls of a link.
    """

    def __init__(
        self,
        version: int,
        deadline: Deadline,
        stall_s: float,
        part: str,
        on_sent: OnSent,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._version, self._deadline, self._stall_s, self._part = version, deadline, stall_s, part
        self._on_sent = on_sent
        self._turn = turn or nullcontext()
        self._changed = threading.Condition()
        self._ready: dict[int, tuple[Bucket, str]] = {}
        """Buckets to be sent, with their checksums, by index."""
        self._unsent = 0
        """Number of buckets that are ready or in flight."""
        self._error: BaseException | None = None

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer than `most` buckets are ready or in flight. Raises the error with which sending has failed."""
        with self._changed:
            limit_s = self._deadline.remaining_s + GRACE_S
            self._changed.wait_for(lambda: self._unsent < most or self._error is not None, limit_s)
            if self._error is not None:
                raise self._error
            if self._unsent >= most:
                raise self._deadline.error("the engine to send a bucket", part=self._part, hint=HINT)

    def put(self, bucket: Bucket, checksum: str) -> None:
        """Add a bucket that can be sent; its bytes must stay unchanged until then."""
        with self._changed:
            self._ready[bucket.index] = bucket, checksum
            self._unsent += 1
            self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        """Make `send` raise `error` once the buckets in flight are sent, since no further one will be ready."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def send(self, destinations: Mapping[int, Destination]) -> None:
        """Send these buckets, in this order. While the next is not ready, flush those in flight.

        Raises the engine's error, or the one given to `give_up`.
        """
        in_flight: deque[tuple[Bucket, SenderLink, float]] = deque()
        try:
            for index, to in destinations.items():
                while in_flight and (len(in_flight) >= MOST_IN_FLIGHT or not self._is_ready(index)):
                    self._end_oldest(in_flight)
                bucket, checksum = self._take(index)
                with self._turn:
                    to.link.post(bucket, to.receivers, self._deadline.within(self._stall_s), checksum)
                in_flight.append((bucket, to.link, time.perf_counter()))
            while in_flight:
                self._end_oldest(in_flight)
        except BaseException as error:
            self.give_up(error)
            raise

    def _end_oldest(self, in_flight: deque[tuple[Bucket, SenderLink, float]]) -> None:
        bucket, link, started = in_flight[0]
        pending = sum(other is link for _, other, _ in in_flight) - 1
        with self._turn:
            link.flush(self._deadline.within(self._stall_s), pending)
        in_flight.popleft()
        self._on_sent(bucket.version, bucket.index, bucket.nbytes, time.perf_counter() - started)
        with self._changed:
            self._unsent -= 1
            self._changed.notify_all()

    def _is_ready(self, index: int) -> bool:
        with self._changed:
            return index in self._ready and self._error is None

    def _take(self, index: int) -> tuple[Bucket, str]:
        with self._changed:
            self._changed.wait_for(lambda: index in self._ready or self._error is not None, self._deadline.remaining_s)
            if self._error is not None:
                raise self._error
            if index not in self._ready:
                raise self._deadline.error(f"bucket {index} of version {self._version}", part=self._part)
            return self._ready.pop(index)


class SendPipeline:
    """Sends versions through a rank's links, with one call to a link at a time.

    Args:
        links: The rank's sender links, which the owner closes. An engine that stores versions has one.
        runtime: Runtime of the buckets' device. Packing and checksums run on the current stream of the calling thread.
        stored_checksums: Publishes checksums for readers of a store; None if receivers get each checksum ahead of its bucket.
        on_sent: Called for every sent bucket, on the pipeline's thread.
    """

    def __init__(
        self,
        links: Sequence[SenderLink],
        runtime: DeviceRuntime,
        stored_checksums: StoredChecksums | None,
        on_sent: OnSent,
    ) -> None:
        self._links = list(links)
        self._runtime = runtime
        self._stored_checksums = stored_checksums
        self._on_sent = on_sent
        self._checksums: dict[int, list[str]] = {}
        """The checksums of versions that may be committed in a store."""
        self._thread = DaemonThreads(1, "weightlane-send")
        self.sending: Future[None] | None = None
        """The send of the newest version. Until it is done the engine may read the memory that is sent."""
        self._turn = threading.Lock()
        """Held while a link sends a bucket or commits a version: these calls must not overlap."""

    def send_version(
        self,
        manifest: Manifest,
        source: BucketSource,
        destinations: Mapping[int, Destination],
        deadline: Deadline,
        stall_s: float,
    ) -> int:
        """Checksum and send buckets of `manifest`, in the order of `destinations`. Returns the bytes sent.

        Buckets without receivers are skipped, except for a full version in a store, which gets all buckets.

        Args:
            manifest: The version.
            source: Its buckets.
            destinations: The destination of each bucket to send, by its index.
            deadline: Limit for the full version.
            stall_s: Longest time for one bucket, in seconds.

        Raises:
            WeightlaneError: The engine or the source has failed.
        """
        version, stored = manifest.version, _is_stored(manifest)
        wanted = {index: to for index, to in destinations.items() if to.receivers or stored}
        outgoing = OutgoingBuckets(version, deadline, stall_s, _PART, self._on_sent, self._turn)
        sending = self.sending = self._thread.submit(self._send, outgoing, manifest, wanted, deadline)
        checksums: list[str] = []
        total = 0
        try:
            for index in wanted:
                outgoing.wait_for_room(source.packing_buffers or MOST_IN_FLIGHT)
                data = source.bucket(index)
                checksum = checksum_of(data) if manifest.checksummed else ""
                checksums.append(checksum)
                after = self._runtime.record_event()
                bucket = Bucket(version, index, data, after, lasting=manifest.lasting, part=manifest.part(index))
                outgoing.put(bucket, checksum)
                total += data.numel()
        except BaseException as error:
            outgoing.give_up(error)
            raise
        result_of(sending, deadline, f"the engine to send version {version}", _PART)
        if manifest.checksummed and self._stored_checksums is not None:
            self._stored_checksums.put(version, checksums)
            if stored:
                self._checksums[version] = checksums
                while len(self._checksums) > _KEPT_CHECKSUMS:
                    del self._checksums[next(iter(self._checksums))]
        return total

    def _send(
        self, outgoing: OutgoingBuckets, manifest: Manifest, wanted: Mapping[int, Destination], deadline: Deadline
    ) -> None:
        """[pipeline's thread] Send the buckets as they become ready."""
        if _is_stored(manifest):
            (link,) = self._links
            try:
                with self._turn:
                    link.open_version(version_files(manifest), deadline)
            except BaseException as error:
                outgoing.give_up(error)
                raise
        outgoing.send(wanted)

    def committing(self, version: int) -> Callable[[int, Deadline], None]:
        """The call that commits `version`, which serves, in a store; later versions may be sent before it. See `_commit`."""
        checksums = self._checksums.pop(version, None)
        documents = {} if checksums is None else {CHECKSUMS_FILE: checksums_document(checksums)}
        return partial(self._commit, documents)

    def _commit(self, documents: Mapping[str, str], version: int, deadline: Deadline) -> None:
        """Make `version` with these `documents` visible to readers of a store, even if the pipeline is closed in the meantime.

        Raises the engine's error.
        """
        (link,) = self._links
        what = f"version {version} to be committed"

        def commit() -> None:
            if not self._turn.acquire(timeout=deadline.remaining_s):
                raise deadline.error(f"{what} after the bucket that is being sent", part=_PART)
            try:
                link.commit_version(version, documents, deadline)
            finally:
                self._turn.release()

        result_of(start_call(commit), deadline, what, _PART)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """Wait until no receiver reads lasting buckets of `version` any more. Raises the engine's error."""

        def reclaim() -> None:
            for link in self._links:
                link.reclaim(version, deadline)

        what = f"version {version} to be given back"
        closed = ClosedError(f"closed while waiting for {what}.", part=_PART)
        try:
            reclaiming = self._thread.submit(reclaim)
        except RuntimeError as error:  # the pipeline was closed
            raise closed from error
        try:
            result_of(reclaiming, deadline, what, _PART)
        except CancelledError as error:
            raise closed from error

    def close(self) -> None:
        """Let the sending thread end; the owner closes the links. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_stored(manifest: Manifest) -> bool:
    """Whether readers of a store can find the version: a delta is of no use without its base."""
    return manifest.whole_tensors and not manifest.is_delta
