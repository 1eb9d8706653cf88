"""The sending half of the engines whose receivers map the sender's memory.

The sender tells a receiver of each segment once, and of each bucket where it lies; the receiver copies it out and acknowledges;
the sender uses the memory again when all have. All of that goes as JSON over a Unix socket, whose end of file tells of a peer's
death at once.

The announcement of a bucket carries, beside what `announce` puts there: ``segment`` and ``offset``; ``lasting``, whether the
bucket may be looked at where it lies; ``retired``, numbers of segments that are no longer used; and ``described``, the segment
itself, when this receiver hears of it for the first time. A single byte with the segment's file descriptors then follows, if the
kind has any.

The acknowledgement of a lasting bucket says whether it is ``viewed``. Who views a version says so later with a message of its
own, ``{"released": version}``, which may come between the acknowledgements of any other version.
"""

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
from ...deadline import Deadline
from ...errors import ProtocolError
from ...runtime.lifecycle import Lifecycle
from ...toolkit.bucket_messages import announce, checked_answer, choose
from .segment_arena import SegmentArena
from .segments import OwnedSegment, SegmentKind

_NO_SEGMENT = -1
_ROOM_S = 10.0
"""How long an announcement may wait for room in a socket, which holds more of them than are ever on their way."""


@dataclass
class _Showing:
    """What one receiver has been shown of one version."""

    unanswered: set[int] = field(default_factory=set)
    """Lasting buckets that it has not acknowledged: it may come to look at them."""
    viewed: bool = False
    """Whether it looks at one or more."""

    @property
    def over(self) -> bool:
        return not self.unanswered and not self.viewed


@dataclass(slots=True)
class _Posted:
    """A bucket that receivers have been told of."""

    bucket: Bucket
    waiting: set[str]
    """Who has not acknowledged it."""
    retired: dict[str, list[int]]
    """Segments that each receiver unmaps before it acknowledges it."""
    scratch: tuple[int, OwnedSegment] | None
    """What it was copied to."""


class SegmentSender(ViewableSender):
    """Tells receivers where buckets lie.

    Args:
        part: Name of this half for error messages, e.g. ``"shm sender trainer-0"``.
        kind: What its segments are.
        arena: Where they are, those in which the caller's buckets lie and those for copies of others.
        device: Where buckets live.
    """

    def __init__(self, part: str, kind: SegmentKind, arena: SegmentArena, device: torch.device) -> None:
        self._life = Lifecycle(part, self._release)
        self._kind = kind
        self._arena = arena
        self._device = device
        self._channels: dict[str, Channel] = {}
        self._known: dict[str, dict[int, OwnedSegment]] = {}
        """What each receiver may map. Holds it: device memory must not be freed under a mapping."""
        self._posted: deque[_Posted] = deque()
        self._scratch: list[tuple[int, OwnedSegment]] = []
        """For copies of buckets that lie elsewhere: those that no bucket is in."""
        self._copies: dict[int, list[int]] = {}
        """Segments with copies of lasting buckets that lie elsewhere, by version."""
        self._shown: dict[int, dict[str, _Showing]] = {}
        """By version and receiver."""

    def address(self) -> Address:
        """What the kind has to say."""
        with self._life.call():
            return self._kind.facts(self._device)

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Everybody is connected already."""
        with self._life.call():
            self._channels = dict(channels)
            for channel in self._channels.values():
                channel.belong_to(self._life)
            self._known = {name: {} for name in self._channels}

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:
        """Announce the bucket to each receiver."""
        with self._life.call():
            channels = choose(self._channels, receivers, self._life)
            number, segment, offset, scratch = self._place(bucket)
            details: dict[str, Any] = {"segment": number, "offset": offset}
            if bucket.lasting:
                details["lasting"] = True
            posted = _Posted(bucket, set(channels), {}, scratch)
            self._posted.append(posted)
            deadline = Deadline.after(_ROOM_S)
            for name, channel in channels.items():
                posted.retired[name] = self._announce(name, channel, bucket, segment, details, deadline)

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait until the receivers have copied all buckets but the last `pending` out, or look at those that are lasting."""
        with self._life.call():
            while len(self._posted) > pending:
                oldest = self._posted[0]
                what = f"bucket {oldest.bucket.index} of version {oldest.bucket.version} to be taken"
                while oldest.waiting:
                    self._listen(sorted(oldest.waiting), deadline, what)
                self._posted.popleft()
                if oldest.scratch is not None:
                    self._scratch.append(oldest.scratch)

    def _listen(self, names: Sequence[str], deadline: Deadline, what: str) -> None:
        """Wait until one of the receivers says something, and take note."""
        by_descriptor = {self._channels[name].fileno(): name for name in names}
        interest = dict.fromkeys(by_descriptor, select.POLLIN)
        for descriptor in self._life.wait_until(interest, deadline, what, ", ".join(names)):
            name = by_descriptor[descriptor]
            message = self._channels[name].receive_json(deadline, what)
            if not self._note_release(name, message):
                self._note_answer(name, message)
        deadline.check(what, part=self._life.part, peer=", ".join(names))  # who talks without end must not put it off

    def _note_answer(self, name: str, answer: dict[str, Any]) -> None:
        """A receiver acknowledges the oldest bucket that it has not acknowledged yet."""
        posted = next((each for each in self._posted if name in each.waiting), None)
        if posted is None:
            raise ProtocolError(
                f"a bucket was not taken: {answer.get('refused', answer)}.", part=self._life.part, peer=name
            )
        bucket = posted.bucket
        checked_answer(answer, self._channels[name], bucket)
        posted.waiting.discard(name)
        for gone in posted.retired[name]:  # it has unmapped them before it acknowledged
            del self._known[name][gone]
        if bucket.lasting:
            showing = self._shown[bucket.version][name]
            showing.unanswered.discard(bucket.index)
            showing.viewed = showing.viewed or answer.get("viewed") is True

    def _announce(
        self,
        name: str,
        channel: Channel,
        bucket: Bucket,
        segment: OwnedSegment | None,
        details: Mapping[str, Any],
        deadline: Deadline,
    ) -> list[int]:
        """Announce `bucket` to one receiver; the segments that it is told to unmap."""
        known, told = self._known[name], dict(details)
        descriptors: Sequence[int] = ()
        being_retired = {gone for posted in self._posted for gone in posted.retired.get(name, ())}
        if retired := sorted(known.keys() - self._arena.numbers() - being_retired):
            told["retired"] = retired
        number = details["segment"]
        if segment is not None and number not in known:
            description, descriptors = segment.describe()
            told["described"] = {**description, "nbytes": segment.nbytes, "descriptors": len(descriptors)}
            known[number] = segment
        if bucket.lasting:
            self._showing(bucket.version, name).unanswered.add(bucket.index)
        announce({name: channel}, bucket, deadline, **told)
        if descriptors:
            channel.send_descriptors(descriptors, deadline)
        return retired

    def _place(self, bucket: Bucket) -> tuple[int, OwnedSegment | None, int, tuple[int, OwnedSegment] | None]:
        """Number of the segment in which the bucket lies, that segment, and where; it is copied if it lies in none.

        Last the segment that can be used again when the bucket is done. The segment is ready to be announced.
        """
        data = bucket.data
        if not data.numel():
            return _NO_SEGMENT, None, 0, None
        if found := self._arena.find(data):
            number, segment, offset = found
            segment.publish(bucket.after)
            return number, segment, offset, None
        if bucket.lasting:
            number, segment = self._arena.make(data.numel(), self._device)
            self._copies.setdefault(bucket.version, []).append(number)
            scratch = None
        else:
            number, segment = scratch = self._free_scratch(data.numel())
        segment.publish(segment.copy_in(data, bucket.after))
        return number, segment, 0, scratch

    def _free_scratch(self, nbytes: int) -> tuple[int, OwnedSegment]:
        """A segment for a copy; nobody reads it, since those before have been acknowledged."""
        while self._scratch:
            number, segment = self._scratch.pop()
            if segment.nbytes >= nbytes:
                return number, segment
            self._arena.discard(number)
        generous = 1 << (nbytes - 1).bit_length()  # so that growing buckets do not replace it every time
        return self._arena.make(nbytes, self._device, generous_bytes=generous)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """See `ViewableSender.reclaim`."""
        with self._life.call():
            shown = self._shown.get(version, {})
            while waiting := [name for name, showing in shown.items() if not showing.over]:
                self._listen(waiting, deadline, f"version {version} to be released")
            self._shown.pop(version, None)
            for number in self._copies.pop(version, ()):
                self._arena.discard(number)

    def _showing(self, version: int, name: str) -> _Showing:
        return self._shown.setdefault(version, {}).setdefault(name, _Showing())

    def _note_release(self, name: str, message: Mapping[str, Any]) -> bool:
        """Whether `message` says that its sender has released a version, which may come between any acknowledgements."""
        version = message.get("released")
        if not isinstance(version, int):
            return False
        if showing := self._shown.get(version, {}).get(name):
            showing.viewed = False
        return True

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _release(self) -> None:
        for number, _ in (*self._scratch, *(each.scratch for each in self._posted if each.scratch is not None)):
            self._arena.discard(number)
        self._scratch.clear()
        self._posted.clear()
        for numbers in self._copies.values():
            for number in numbers:
                self._arena.discard(number)
        mapped = {id(segment): segment for known in self._known.values() for segment in known.values()}
        self._known.clear()
        self._kind.hang_up(self._channels.values(), mapped.values())
