"""`SegmentSender`: announces buckets to receivers that map its memory. The package's docstring describes the messages."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...channels.channel import Address, Channel
from ...contract.bucket import Bucket
from ...contract.engine import Topology
from ...contract.viewing import ViewableSender
from ...errors import ProtocolError, StorageError
from ...toolkit.bucket_messages import announce, checked_answer, choose
from ...toolkit.halves import ConnectedHalf
from ...waits import Deadline
from .segments import Segment, SegmentArena

_NO_SEGMENT = -1
"""Number of the segment in the announcement of an empty bucket."""
_ANNOUNCE_S = 10.0
"""Longest wait, in seconds, of an announcement for room in a socket, which has room for more than are ever unread."""


@dataclass
class _Views:
    """One receiver's use of the lasting buckets of one version."""

    unanswered: set[int] = field(default_factory=set)
    """Indices of buckets that the receiver has not acknowledged, and so may still start to view."""
    viewed: bool = False
    """Whether the receiver views one or more of the buckets."""


@dataclass(slots=True)
class _Posted:
    """A bucket that was announced."""

    bucket: Bucket
    waiting: set[str]
    """Receivers that have not acknowledged the bucket."""
    retired: dict[str, list[int]]
    """Segments that each receiver unmaps before it acknowledges the bucket."""
    scratch: Segment | None
    """The segment that holds a copy of the bucket, free again when the bucket is done; None for a bucket without such a copy."""


class SegmentSender(ConnectedHalf, ViewableSender):
    """Announces to receivers where buckets lie. They live on `device`.

    The `arena` has the engine's segments: those that the caller allocated, and those for copies of other buckets.
    """

    def __init__(self, part: str, arena: SegmentArena, device: torch.device) -> None:
        super().__init__(part)
        self._arena = arena
        self._device = device
        self._known: dict[str, dict[int, Segment]] = {}
        """Segments that each receiver may map. This reference keeps them: device memory must not be freed while it is mapped."""
        self._posted: deque[_Posted] = deque()
        self._scratch: list[Segment] = []
        """Free segments for copies of buckets that lie in no segment."""
        self._copies: dict[int, list[Segment]] = {}
        """Segments with copies of lasting buckets that lay in no segment, by version."""
        self._views: dict[int, dict[str, _Views]] = {}
        """Use of the lasting buckets, by version and receiver."""

    def address(self) -> Address:
        """Return the facts that the arena needs about this sender: `SegmentArena.facts`."""
        with self._life.call():
            return self._arena.facts(self._device)

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        """Use `channels`, which the framework has connected."""
        with self._life.call():
            super().connect(topology, channels, deadline)
            self._known = {name: {} for name in self._channels}

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Announce the bucket to each receiver."""
        with self._life.call():
            channels = choose(self._channels, receivers, self._life)
            segment, offset, scratch = self._place(bucket)
            posted = _Posted(bucket, set(channels), {}, scratch)
            self._posted.append(posted)
            deadline = Deadline.after(_ANNOUNCE_S)
            for name in channels:
                posted.retired[name] = self._announce(name, bucket, segment, offset, deadline)

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait until the receivers have acknowledged all buckets but the last `pending`."""
        with self._life.call():
            while len(self._posted) > pending:
                oldest = self._posted[0]
                waiting_for = f"{oldest.bucket} to be taken"
                while oldest.waiting:
                    self._receive(sorted(oldest.waiting), deadline, waiting_for)
                self._posted.popleft()
                if oldest.scratch is not None:
                    self._scratch.append(oldest.scratch)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """See `ViewableSender.reclaim`."""
        with self._life.call():
            by_receiver = self._views.get(version, {})
            while viewing := [name for name, views in by_receiver.items() if views.unanswered or views.viewed]:
                self._receive(viewing, deadline, f"version {version} to be released")
            self._views.pop(version, None)
            for segment in self._copies.pop(version, ()):
                self._arena.discard(segment)

    def _place(self, bucket: Bucket) -> tuple[Segment | None, int, Segment | None]:
        """Find the bucket's segment, or copy the bucket to one. The segment is ready to be announced.

        Returns the segment (None for an empty bucket), the bucket's offset in it, and the segment if it is a scratch segment.
        """
        data = bucket.data
        if not data.numel():
            return None, 0, None
        if found := self._arena.find(data):
            segment, offset = found
            if bucket.after is not None:
                segment.publish(bucket.after)
            return segment, offset, None
        scratch = None
        if bucket.lasting:
            segment = self._arena.make(data.numel(), self._device)
            self._copies.setdefault(bucket.version, []).append(segment)
        else:
            segment = scratch = self._free_scratch(data.numel())
        segment.publish(segment.copy_in(data, bucket.after))
        return segment, 0, scratch

    def _free_scratch(self, nbytes: int) -> Segment:
        """Return a segment for a copy. No receiver reads it: the receivers of the bucket before have acknowledged that bucket."""
        while self._scratch:
            segment = self._scratch.pop()
            if segment.nbytes >= nbytes:
                return segment
            self._arena.discard(segment)
        power_of_two = 1 << (nbytes - 1).bit_length()  # so that growing buckets do not replace it every time
        try:
            return self._arena.make(power_of_two, self._device)
        except StorageError:
            return self._arena.make(nbytes, self._device)

    def _announce(
        self, name: str, bucket: Bucket, segment: Segment | None, offset: int, deadline: Deadline
    ) -> list[int]:
        """Announce `bucket` to one receiver. Returns the segments that the announcement retires."""
        known, channel = self._known[name], self._channels[name]
        number = _NO_SEGMENT if segment is None else segment.number
        details: dict[str, Any] = {"segment": number, "offset": offset}
        if bucket.lasting:
            details["lasting"] = True
            self._views.setdefault(bucket.version, {}).setdefault(name, _Views()).unanswered.add(bucket.index)
        being_retired = {gone for posted in self._posted for gone in posted.retired.get(name, ())}
        if retired := sorted(known.keys() - self._arena.numbers() - being_retired):
            details["retired"] = retired
        descriptors: Sequence[int] = ()
        if segment is not None and number not in known:
            description, descriptors = segment.describe()
            details["described"] = {**description, "nbytes": segment.nbytes, "descriptors": len(descriptors)}
            known[number] = segment
        announce({name: channel}, bucket, deadline, **details)
        if descriptors:
            channel.send_descriptors(descriptors, deadline)
        return retired

    def _receive(self, names: Sequence[str], deadline: Deadline, waiting_for: str) -> None:
        """Wait for a message from one of the receivers `names`, and handle a message of each receiver that has sent one."""
        peers = ", ".join(names)
        by_descriptor = {self._channels[name].fileno(): name for name in names}
        interest = dict.fromkeys(by_descriptor, select.POLLIN)
        for descriptor in self._life.wait_until(interest, deadline, waiting_for, peers):
            name = by_descriptor[descriptor]
            message = self._channels[name].receive_json(deadline, waiting_for)
            released = message.get("released")
            if isinstance(released, int):
                if views := self._views.get(released, {}).get(name):
                    views.viewed = False
            else:
                self._on_acknowledgement(name, message)
        deadline.check(
            waiting_for, part=self._life.part, peer=peers
        )  # a peer that talks without end must not postpone it

    def _on_acknowledgement(self, name: str, answer: dict[str, Any]) -> None:
        """Note that receiver `name` has acknowledged the oldest bucket that it has not acknowledged yet.

        Raises `ProtocolError` for any other answer.
        """
        posted = next((each for each in self._posted if name in each.waiting), None)
        if posted is None:
            message = f"a bucket was not taken: {answer.get('refused', answer)}."
            raise ProtocolError(message, part=self._life.part, peer=name)
        bucket = posted.bucket
        checked_answer(answer, self._channels[name], bucket)
        posted.waiting.discard(name)
        for number in posted.retired[name]:  # the receiver has unmapped them before it acknowledged
            del self._known[name][number]
        if bucket.lasting:
            views = self._views[bucket.version][name]
            views.unanswered.discard(bucket.index)
            views.viewed = views.viewed or answer.get("viewed") is True

    def _release(self) -> None:
        self._scratch += [posted.scratch for posted in self._posted if posted.scratch is not None]
        for segment in (*self._scratch, *(copy for copies in self._copies.values() for copy in copies)):
            self._arena.discard(segment)
        self._scratch.clear()
        self._copies.clear()
        self._posted.clear()
        mapped = {number: segment for known in self._known.values() for number, segment in known.items()}
        self._known.clear()
        self._arena.before_close(self._channels.values(), mapped.values())
