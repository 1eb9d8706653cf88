"""How the buckets of one version come to a rollout rank: from all who send at once, verified, and handed on to others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weightlane.ckpt_engines import Bucket, Deadline
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.plugins import RunHooks

from ..version.bucket_checksums import checksum_of, checksum_of_bucket, compare, verify
from ..version.manifest import Manifest
from .links import ExpectedBucket, ReceiveLink, ReceiveSession, TransferTask, TransferTasks
from .live_stream import LiveStream
from .relay import Relay

_AT_A_TIME = 8
"""How many buckets that have a place of their own come through a link at a time."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A version to stage."""

    manifest: Manifest
    """Of what comes here."""
    sent: Manifest
    """Of all that is sent."""
    receiving: ReceiveSession
    deadline: Deadline
    stall_s: float
    stream: LiveStream | None = None
    """Where the buckets of a version go that is taken in place."""
    relaying: Relay | None = None
    """Who else gets buckets from here."""

    def length(self, arrival: ExpectedBucket) -> int:
        """Bytes of a bucket."""
        start, stop = self.manifest.window(arrival.index)
        return stop - start

    def by(self, arrival: ExpectedBucket) -> Deadline:
        """When a bucket has to be there."""
        return self.deadline.within(arrival.source.patience_s(self.stall_s))


@dataclass(frozen=True, slots=True)
class _Posted:
    """A bucket that is to come to its place."""

    arrival: ExpectedBucket
    data: torch.Tensor
    checksum: str
    began: float


class _ChecksumCheck:
    """Compares the buckets of one version with their checksums.

    Args:
        job: The version.
        first: Whether the checksums of a stored version are waited for at once, and not when all buckets are there.
    """

    def __init__(self, job: StageRequest, *, first: bool) -> None:
        self._job = job
        self._stored = job.receiving.stored_checksums if job.manifest.checksummed else None
        self._checksums: Sequence[object] | None = None
        self._later: list[tuple[ExpectedBucket, str]] = []
        if first:
            self._find()

    def _find(self) -> None:
        if self._stored is not None:
            self._checksums = self._stored.get(self._job.manifest.version, self._job.deadline)

    def came(self, posted: _Posted) -> None:
        """A bucket is there. Raises `CorruptBucketError`."""
        manifest, arrival = self._job.manifest, posted.arrival
        if not manifest.checksummed:
            return
        if self._stored is not None and self._checksums is None:
            self._later.append((arrival, checksum_of(posted.data)))
            return
        checksum = posted.checksum if self._checksums is None else checksum_of_bucket(self._checksums, arrival.sent_as)
        verify(posted.data, checksum, manifest.version, arrival.sent_as, peer=arrival.source.sender)

    def end(self) -> None:
        """All are there. Raises `CorruptBucketError`, or `DeadlineExceededError` if no checksums come."""
        if not self._later:
            return
        self._find()
        for arrival, found in self._later:
            checksum = checksum_of_bucket(self._checksums or (), arrival.sent_as)
            compare(found, checksum, self._job.manifest.version, arrival.sent_as, peer=arrival.source.sender)


class ReceiveLoop:
    """Of one rank; takes one version at a time.

    Args:
        name: The rank's participant.
        device: Where buckets come to.
        hooks: Told of every bucket that has come.
    """

    def __init__(self, name: str, device: torch.device, hooks: RunHooks) -> None:
        self._name = name
        self._runtime = runtime_of(device)
        self._hooks = hooks
        self._streams: list[Any] = []
        """One for each inlet, kept: torch has few, hands them out again and again, and keeps memory for each."""
        self._ways = TransferTasks(name)

    def settle(self, deadline: Deadline) -> None:
        """See `TransferTasks.settle`."""
        self._ways.settle(deadline)

    def receive_all(
        self,
        job: StageRequest,
        place: Callable[[ExpectedBucket], torch.Tensor],
        took: Callable[[ExpectedBucket, torch.Tensor], None] = lambda *_: None,
        *,
        at_a_time: int = _AT_A_TIME,
        checksums_first: bool = False,
    ) -> None:
        """Receive every bucket into the memory that `place` gives, verify it, have it handed on, and tell `took`.

        Those of one link come in their order, at most `at_a_time` of them, those of different links at the same time.
        Checksums of buckets that lie in a store come when all of them do; with `checksums_first` they are waited for, so that
        `took` sees nothing that was not verified. Returns when all that others get from here was handed on, too.
        """
        check = _ChecksumCheck(job, first=checksums_first)

        def came(posted: _Posted) -> None:
            check.came(posted)
            self._tell(job, posted.arrival, posted.data, posted.began)
            if job.relaying is not None:
                job.relaying.came(posted.arrival.sent_as, posted.data, posted.checksum)
            took(posted.arrival, posted.data)

        def through(number: int, inlet: ReceiveLink) -> None:
            with self._runtime.on(self._streams[number]):
                self._receive(job, inlet, place, came, at_a_time)

        self._run(job, through)
        check.end()

    def _receive(
        self,
        job: StageRequest,
        inlet: ReceiveLink,
        place: Callable[[ExpectedBucket], torch.Tensor],
        came: Callable[[_Posted], None],
        at_a_time: int,
    ) -> None:
        """Post bucket after bucket; see to the oldest while no further one can be posted at once."""
        under_way: deque[_Posted] = deque()

        def end_oldest() -> None:
            arrival = under_way[0].arrival
            arrival.source.link.flush(job.by(arrival), len(under_way) - 1)
            came(under_way.popleft())

        for arrival in job.receiving.arrivals(job.sent, job.manifest, inlet):
            link = arrival.source.link
            while under_way and (len(under_way) >= at_a_time or not link.announced(arrival.source.sender)):
                end_oldest()
            data, began, index = place(arrival), time.perf_counter(), arrival.sent_as
            after, part = self._runtime.recorded(), job.sent.part(index)
            bucket = Bucket(job.manifest.version, index, data, after, part=part)
            checksum = link.post(bucket, arrival.source.sender, job.by(arrival))
            under_way.append(_Posted(arrival, data, checksum, began))
        while under_way:
            end_oldest()

    def view_all(self, job: StageRequest, took: Callable[[ExpectedBucket, torch.Tensor], None]) -> None:
        """Look at every bucket in its sender's memory, verify it, and tell `took`."""

        def through(_: int, inlet: ReceiveLink) -> None:
            for arrival in job.receiving.arrivals(job.sent, job.manifest, inlet):
                began, source = time.perf_counter(), arrival.source
                version, nbytes = job.manifest.version, job.length(arrival)
                data, checksum = source.link.view(version, arrival.sent_as, nbytes, source.sender, job.by(arrival))
                if job.manifest.checksummed:
                    verify(data, checksum, version, arrival.sent_as, peer=source.sender)
                self._tell(job, arrival, data, began)
                took(arrival, data)

        self._run(job, through)

    def _run(self, job: StageRequest, through: Callable[[int, ReceiveLink], None]) -> None:
        receiving, relaying = job.receiving, job.relaying
        self._streams += [self._runtime.new_stream() for _ in receiving.inlets[len(self._streams) :]]
        ways = [
            TransferTask(list(inlet.sources), partial(through, number, inlet))
            for number, inlet in enumerate(receiving.inlets)
        ]
        if relaying is None:
            self._ways.run(ways, job.deadline)
            return
        ways += [TransferTask(link.receivers, partial(relaying.hand_on, link)) for link in receiving.onward]
        try:
            self._ways.run(ways, job.deadline)
        except Exception as error:
            relaying.give_up(error)
            raise

    def _tell(self, job: StageRequest, arrival: ExpectedBucket, data: torch.Tensor, began: float) -> None:
        facts = {"seconds": time.perf_counter() - began, "nbytes": data.numel(), "participant": self._name}
        self._hooks.bucket_received(version=job.manifest.version, index=arrival.sent_as, facts=facts)
