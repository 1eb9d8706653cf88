"""`SegmentReceiver`: maps the sender's segments, and copies or views buckets. The package's docstring describes the messages."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ...channels.channel import Channel
from ...contract.bucket import Bucket
from ...contract.engine import Topology
from ...contract.viewing import ViewingReceiver
from ...errors import ProtocolError, TransportError
from ...toolkit.bucket_messages import acknowledge, choose, expect, refuse
from ...toolkit.halves import ConnectedHalf
from ...waits import Deadline, poll_until
from .segments import SegmentArena, SegmentMapping, duplicate_sockets

_LAST_COPY_WAIT_S = 1.0
"""Longest time, in seconds, that running copies may delay the closing of a half."""
_PAUSE_S = 0.001
"""Pause between two checks that a copy is over: a copy of a bucket takes milliseconds."""


@dataclass(slots=True)
class _Posted:
    bucket: Bucket
    channel: Channel
    started: bool = False
    copied: Callable[[], bool] | None = None
    """Tells whether the copy is done; None for a copy that is done."""


class SegmentReceiver(ConnectedHalf, ViewingReceiver):
    """Maps the senders' segments by an `arena`, and copies buckets out of them to `device`, or views them."""

    def __init__(self, part: str, arena: SegmentArena, device: torch.device) -> None:
        super().__init__(part)
        self._arena = arena
        self._device = device
        self._mappings: dict[tuple[str, int], SegmentMapping] = {}
        """The mapped segments, by sender and number."""
        self._posted: deque[_Posted] = deque()
        self._viewed: dict[int, set[str]] = {}
        """Senders whose buckets of a version were viewed, by version."""

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:
        """Check that the senders' segments can be copied to this half's device."""
        with self._life.call():
            for sender, address in topology.senders.items():
                self._arena.check(address, self._device, self._life.part, sender)
            super().connect(topology, channels, deadline)

    def post(self, bucket: Bucket, sender: str) -> None:
        """Add the bucket to the posted ones; `flush` copies it."""
        with self._life.call():
            if bucket.data.device != self._device:
                message = f"a bucket is on {bucket.data.device}, the others on {self._device}."
                raise TransportError(message, part=self._life.part)
            self._posted.append(_Posted(bucket, choose(self._channels, [sender], self._life)[sender]))

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Read the announcements of the posted buckets, copy the buckets, and acknowledge those whose copy is done."""
        with self._life.call():
            while len(self._posted) > pending:
                due = len(self._posted) if self._arena.copies_in_background else len(self._posted) - pending
                for posted in islice(self._posted, due):
                    if not posted.started:
                        self._start_copy(posted, deadline)
                oldest = self._posted[0]
                if oldest.copied is not None:
                    self._wait_until(oldest.copied, oldest, deadline)
                acknowledge(oldest.channel, oldest.bucket, deadline)
                self._posted.popleft()

    def _start_copy(self, posted: _Posted, deadline: Deadline) -> None:
        bucket, channel = posted.bucket, posted.channel
        announcement = expect(channel, bucket, deadline)
        with self._checked(announcement, channel.peer):
            self._update_mappings(channel, announcement, deadline, self._device)
            if bucket.nbytes:
                mapping, offset = self._find(channel.peer, announcement, bucket.nbytes)
                self._wait_until(mapping.written, posted, deadline)
                posted.copied = mapping.start_copy(offset, bucket.data, bucket.after)
        posted.started = True

    def _wait_until(self, done: Callable[[], bool], posted: _Posted, deadline: Deadline) -> None:
        waiting_for = f"the copy of {posted.bucket}"
        poll_until(done, self._life, deadline, waiting_for, peer=posted.channel.peer)

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        """Wait for the announcement, map the bucket's segment, and acknowledge the bucket. See `ViewingReceiver.view`."""
        with self._life.call():
            channel = choose(self._channels, [sender], self._life)[sender]
            bucket = Bucket(version, index, torch.empty(nbytes, dtype=torch.uint8, device="meta"), lasting=True)
            announcement = expect(channel, bucket, deadline)
            if announcement.get("lasting") is not True:
                refuse(channel, "it waits for one that it may view", deadline)
                message = f"{bucket} cannot be viewed: it is not lasting."
                raise ProtocolError(message, part=self._life.part, peer=sender)
            with self._checked(announcement, sender):
                self._update_mappings(channel, announcement, deadline, self.copied_to)
                if not nbytes:
                    acknowledge(channel, bucket, deadline)
                    return torch.empty(0, dtype=torch.uint8)
                mapping, offset = self._find(sender, announcement, nbytes)
                data = mapping.view(offset, nbytes)
            self._viewed.setdefault(version, set()).add(sender)
            acknowledge(channel, bucket, deadline, viewed=True)
            return data

    def release(self, version: int, deadline: Deadline) -> None:
        """See `ViewingReceiver.release`."""
        with self._life.call():
            senders = self._viewed.get(version, set())
            while senders:
                sender = senders.pop()
                self._channels[sender].send_json({"released": version}, deadline)
            self._viewed.pop(version, None)

    @contextlib.contextmanager
    def _checked(self, announcement: Mapping[str, Any], sender: str) -> Iterator[None]:
        """Raise `ProtocolError` if an announcement lacks a field, or a field has a value that the protocol does not allow."""
        try:
            yield
        except (TypeError, KeyError, AttributeError) as error:
            raise ProtocolError(f"bad announcement: {announcement}.", part=self._life.part, peer=sender) from error

    def _update_mappings(
        self, channel: Channel, announcement: Mapping[str, Any], deadline: Deadline, device: torch.device
    ) -> None:
        """Unmap the segments that an announcement retires, and map the one that it describes, for copies to `device`."""
        for number in announcement.get("retired", ()):
            _unmap([self._mappings.pop((channel.peer, number))], [channel])
        described = announcement.get("described")
        if described is None:
            return
        key = (channel.peer, announcement["segment"])
        nbytes = described["nbytes"]
        if key in self._mappings or not (isinstance(nbytes, int) and nbytes > 0 and isinstance(key[1], int)):
            raise KeyError(key)
        descriptors: list[int] = []
        if described["descriptors"]:
            descriptors = channel.receive_descriptors(deadline, "the segment's descriptors")
        self._mappings[key] = self._arena.map_segment(nbytes, described, descriptors, device)

    def _find(self, sender: str, announcement: Mapping[str, Any], nbytes: int) -> tuple[SegmentMapping, int]:
        number, offset = announcement["segment"], announcement["offset"]
        mapping = self._mappings.get((sender, number))
        if mapping is None or not isinstance(offset, int) or not 0 <= offset <= mapping.nbytes - nbytes:
            message = f"no {nbytes} bytes at {offset} of segment {number}."
            raise ProtocolError(message, part=self._life.part, peer=sender)
        return mapping, offset

    def _release(self) -> None:
        """Unmap every segment; a viewed one stays mapped while a tensor refers to it."""
        _unmap(self._mappings.values(), self._channels.values())  # before the channels are closed
        self._mappings.clear()
        for channel in self._channels.values():
            channel.close()


def _unmap(mappings: Iterable[SegmentMapping], channels: Iterable[Channel]) -> None:
    """Unmap segments whose copies end within a second, and the others in the background.

    The end of a channel tells the sender that this receiver no longer copies from its memory. So duplicates of the channels'
    sockets stay open until all copies are over.
    """
    deadline = Deadline.after(_LAST_COPY_WAIT_S)
    copying = [mapping for mapping in mappings if not _unmapped(mapping, deadline)]
    if copying:
        arguments = (copying, duplicate_sockets(channels))
        with contextlib.suppress(RuntimeError):  # a program that ends starts no threads, and its copies end with it
            threading.Thread(target=_unmap_later, args=arguments, name="weightlane-unmap", daemon=True).start()


def _unmapped(mapping: SegmentMapping, deadline: Deadline | None) -> bool:
    """Wait until the copies of `mapping` are over, and unmap it. Returns whether that has happened by the `deadline`."""
    while not mapping.copied():
        if deadline is not None and deadline.expired:
            return False
        time.sleep(_PAUSE_S)
    mapping.close()
    return True


def _unmap_later(mappings: Iterable[SegmentMapping], open_sockets: Iterable[socket.socket]) -> None:
    for mapping in mappings:
        _unmapped(mapping, None)
    for sock in open_sockets:
        sock.close()
