"""`ReceiveLoop`: posts, flushes and verifies the buckets of a version, on all links of the session concurrently."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weightlane.ckpt_engines import Bucket, Deadline
from weightlane.ckpt_engines.links.bounded_calls import GRACE_S
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime, runtime_of
from weightlane.plugins import RunHooks

from ..codecs.delta.staged_delta import IncomingDelta
from ..version.bucket_checksums import checksum_of, checksum_of_bucket, compare, verify
from ..version.manifest import Manifest
from .bucket_sinks import BucketSink
from .live_stream import LiveStream
from .receive_session import ExpectedBucket, ReceiveSession, Source
from .relay import Relay


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A version that the rank has accepted and is to receive."""

    manifest: Manifest
    """Manifest of this rank's own stream."""
    sent: Manifest
    """Manifest of the version as sent."""
    session: ReceiveSession
    deadline: Deadline
    stall_s: float
    """The trainer's time limit for one bucket, in seconds."""
    viewed: bool = False
    """Whether buckets are viewed in their senders' memory."""
    stream: LiveStream | None = None
    """Destination of a version that is committed in place."""
    prepare_delta: Callable[[IncomingDelta], Any] | None = None
    """See `Subscriber.prepare_delta`."""
    relay: Relay | None = None

    def deadline_of(self, bucket: ExpectedBucket) -> Deadline:
        """The deadline for `bucket` to arrive."""
        return self.deadline.within(bucket.source.stall_s(bucket.sender, self.stall_s))


class ReceiveLoop:
    """Receives one version after another for participant `name`, into memory on `device`."""

    def __init__(self, name: str, device: torch.device, hooks: RunHooks) -> None:
        self._name = name
        self._runtime = runtime_of(device)
        self._hooks = hooks
        self._device_streams: list[Any] = []
        """One stream for each link. They are kept, because torch has few streams, reuses them, and caches memory for each."""
        self._late: list[Future[None]] = []
        """Transfers that had not ended when the last `receive` raised."""

    def receive(self, request: StageRequest, sink: BucketSink) -> None:
        """Receive every bucket of a version, verify its checksum, and pass it to the relay and to `sink`.

        Returns when the sink has every bucket and the relay has sent every bucket. Raises `CorruptBucketError`,
        `DeadlineExceededError`, or the error of an engine, the relay or the sink.
        """
        sources, relay = request.session.sources, request.relay
        self._wait_until_idle(request.deadline)
        checksums = _ChecksumCheck(request, wait_first=sink.needs_verified)
        transfer = _VersionTransfer(request, sink, checksums, self._name, self._runtime, self._hooks)
        self._device_streams += [self._runtime.stream_for(self) for _ in sources[len(self._device_streams) :]]
        tasks: list[tuple[Iterable[str], Callable[[], None]]] = [
            (source.hops, partial(transfer.receive_from, source, stream))
            for source, stream in zip(sources, self._device_streams, strict=False)
        ]
        if relay is not None:
            for lanes in request.session.relayed:
                receivers = dict.fromkeys(name for to in lanes.values() for name in to.receivers)
                tasks.append((receivers, partial(relay.send, lanes)))
        try:
            self._run(tasks, request.deadline)
        except Exception as error:
            if relay is not None:
                relay.give_up(error)
            raise
        checksums.verify_remaining()

    def _run(self, tasks: Sequence[tuple[Iterable[str], Callable[[], None]]], deadline: Deadline) -> None:
        """Run the tasks, each with the peers that it waits for, on threads of their own. Returns when all have ended.

        Raises the first error of a task at once; the others end when the session is closed. Raises `DeadlineExceededError` naming
        the peers if a call of the engine outlives its deadline.
        """
        if not tasks:
            return
        threads = DaemonThreads(len(tasks), f"weightlane-receive-{self._name}")
        running = [threads.submit(task) for _, task in tasks]
        threads.shutdown(wait=False)
        done, late = wait(running, deadline.remaining_s + GRACE_S, FIRST_EXCEPTION)
        self._late = list(late)
        for each in done:
            each.result()
        if late:
            peers = [peer for (names, _), each in zip(tasks, running, strict=True) if each in late for peer in names]
            raise deadline.error("buckets", part=self._name, peer=", ".join(peers))

    def _wait_until_idle(self, deadline: Deadline) -> None:
        """Wait until no transfer of an earlier version uses its memory any more."""
        if wait(self._late, deadline.remaining_s).not_done:
            raise deadline.error("an earlier version's buckets to be given up", part=self._name)
        self._late = []


@dataclass(frozen=True, slots=True)
class _ReceivedBucket:
    """A bucket posted to its link or viewed."""

    expected: ExpectedBucket
    data: torch.Tensor
    checksum: str
    """The checksum that its sender declared; empty for a bucket from a store."""
    started: float


@dataclass(frozen=True, slots=True)
class _VersionTransfer:
    """The transfer of one version. Each link has its own thread; see `ReceiveLoop` for the fields."""

    request: StageRequest
    sink: BucketSink
    checksums: _ChecksumCheck
    name: str
    runtime: DeviceRuntime
    hooks: RunHooks

    def receive_from(self, source: Source, device_stream: Any) -> None:
        """Receive the buckets of `source`: post the next bucket if its sender has declared it, else wait for the oldest one."""
        in_flight: deque[_ReceivedBucket] = deque()
        request, most = self.request, self.sink.most_in_flight
        with self.runtime.on(device_stream):
            for expected in request.session.expected_buckets(request.sent, request.manifest, source):
                while in_flight and (len(in_flight) >= most or not source.link.announced(expected.sender)):
                    self._finish_oldest(in_flight)
                if (memory := self.sink.memory_for(expected)) is None:
                    self._on_bucket(self._viewed(expected))
                else:
                    in_flight.append(self._posted(expected, memory))
            while in_flight:
                self._finish_oldest(in_flight)

    def _viewed(self, expected: ExpectedBucket) -> _ReceivedBucket:
        link, started, version = expected.source.link, time.perf_counter(), self.request.manifest.version
        deadline = self.request.deadline_of(expected)
        data, checksum = link.view(version, expected.sent_as, expected.nbytes, expected.sender, deadline)
        return _ReceivedBucket(expected, data, checksum, started)

    def _posted(self, expected: ExpectedBucket, memory: torch.Tensor) -> _ReceivedBucket:
        link, started, sent, index = expected.source.link, time.perf_counter(), self.request.sent, expected.sent_as
        after = self.runtime.record_event()
        bucket = Bucket(sent.version, index, memory, after, turn=expected.turn, part=sent.part(index))
        checksum = link.post(bucket, expected.sender, self.request.deadline_of(expected))
        return _ReceivedBucket(expected, memory, checksum, started)

    def _finish_oldest(self, in_flight: deque[_ReceivedBucket]) -> None:
        expected = in_flight[0].expected
        expected.source.link.flush(self.request.deadline_of(expected), len(in_flight) - 1)
        self._on_bucket(in_flight.popleft())

    def _on_bucket(self, received: _ReceivedBucket) -> None:
        """Verify a bucket, then pass it to the relay, the observers and the sink."""
        expected, data, relay = received.expected, received.data, self.request.relay
        self.checksums.verify(received)
        if relay is not None:
            relay.on_bucket(expected.sent_as, data, received.checksum)
        facts = {"seconds": time.perf_counter() - received.started, "nbytes": data.numel(), "participant": self.name}
        self.hooks.bucket_received(version=self.request.manifest.version, index=expected.sent_as, facts=facts)
        self.sink.on_bucket(expected, data)


class _ChecksumCheck:
    """Compares the buckets of one version with their checksums.

    The checksums of a stored version are in one message, sent once every bucket is stored. Buckets are hashed on arrival and
    compared once the message has arrived. With `wait_first`, the message is awaited before the first bucket.
    """

    def __init__(self, request: StageRequest, *, wait_first: bool) -> None:
        self._request = request
        self._stored = request.session.stored_checksums if request.manifest.checksummed else None
        self._checksums: Sequence[object] | None = None
        self._remaining: list[tuple[ExpectedBucket, str]] = []
        """Buckets that are not compared yet, with the checksums of their received bytes."""
        if wait_first:
            self._wait_for_stored()

    def _wait_for_stored(self) -> None:
        if self._stored is not None:
            self._checksums = self._stored.get(self._request.manifest.version, self._request.deadline)

    def verify(self, received: _ReceivedBucket) -> None:
        """Compare a bucket with its checksum, now or in `verify_remaining`. Raises `CorruptBucketError`."""
        manifest, expected = self._request.manifest, received.expected
        if not manifest.checksummed:
            return
        if self._stored is not None and self._checksums is None:
            self._remaining.append((expected, checksum_of(received.data)))
            return
        index = expected.sent_as
        checksum = received.checksum if self._checksums is None else checksum_of_bucket(self._checksums, index)
        verify(received.data, checksum, manifest.version, index, peer=expected.sender)

    def verify_remaining(self) -> None:
        """Compare the buckets that arrived before their checksums. Raises `CorruptBucketError` or `DeadlineExceededError`."""
        if not self._remaining:
            return
        self._wait_for_stored()
        for expected, found in self._remaining:
            checksum = checksum_of_bucket(self._checksums or (), expected.sent_as)
            compare(found, checksum, self._request.manifest.version, expected.sent_as, peer=expected.sender)
