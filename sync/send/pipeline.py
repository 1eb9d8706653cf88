"""`SendPipeline`: sends the buckets of a version. While the engine sends one bucket, the next is packed and checksummed."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

from weightlane.ckpt_engines import Bucket, ClosedError, Deadline, SenderLink
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime
from weightlane.ckpt_engines.runtime.threads import DaemonThreads
from weightlane.ckpt_engines.waits import GRACE_S, HINT, result_of

from ..plan.session_plan import SessionPlan
from ..version.bucket_checksums import CHECKSUMS_FILE, StoredChecksums, checksum_of, checksums_document
from ..version.manifest import Manifest
from ..version.safetensors_files import version_files
from .bucket_source import BucketSource

_PART = "send pipeline"
_MOST_IN_FLIGHT = 8
"""Most buckets in flight if they are views of a snapshot. They need no extra memory, and keep a link with high latency busy."""
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


@dataclass(frozen=True, slots=True)
class _ReadyBucket:
    """A bucket that can be sent."""

    bucket: Bucket
    to: Destination
    checksum: str


class BucketsInFlight:
    """Buckets that a rank's links are sending. Used by one thread.

    Args:
        deadline: Limit for all buckets.
        stall_s: Longest time for one bucket, in seconds.
        on_sent: Called for each bucket when its memory may be overwritten.
    """

    def __init__(self, deadline: Deadline, stall_s: float, on_sent: OnSent | None = None) -> None:
        self._deadline = deadline
        self._stall_s = stall_s
        self._on_sent = on_sent
        self._in_flight: deque[tuple[Bucket, SenderLink, float]] = deque()
        self._count: Counter[SenderLink] = Counter()

    def __len__(self) -> int:
        return len(self._in_flight)

    def post(self, bucket: Bucket, to: Destination, checksum: str) -> None:
        """Begin to send a bucket. Raises the link's error."""
        to.link.post(bucket, to.receivers, self._deadline.within(self._stall_s), checksum)
        self._in_flight.append((bucket, to.link, time.perf_counter()))
        self._count[to.link] += 1

    def end_oldest(self) -> None:
        """Wait until the oldest bucket is sent. Raises the link's error."""
        bucket, link, started = self._in_flight[0]
        link.flush(self._deadline.within(self._stall_s), self._count[link] - 1)
        self._count[link] -= 1
        self._in_flight.popleft()
        if self._on_sent is not None:
            self._on_sent(bucket.version, bucket.index, bucket.nbytes, time.perf_counter() - started)

    def end_all(self) -> None:
        """Wait until all buckets are sent. Raises the links' errors."""
        while self._in_flight:
            self.end_oldest()


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
        stored_checksums: StoredChecksums | None = None,
        on_sent: OnSent | None = None,
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
        stall_s: float = float("inf"),
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
        queue = _ReadyQueue()
        sending = self.sending = self._thread.submit(self._send, queue, manifest, deadline, stall_s)
        checksums: list[str] = []
        total = 0
        try:
            for index, to in destinations.items():
                if not to.receivers and not stored:
                    continue
                if not queue.has_room(source.packing_buffers or _MOST_IN_FLIGHT, deadline):
                    break  # `result_of` below raises why
                data = source.bucket(index)
                checksum = checksum_of(data) if manifest.checksummed else ""
                checksums.append(checksum)
                after = self._runtime.record_event()
                bucket = Bucket(version, index, data, after, lasting=manifest.lasting, part=manifest.part(index))
                queue.put(_ReadyBucket(bucket, to, checksum))
                total += data.numel()
        except BaseException:
            queue.end(complete=False)
            raise
        queue.end(complete=True)
        result_of(sending, deadline, f"the engine to send version {version}", _PART)
        if manifest.checksummed and self._stored_checksums is not None:
            self._stored_checksums.put(version, checksums)
            if stored:
                self._checksums[version] = checksums
                while len(self._checksums) > _KEPT_CHECKSUMS:
                    del self._checksums[next(iter(self._checksums))]
        return total

    def _send(self, queue: _ReadyQueue, manifest: Manifest, deadline: Deadline, stall_s: float) -> None:
        """[pipeline's thread] Send ready buckets until there are no more. While none is ready, flush the buckets in flight."""
        in_flight = BucketsInFlight(deadline, stall_s, self._on_sent)
        what = f"the next bucket of version {manifest.version} to be ready"
        try:
            if _is_stored(manifest):
                (link,) = self._links
                with self._turn:
                    link.open_version(version_files(manifest), deadline)
            while True:
                is_full = len(in_flight) >= queue.most
                ready = None if is_full else queue.take(wait_by=None if in_flight else deadline, what=what)
                if ready is not None:
                    with self._turn:
                        in_flight.post(ready.bucket, ready.to, ready.checksum)
                elif in_flight:
                    with self._turn:
                        in_flight.end_oldest()
                    queue.sent_one()
                else:
                    return
        except BaseException:
            queue.fail()
            raise

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

        thread = DaemonThreads(1, "weightlane-commit")
        committing = thread.submit(commit)
        thread.shutdown()
        result_of(committing, deadline, what, _PART)

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


class _ReadyQueue:
    """Queue of buckets that the calling thread adds and the pipeline's thread sends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[_ReadyBucket] = deque()
        self._unsent = 0
        """Number of buckets that are ready or in flight."""
        self._ended = False
        self._failed = False
        self.most = 1
        """Most buckets in flight."""

    def has_room(self, most: int, deadline: Deadline) -> bool:
        """[caller] Wait until fewer than `most` buckets are ready or in flight; False if sending has failed."""
        with self._changed:
            self.most = most
            self._changed.wait_for(lambda: self._unsent < most or self._failed, deadline.remaining_s + GRACE_S)
            if self._unsent >= most and not self._failed:
                raise deadline.error("the engine to send a bucket", part=_PART, hint=HINT)
            return not self._failed

    def put(self, ready: _ReadyBucket) -> None:
        """[caller] Add a bucket."""
        with self._changed:
            self._ready.append(ready)
            self._unsent += 1
            self._changed.notify_all()

    def end(self, *, complete: bool) -> None:
        """[caller] Add no more buckets; unless the version is `complete`, drop the ready ones."""
        with self._changed:
            self._ended = True
            if not complete:
                self._ready.clear()
            self._changed.notify_all()

    def take(self, *, wait_by: Deadline | None, what: str) -> _ReadyBucket | None:
        """[pipeline] Take the next bucket. Without `wait_by`, returns None if none is ready.

        With `wait_by`, waits for one: returns None if no more will be added, and raises `DeadlineExceededError` if none is ready
        by then.
        """
        with self._changed:
            if wait_by is not None:
                timeout_s = wait_by.remaining_s + GRACE_S
                if not self._changed.wait_for(lambda: self._ready or self._ended, timeout_s):
                    raise wait_by.error(what, part=_PART)
            return self._ready.popleft() if self._ready else None

    def sent_one(self) -> None:
        """[pipeline] Note that the oldest bucket in flight is sent."""
        with self._changed:
            self._unsent -= 1
            self._changed.notify_all()

    def fail(self) -> None:
        """[pipeline] Note that sending has failed, so that no more buckets are added."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


def _is_stored(manifest: Manifest) -> bool:
    """Whether readers of a store can find the version: a delta is of no use without its base."""
    return manifest.whole_tensors and not manifest.is_delta
