"""`VersionReceiver`: receives the versions of a rollout rank, into staging memory, as deltas, or into the live weights."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weightlane.ckpt_engines import Bucket, Deadline, ReceiverLink
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime, runtime_of
from weightlane.ckpt_engines.runtime.threads import DaemonThreads
from weightlane.ckpt_engines.waits import GRACE_S
from weightlane.plugins import RunHooks

from ..codecs.delta.staged_delta import DeltaDecoding, IncomingDelta, StagedDelta
from ..send.pipeline import OutgoingBuckets
from ..version.bucket_checksums import checksum_of, compare, verify
from ..version.manifest import Manifest, aligned
from .live_stream import LiveStream
from .receive_session import ExpectedBucket, ReceiveSession, Source
from .staged_version import ViewedVersion, new_receive_memory
from .staging import Staging

_EXTRA_PER_HOP = 0.2
"""Extra time limit per hop from the trainer, as a share of `stall_s`, so that a stalled sender fails before its receiver."""
_MOST_IN_FLIGHT = 8
"""Most buckets posted to one link at a time: enough to keep the link busy while buckets are verified."""
_RELEASE_S = 5.0
"""Time limit for releasing a sender's memory, in seconds. It is short, because the sender soon allocates other memory instead."""


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


@dataclass(frozen=True, slots=True)
class BucketSink:
    """The destination of one version's buckets. The threads of several links call its functions concurrently."""

    memory_for: Callable[[ExpectedBucket], torch.Tensor | None]
    """Returns the memory to receive a bucket into, 1-D uint8 of its size; None to view the bucket in its sender's memory."""
    on_bucket: Callable[[ExpectedBucket, torch.Tensor], None] = lambda *_: None
    """Takes a received bucket."""
    most_in_flight: int = _MOST_IN_FLIGHT
    """Most buckets posted to one link at a time."""
    needs_verified: bool = False
    """Whether `on_bucket` needs verified buckets: the checksums of a stored version are then awaited before the first bucket."""


class VersionReceiver:
    """Receives one version after another for participant `name`, into memory on `device`. Used by the rank's staging thread.

    `live` is the runtime of the live model's device.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        live: DeviceRuntime,
        staging: Staging,
        hooks: RunHooks,
    ) -> None:
        self._name = name
        self._device = device
        self._runtime = runtime_of(device)
        self._live = live
        self._staging = staging
        self._hooks = hooks
        self._decoding_stream = live.stream_for(self)
        self._device_streams: list[Any] = []
        """One stream for each link. They are kept, because torch has few streams, reuses them, and caches memory for each."""
        self._live_buffer = torch.empty(0, dtype=torch.uint8, device=device)
        """Memory for one bucket of each sender, for versions that are committed in place."""
        self._viewed: dict[int, ReceiveSession] = {}
        """Sessions of the versions that are viewed in their senders' memory, by version."""
        self._late: list[Future[None]] = []
        """Transfers that had not ended when the last `receive` raised."""

    def receive(self, request: StageRequest) -> Callable[[], None]:
        """Receive and verify a version. Returns the call that stages it, once every bucket was received and relayed.

        Raises `CorruptBucketError`, `DeadlineExceededError`, or the error of an engine, the relay, decoding or `request.stream`.
        """
        manifest, stream, staging = request.manifest, request.stream, self._staging
        if request.viewed:
            self._note_viewed(manifest.version, request.session)
        if stream is not None:
            self._receive_live(request, stream)
            stream.announce()  # a version without buckets is ready, too
            return stream.finish
        if manifest.is_delta:
            delta = self._receive_delta(request)
            if request.prepare_delta is None:
                return partial(staging.apply, delta)
            return partial(staging.complete_prepared, manifest.version, delta)
        if request.viewed:
            views: dict[int, torch.Tensor] = {}
            self._transfer(request, BucketSink(lambda _: None, lambda each, data: views.update({each.index: data})))
            if (viewed := ViewedVersion.of(manifest, views)) is not None:
                return partial(staging.complete_viewed, viewed)
            memory = staging.memory(manifest)
            for index, view in views.items():
                start, stop = manifest.window(index)
                memory[start:stop].copy_(view)
        else:
            memory = staging.memory(manifest)
            self._transfer(request, BucketSink(lambda each: memory[each.offset : each.offset + each.nbytes]))
        return partial(staging.complete, manifest)

    def _receive_live(self, request: StageRequest, stream: LiveStream) -> None:
        """Pass every bucket to the stream: a view, or in the buffer of its sender."""
        buffers = {} if request.viewed else self._buffers(request)

        def memory_for(bucket: ExpectedBucket) -> torch.Tensor | None:
            return buffers[bucket.source.link, bucket.sender][: bucket.nbytes] if buffers else None

        # A sender's next bucket is received into the same buffer, so a bucket must be written before the next is posted.
        sink = BucketSink(memory_for, lambda each, data: stream.offer(each.index, data), 1, needs_verified=True)
        self._transfer(request, sink)

    def _receive_delta(self, request: StageRequest) -> Any:
        """Decode each segment of a delta while later buckets are in flight. Returns the prepared delta."""
        prepare = request.prepare_delta or StagedDelta.of
        # A prepared delta may be on the live model's device, also if buckets are received on another one.
        decoding = DeltaDecoding(
            request.manifest, prepare, request.deadline, self._name, self._live, self._decoding_stream
        )

        def memory_for(bucket: ExpectedBucket) -> torch.Tensor:
            return torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)

        # Two in flight, since each takes memory in addition to the decoded delta.
        sink = BucketSink(memory_for, lambda each, data: decoding.arrived(each.index, data), 2, needs_verified=True)
        try:
            self._transfer(request, sink)
        except Exception as error:
            decoding.give_up(error)
            raise
        return decoding.result()

    def _transfer(self, request: StageRequest, sink: BucketSink) -> None:
        """Receive every bucket of a version, verify its checksum, relay it, and pass it to `sink`."""
        sources = request.session.sources
        self._wait_until_idle(request.deadline)
        transfer = _VersionTransfer(request, sink, self._name, self._runtime, self._hooks)
        self._device_streams += [self._runtime.stream_for(self) for _ in sources[len(self._device_streams) :]]
        tasks: list[tuple[Iterable[str], Callable[[], None]]] = [
            (source.hops, partial(transfer.receive_from, source, stream))
            for source, stream in zip(sources, self._device_streams, strict=False)
        ]
        for buckets in transfer.relayed:
            receivers = dict.fromkeys(name for to in buckets.values() for name in to.receivers)
            tasks.append((receivers, partial(transfer.outgoing.send, buckets)))
        try:
            self._run(tasks, request.deadline)
        except Exception as error:
            transfer.outgoing.give_up(error)
            raise
        transfer.verify_remaining()

    def _run(self, tasks: Sequence[tuple[Iterable[str], Callable[[], None]]], deadline: Deadline) -> None:
        """Run the tasks, each with the peers that it waits for, on threads of their own. Returns when all have ended.

        Raises the first error of a task at once; the others end when the session is closed. Raises `DeadlineExceededError` naming
        the peers if a call of the engine outlives its deadline.
        """
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

    def _buffers(self, request: StageRequest) -> dict[tuple[ReceiverLink, str], torch.Tensor]:
        """The buffer of each pair of sender and link: an engine that can only broadcast has several links between two ranks."""
        senders = [(source.link, sender) for source in request.session.sources for sender in source.hops]
        total = request.session.live_bytes(request.manifest)
        if self._live_buffer.numel() < total:
            self.free_buffer()  # before the new memory is allocated
            self._live_buffer = new_receive_memory(total, self._device, self._live)
        nbytes = aligned(request.manifest.largest_bucket_bytes)
        return {sender: self._live_buffer[number * nbytes :] for number, sender in enumerate(senders)}

    def _note_viewed(self, version: int, session: ReceiveSession) -> None:
        # Views of older sessions cannot be released: their senders have allocated other memory.
        self._viewed = {viewed: other for viewed, other in self._viewed.items() if other.name == session.name}
        self._viewed[version] = session

    def release(self, version: int) -> None:
        """Release the memory of a viewed `version` to its senders. Raises the engine's error."""
        session = self._viewed.pop(version, None)
        for source in session.sources if session is not None else ():
            source.link.release(version, Deadline.after(_RELEASE_S))

    def free_buffer(self) -> None:
        """Free the memory kept between versions."""
        self._live_buffer = torch.empty(0, dtype=torch.uint8, device=self._device)


@dataclass(frozen=True, slots=True)
class _ReceivedBucket:
    """A bucket posted to its link or viewed."""

    expected: ExpectedBucket
    data: torch.Tensor
    checksum: str
    """The checksum that its sender declared; empty for a bucket from a store."""
    started: float


class _VersionTransfer:
    """The transfer of one version. Each link has its own thread; see `VersionReceiver` for the arguments.

    A verified bucket that others need is relayed from the memory that it is in. Receiving never waits for that, and each link
    sends the buckets of its lanes in order. A slow receiver therefore delays only the receivers after it in the route, and no two
    ranks wait for each other.

    The checksums of a stored version are in one message, sent once every bucket is stored. Buckets are hashed on arrival and
    compared once the message has arrived, unless the sink needs verified buckets.
    """

    def __init__(
        self, request: StageRequest, sink: BucketSink, name: str, runtime: DeviceRuntime, hooks: RunHooks
    ) -> None:
        self._request, self._sink, self._name, self._runtime, self._hooks = request, sink, name, runtime, hooks
        self._stored = request.session.stored_checksums if request.manifest.checksummed else None
        self._checksums: Sequence[str] | None = None
        """The stored checksums; None until they are needed."""
        self._remaining: list[tuple[ExpectedBucket, str]] = []
        """Buckets that are not compared yet, with the checksums of their received bytes."""
        self.outgoing = OutgoingBuckets(
            request.manifest.version, request.deadline, request.stall_s, name, self._on_relayed
        )
        """Verified buckets that this rank relays."""
        self.relayed = [
            {index: to for lane, to in lanes.items() for index in request.sent.buckets_of(lane)}
            for lanes in request.session.relayed
        ]
        """For each link on which this rank relays, the destinations of the buckets, by index in the version as sent."""
        self._is_relayed = {index for buckets in self.relayed for index in buckets}
        if sink.needs_verified:
            self._wait_for_stored()

    def receive_from(self, source: Source, device_stream: Any) -> None:
        """Receive the buckets of `source`: post the next bucket if its sender has declared it, else wait for the oldest one."""
        in_flight: deque[_ReceivedBucket] = deque()
        request, most = self._request, self._sink.most_in_flight
        with self._runtime.on(device_stream):
            for expected in request.session.expected_buckets(request.sent, request.manifest, source):
                while in_flight and (len(in_flight) >= most or not source.link.announced(expected.sender)):
                    self._finish_oldest(in_flight)
                if (memory := self._sink.memory_for(expected)) is None:
                    self._on_bucket(self._viewed(expected))
                else:
                    in_flight.append(self._posted(expected, memory))
            while in_flight:
                self._finish_oldest(in_flight)

    def _viewed(self, expected: ExpectedBucket) -> _ReceivedBucket:
        link, started, version = expected.source.link, time.perf_counter(), self._request.manifest.version
        deadline = self._deadline_of(expected)
        data, checksum = link.view(version, expected.sent_as, expected.nbytes, expected.sender, deadline)
        return _ReceivedBucket(expected, data, checksum, started)

    def _posted(self, expected: ExpectedBucket, memory: torch.Tensor) -> _ReceivedBucket:
        link, started, sent, index = expected.source.link, time.perf_counter(), self._request.sent, expected.sent_as
        after = self._runtime.record_event()
        bucket = Bucket(sent.version, index, memory, after, turn=expected.turn, part=sent.part(index))
        checksum = link.post(bucket, expected.sender, self._deadline_of(expected))
        return _ReceivedBucket(expected, memory, checksum, started)

    def _finish_oldest(self, in_flight: deque[_ReceivedBucket]) -> None:
        expected = in_flight[0].expected
        expected.source.link.flush(self._deadline_of(expected), len(in_flight) - 1)
        self._on_bucket(in_flight.popleft())

    def _on_bucket(self, received: _ReceivedBucket) -> None:
        """Verify a bucket, then relay it, and pass it to the observers and the sink."""
        expected, data, version = received.expected, received.data, self._request.manifest.version
        self._verify(received)
        if expected.sent_as in self._is_relayed:
            self.outgoing.put(Bucket(version, expected.sent_as, data), received.checksum)
        facts = {"seconds": time.perf_counter() - received.started, "nbytes": data.numel(), "participant": self._name}
        self._hooks.bucket_received(version=version, index=expected.sent_as, facts=facts)
        self._sink.on_bucket(expected, data)

    def _on_relayed(self, version: int, index: int, nbytes: int, seconds: float) -> None:
        facts = {"seconds": seconds, "nbytes": nbytes, "participant": self._name, "relayed": True}
        self._hooks.bucket_sent(version=version, index=index, facts=facts)

    def _deadline_of(self, bucket: ExpectedBucket) -> Deadline:
        """The deadline for `bucket` to arrive."""
        hops = bucket.source.hops[bucket.sender]
        return self._request.deadline.within(self._request.stall_s * (1 + _EXTRA_PER_HOP * hops))

    def _wait_for_stored(self) -> None:
        if self._stored is not None:
            sent = self._request.sent
            self._checksums = self._stored.get(sent.version, sent.bucket_count, self._request.deadline)

    def _verify(self, received: _ReceivedBucket) -> None:
        """Compare a bucket with its checksum, now or in `verify_remaining`. Raises `CorruptBucketError`."""
        manifest, expected = self._request.manifest, received.expected
        if not manifest.checksummed:
            return
        if self._stored is not None and self._checksums is None:
            self._remaining.append((expected, checksum_of(received.data)))
            return
        index = expected.sent_as
        checksum = received.checksum if self._checksums is None else self._checksums[index]
        verify(received.data, checksum, manifest.version, index, peer=expected.sender)

    def verify_remaining(self) -> None:
        """Compare the buckets that arrived before their checksums. Raises `CorruptBucketError` or `DeadlineExceededError`."""
        if not self._remaining:
            return
        self._wait_for_stored()
        assert self._checksums is not None, "only stored versions have remaining buckets"
        for expected, found in self._remaining:
            index = expected.sent_as
            compare(found, self._checksums[index], self._request.manifest.version, index, peer=expected.sender)
