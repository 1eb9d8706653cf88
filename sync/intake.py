"""How the buckets of one version come to a rollout rank: from all who send at once, verified, and handed on to others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from weightlane.ckpt_engines import Bucket, Deadline
from weightlane.plugins import RunHooks

from .live_stream import LiveStream
from .manifest import Manifest
from .receiving import Arrival, Receiving, Source, Way, Ways
from .relaying import Relaying
from .seal import verify


@dataclass(frozen=True, slots=True)
class Job:
    """A version to stage."""

    manifest: Manifest
    """Of what comes here."""
    sent: Manifest
    """Of all that is sent."""
    receiving: Receiving
    deadline: Deadline
    stall_s: float
    stream: LiveStream | None = None
    """Where the buckets of a version go that is taken in place."""
    relaying: Relaying | None = None
    """Who else gets buckets from here."""

    def length(self, arrival: Arrival) -> int:
        """Bytes of a bucket."""
        start, stop = self.manifest.window(arrival.index)
        return stop - start


class Intake:
    """Of one rank; takes one version at a time.

    Args:
        name: The rank's participant.
        hooks: Told of every bucket that has come.
    """

    def __init__(self, name: str, hooks: RunHooks) -> None:
        self._name = name
        self._hooks = hooks
        self._ways = Ways(name)

    def settle(self, deadline: Deadline) -> None:
        """See `Ways.settle`."""
        self._ways.settle(deadline)

    def receive_all(self, job: Job, receive: Callable[[Source, Arrival], None]) -> None:
        """Call `receive` for every bucket, in the order of its sender; for those of different senders at the same time.

        Returns when all that others get from here was handed on, too.
        """
        receiving, relaying = job.receiving, job.relaying

        def from_one(source: Source) -> None:
            for arrival in receiving.arrivals(job.sent, job.manifest, source):
                receive(source, arrival)

        ways = [Way([source.sender], partial(from_one, source)) for source in receiving.sources]
        if relaying is None:
            self._ways.run(ways, job.deadline)
            return
        ways += [Way(link.receivers, partial(relaying.hand_on, link)) for link in receiving.onward]
        try:
            self._ways.run(ways, job.deadline)
        except Exception as error:
            relaying.give_up(error)
            raise

    def receive_bucket(self, job: Job, source: Source, arrival: Arrival, data: torch.Tensor) -> None:
        """Receive one into `data`, of its length, and have it handed on."""
        started, deadline = time.perf_counter(), job.deadline.within(source.patience_s(job.stall_s))
        bucket = Bucket(job.manifest.version, arrival.sent_as, data, part=job.sent.part(arrival.sent_as))
        source.receiver.receive(bucket, source.sender, deadline)
        self._arrived(job, source, arrival, data, started, deadline)
        if job.relaying is not None:
            job.relaying.came(arrival.sent_as, data)

    def view_bucket(self, job: Job, source: Source, arrival: Arrival) -> torch.Tensor:
        """Look at one in its sender's memory."""
        started, deadline = time.perf_counter(), job.deadline.within(source.patience_s(job.stall_s))
        data = source.receiver.view(job.manifest.version, arrival.sent_as, job.length(arrival), source.sender, deadline)
        self._arrived(job, source, arrival, data, started, deadline)
        return data

    def _arrived(
        self, job: Job, source: Source, arrival: Arrival, data: torch.Tensor, started: float, deadline: Deadline
    ) -> None:
        version, index = job.manifest.version, arrival.sent_as
        if job.manifest.sealed:
            verify(data, job.receiving.seals.get(version, index, deadline), version, index, peer=source.sender)
        facts = {"seconds": time.perf_counter() - started, "nbytes": data.numel(), "participant": self._name}
        self._hooks.bucket_received(version=version, index=index, facts=facts)
