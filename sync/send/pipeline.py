"""Several buckets on their way at a time: while the engine sends some, the next ones are made ready and checksummed."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

from weightlane.ckpt_engines import Bucket, ClosedError, Deadline, SenderLink, Topology
from weightlane.ckpt_engines.links.bounded_calls import GRACE_S, HINT, result_of
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime

from ..version.bucket_checksums import CHECKSUMS_FILE, StoredChecksums, checksum_of, checksums_document
from ..version.manifest import Manifest
from ..version.safetensors_files import version_files
from .bucket_source import BucketSource

_PART = "send pipeline"
_KEPT_CHECKSUMS = 2
"""Of how many versions that were sent last checksums are kept: the one before the last may still be committed."""

OnSent = Callable[[int, int, int, float], None]
"""Told of every sent bucket: version, index, bytes, seconds."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a bucket goes."""

    link: SenderLink
    receivers: Sequence[str]


@dataclass(frozen=True, slots=True)
class _ReadyBucket:
    """A bucket that can be sent."""

    bucket: Bucket
    to: Destination
    checksum: str


class BucketsInFlight:
    """Buckets on their way through a rank's links. Used by one thread.

    Args:
        deadline: For all of them.
        stall_s: Longest time for one, in seconds.
        on_sent: Told of each when its memory may be overwritten.
    """

    def __init__(self, deadline: Deadline, stall_s: float, on_sent: OnSent | None = None) -> None:
        self._deadline = deadline
        self._stall_s = stall_s
        self._on_sent = on_sent
        self._under_way: deque[tuple[Bucket, SenderLink, float]] = deque()
        self._on: Counter[SenderLink] = Counter()

    def __len__(self) -> int:
        return len(self._under_way)

    def post(self, bucket: Bucket, to: Destination, checksum: str) -> None:
        """Begin to send a bucket. Raises what the link raises."""
        to.link.post(bucket, to.receivers, self._deadline.within(self._stall_s), checksum)
        self._under_way.append((bucket, to.link, time.perf_counter()))
        self._on[to.link] += 1

    def end_oldest(self) -> None:
        """Wait until the oldest is done. Raises what the link raises."""
        bucket, link, started = self._under_way[0]
        link.flush(self._deadline.within(self._stall_s), self._on[link] - 1)
        self._on[link] -= 1
        self._under_way.popleft()
        if self._on_sent is not None:
            self._on_sent(bucket.version, bucket.index, bucket.nbytes, time.perf_counter() - started)

    def end_all(self) -> None:
        """Wait until all are done. Raises what the links raise."""
        while self._under_way:
            self.end_oldest()


class SendPipeline:
    """Sends versions through a rank's links, which are called one call at a time.

    Args:
        session: Name of the connection.
        links: Closed by their owner. Of an engine that stores there is one.
        runtime: Of the device on which buckets live. Packing and checksums are on the stream that is current for the calling
            thread.
        stored_checksums: Where readers of a store look for checksums; None where receivers get them ahead of each bucket.
        on_sent: Called on the pipeline's thread.
    """

    def __init__(
        self,
        session: str,
        links: Sequence[SenderLink],
        runtime: DeviceRuntime,
        stored_checksums: StoredChecksums | None = None,
        on_sent: OnSent | None = None,
    ) -> None:
        self.session = session
        self._links = list(links)
        self._runtime = runtime
        self._stored_checksums = stored_checksums
        self._on_sent = on_sent
        self._checksums: dict[int, list[str]] = {}
        """Of versions that may be committed, with a persistent engine."""
        self._thread = DaemonThreads(1, "weightlane-send")
        self.sending: Future[None] | None = None
        """The version that is being sent, or was sent last. Until it is done somebody may read the memory it is sent from."""
        self._turn = threading.Lock()
        """Held while an engine's half that stores is called: one call at a time."""

    def connect(self, topology: Topology, deadline: Deadline) -> None:
        """Connect the link, if there is but one."""
        (link,) = self._links
        connecting = self._thread.submit(link.connect, topology, deadline)
        result_of(connecting, deadline, "the engine to connect", _PART)

    def send_version(
        self,
        manifest: Manifest,
        source: BucketSource,
        deadline: Deadline,
        *,
        destinations: Mapping[int, Destination],
        buckets: Iterable[int] | None = None,
        stall_s: float = float("inf"),
    ) -> int:
        """Checksum and send `buckets` of `manifest`, by default all, each to where `destinations` says; returns the bytes sent.

        A bucket that goes to nobody is not sent. If files hold whole tensors, the engine is a persistent one, and told of
        every version that is sent in full. No bucket may take longer than `stall_s` seconds. Raises what the engine or the
        source raises.
        """
        version, stored = manifest.version, _is_stored(manifest)
        going = _ReadyQueue()
        sending = self.sending = self._thread.submit(self._send, going, manifest, deadline, stall_s)
        checksums: list[str] = []
        total = 0
        try:
            for index in range(manifest.bucket_count) if buckets is None else buckets:
                to = destinations[index]
                if not to.receivers and not stored:
                    continue
                if not going.has_room(source.most_at_a_time, deadline):
                    break  # why it has failed is said below
                data = source.bucket(index)
                checksum = checksum_of(data) if manifest.checksummed else ""
                checksums.append(checksum)
                after = self._runtime.recorded()
                bucket = Bucket(version, index, data, after, lasting=manifest.lasting, part=manifest.part(index))
                going.put(_ReadyBucket(bucket, to, checksum))
                total += data.numel()
        except BaseException:
            going.end(complete=False)
            raise
        going.end(complete=True)
        result_of(sending, deadline, f"the engine to send version {version}", _PART)
        if manifest.checksummed and self._stored_checksums is not None:
            self._stored_checksums.put(version, checksums)
            if stored:
                self._checksums[version] = checksums
                while len(self._checksums) > _KEPT_CHECKSUMS:
                    del self._checksums[next(iter(self._checksums))]
        return total

    def _send(self, going: _ReadyQueue, manifest: Manifest, deadline: Deadline, stall_s: float) -> None:
        """[pipeline's thread] Send what is ready until there is no more; while nothing new is, wait for what is under way."""
        outflow = BucketsInFlight(deadline, stall_s, self._on_sent)
        try:
            if _is_stored(manifest):
                (link,) = self._links
                with self._turn:
                    link.open_version(version_files(manifest), deadline)
            while True:
                ready = going.take(wait_by=None if outflow else deadline, room=len(outflow) < going.most)
                if ready is not None:
                    with self._turn:
                        outflow.post(ready.bucket, ready.to, ready.checksum)
                elif outflow:
                    with self._turn:
                        outflow.end_oldest()
                    going.ended_one()
                elif going.ended(deadline, f"the next bucket of version {manifest.version} to be ready"):
                    return
        except BaseException:
            going.fail()
            raise

    def committing(self, version: int) -> Callable[[int, Deadline], None]:
        """What commits `version`, which serves, however many others are sent before it is called; see `commit_version`."""
        checksums = self._checksums.pop(version, None)
        return partial(
            self.commit_version, documents={} if checksums is None else {CHECKSUMS_FILE: checksums_document(checksums)}
        )

    def commit_version(self, version: int, deadline: Deadline, *, documents: Mapping[str, str]) -> None:
        """Have readers of a store find `version` from now on, with these `documents`. Raises what the engine raises.

        Unlike sending it goes on when the pipeline is closed meanwhile.
        """
        (link,) = self._links
        what = f"version {version} to be committed"

        def commit() -> None:
            if not self._turn.acquire(timeout=deadline.remaining_s):
                raise deadline.error(f"{what} after what is being sent", part=_PART)
            try:
                link.commit_version(version, documents, deadline)
            finally:
                self._turn.release()

        thread = DaemonThreads(1, "weightlane-commit")
        committing = thread.submit(commit)
        thread.shutdown()
        result_of(committing, deadline, what, _PART)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """Return once no receiver looks at lasting buckets of `version`. Raises what the engine raises."""

        def reclaim() -> None:
            for link in self._links:
                link.reclaim(version, deadline)

        self._wait_for(f"version {version} to be given back", reclaim, deadline)

    def _wait_for(self, what: str, call: Callable[[], None], deadline: Deadline) -> None:
        closed = ClosedError(f"closed while waiting for {what}.", part=_PART)
        try:
            done = self._thread.submit(call)
        except RuntimeError as error:  # the executor takes nothing any more
            raise closed from error
        try:
            result_of(done, deadline, what, _PART)
        except CancelledError as error:
            raise closed from error

    def close(self) -> None:
        """Let the sending thread end; the links themselves are closed by their owner. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class _ReadyQueue:
    """Buckets that one thread makes ready and another one sends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[_ReadyBucket] = deque()
        self._left = 0
        """How many were made ready and are not done."""
        self._over = False
        self._failed = False
        self.most = 1
        """How many may be under way."""

    def has_room(self, most: int, deadline: Deadline) -> bool:
        """[maker] Wait until fewer than `most` are made ready and not done; False if sending has failed."""
        with self._changed:
            self.most = most
            self._changed.wait_for(lambda: self._left < most or self._failed, deadline.remaining_s + GRACE_S)
            if self._left >= most and not self._failed:
                raise deadline.error("the engine to send a bucket", part=_PART, hint=HINT)
            return not self._failed

    def put(self, ready: _ReadyBucket) -> None:
        """[maker] A bucket can be sent."""
        with self._changed:
            self._ready.append(ready)
            self._left += 1
            self._changed.notify_all()

    def end(self, *, complete: bool) -> None:
        """[maker] There are no more; if not `complete`, nor is anything worth sending that is ready."""
        with self._changed:
            self._over = True
            if not complete:
                self._ready.clear()
            self._changed.notify_all()

    def take(self, *, wait_by: Deadline | None, room: bool) -> _ReadyBucket | None:
        """[sender] The next one if there is one, or when there is one by `wait_by`; None also without `room`, or at the end."""
        with self._changed:
            if wait_by is not None:
                self._changed.wait_for(lambda: self._ready or self._over, wait_by.remaining_s + GRACE_S)
            return self._ready.popleft() if self._ready and room else None

    def ended(self, deadline: Deadline, what: str) -> bool:
        """[sender] Whether the maker has ended and everything was taken; raises if it has not by `deadline`."""
        with self._changed:
            if self._ready or not self._over:
                deadline.check(what, part=_PART)
                return False
            return True

    def ended_one(self) -> None:
        """[sender] The oldest that was taken is done."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def fail(self) -> None:
        """[sender] Nothing is sent any more."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


def _is_stored(manifest: Manifest) -> bool:
    """Whether it is a version that readers of a store can find: a delta is of no use without its base."""
    return manifest.whole_tensors and not manifest.is_delta
