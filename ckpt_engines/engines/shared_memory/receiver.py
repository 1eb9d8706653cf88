"""The receiving half of the engines whose receivers map the sender's memory. `_segment_sender` describes what is said."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...channels.channel import Address, Channel
from ...contract.bucket import Bucket
from ...contract.engine import Topology
from ...contract.viewing import ViewingReceiver
from ...deadline import Deadline
from ...errors import ProtocolError, TransportError
from ...runtime.lifecycle import Lifecycle
from ...toolkit.bucket_messages import acknowledge, choose, expect, refuse
from ...toolkit.waiting import poll_until
from .segments import MappedSegment, SegmentKind

_LAST_COPY_WAIT_S = 1.0
"""How long all copies that still run may keep a half from closing."""
_PAUSE_S = 0.001
"""Between two looks at whether a copy is over."""


@dataclass(slots=True)
class _Posted:
    bucket: Bucket
    channel: Channel
    copied: Callable[[], bool] | None = None
    begun: bool = False

    @property
    def what(self) -> str:
        return f"the copy of bucket {self.bucket.index} of version {self.bucket.version}"


class SegmentReceiver(ViewingReceiver):
    """Maps the senders' segments, and copies buckets out of them or shows them.

    Args:
        part: Name of this half for error messages, e.g. ``"shm receiver rollout-0"``.
        kind: What the segments are.
        device: Where buckets are copied to.
    """

    def __init__(self, part: str, kind: SegmentKind, device: torch.device) -> None:
        self._life = Lifecycle(part, self._release)
        self._kind = kind
        self._device = device
        self._channels: dict[str, Channel] = {}
        self._segments: dict[tuple[str, int], MappedSegment] = {}
        self._posted: deque[_Posted] = deque()
        self._viewed: dict[int, set[str]] = {}
        """Senders whose buckets of a version were viewed, by version."""

    def address(self) -> Address:
        """Empty: receivers knock."""
        return {}

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Look at where the senders' segments are."""
        with self._life.call():
            for sender, address in topology.senders.items():
                self._kind.check(address, self._device, self._life.part, sender)
            self._channels = dict(channels)
            for channel in self._channels.values():
                channel.belong_to(self._life)

    def post(self, bucket: Bucket, sender: str) -> None:
        """Take the bucket when it is waited for, behind those before."""
        with self._life.call():
            if bucket.data.device != self._device:
                message = f"a bucket is on {bucket.data.device}, the others on {self._device}."
                raise TransportError(message, part=self._life.part)
            self._posted.append(_Posted(bucket, choose(self._channels, [sender], self._life)[sender]))

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Read the announcements of what was posted, copy the buckets out, acknowledge those that are there."""
        with self._life.call():
            while len(self._posted) > pending:
                due = len(self._posted) if self._kind.copies_at_once else len(self._posted) - pending
                for posted, _ in zip(self._posted, range(due), strict=False):
                    if not posted.begun:
                        self._begin(posted, deadline)
                oldest = self._posted[0]
                if oldest.copied is not None:
                    self._wait(oldest, oldest.copied, deadline)
                acknowledge(oldest.channel, oldest.bucket, deadline)
                self._posted.popleft()

    def _begin(self, posted: _Posted, deadline: Deadline) -> None:
        bucket, channel = posted.bucket, posted.channel
        announced = expect(channel, bucket, deadline)
        with self._understanding(announced, channel.peer):
            self._follow(channel, announced, deadline, self._device)
            if bucket.nbytes:
                segment, offset = self._find(channel.peer, announced, bucket.nbytes)
                self._wait(posted, segment.written, deadline)
                posted.copied = segment.start_copy(offset, bucket.data, bucket.after)
        posted.begun = True

    def _wait(self, posted: _Posted, done: Callable[[], bool], deadline: Deadline) -> None:
        poll_until(done, self._life, deadline, posted.what, peer=posted.channel.peer)

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        """Wait for the announcement, map the bucket's segment, acknowledge."""
        with self._life.call():
            channel = choose(self._channels, [sender], self._life)[sender]
            bucket = Bucket(version, index, torch.empty(nbytes, dtype=torch.uint8, device="meta"), lasting=True)
            announced = expect(channel, bucket, deadline)
            if announced.get("lasting") is not True:
                refuse(channel, "it waits for one that it may look at", deadline)
                message = f"bucket {index} of version {version} cannot be viewed: it is not lasting."
                raise ProtocolError(message, part=self._life.part, peer=sender)
            with self._understanding(announced, sender):
                self._follow(channel, announced, deadline, self.copied_to)
                if not nbytes:
                    acknowledge(channel, bucket, deadline)
                    return torch.empty(0, dtype=torch.uint8)
                segment, offset = self._find(sender, announced, nbytes)
                data = segment.view(offset, nbytes)
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
    def _understanding(self, announced: Mapping[str, Any], sender: str) -> Iterator[None]:
        """Tell the sender's mistakes from ours."""
        try:
            yield
        except (TypeError, KeyError, AttributeError) as error:
            raise ProtocolError(f"bad announcement: {announced}.", part=self._life.part, peer=sender) from error

    def _follow(self, channel: Channel, announced: Mapping[str, Any], deadline: Deadline, device: torch.device) -> None:
        """Unmap what is retired and map what is described, to be copied to `device`."""
        self._forget(channel.peer, announced.get("retired", ()))
        described = announced.get("described")
        if described is None:
            return
        key = (channel.peer, announced["segment"])
        nbytes = described["nbytes"]
        if key in self._segments or not (isinstance(nbytes, int) and nbytes > 0 and isinstance(key[1], int)):
            raise KeyError(key)
        descriptors: list[int] = []
        if described["descriptors"]:
            descriptors = channel.receive_descriptors(deadline, "the segment's descriptors")
        self._segments[key] = self._kind.adopt(nbytes, described, descriptors, device)

    def _forget(self, sender: str, retired: Iterable[int]) -> None:
        for number in retired:
            _unmap([self._segments.pop((sender, number))], [self._channels[sender]])

    def _find(self, sender: str, announced: Mapping[str, Any], nbytes: int) -> tuple[MappedSegment, int]:
        offset = announced["offset"]
        segment = self._segments.get((sender, announced["segment"]))
        if segment is None or not isinstance(offset, int) or not 0 <= offset <= segment.nbytes - nbytes:
            raise ProtocolError(
                f"no {nbytes} bytes at {offset} of segment {announced['segment']}.", part=self._life.part, peer=sender
            )
        return segment, offset

    def close(self) -> None:
        """See `WeightReceiver.close`. What was viewed stays mapped for as long as somebody holds it."""
        self._life.close()

    def _release(self) -> None:
        _unmap(self._segments.values(), self._channels.values())  # before the channels end
        self._segments.clear()
        for channel in self._channels.values():
            channel.close()


def _unmap(segments: Iterable[MappedSegment], channels: Iterable[Channel]) -> None:
    """Unmap what is copied, and in the background what is not within a second.

    That a channel ends tells the sender that nothing is copied out of its memory any more. So copies of the `channels` stay open
    until all is over.
    """
    deadline = Deadline.after(_LAST_COPY_WAIT_S)
    left = [segment for segment in segments if not _unmapped(segment, deadline)]
    if not left:
        return
    held = []
    for channel in channels:
        with contextlib.suppress(OSError):  # it is closed
            held.append(socket.socket(fileno=os.dup(channel.fileno())))
    with contextlib.suppress(RuntimeError):  # a program that ends starts no threads, and its copies end with it
        threading.Thread(target=_unmap_later, args=(left, held), name="weightlane-unmap", daemon=True).start()


def _unmapped(segment: MappedSegment, deadline: Deadline | None) -> bool:
    """Wait until `segment` is copied, and unmap it; whether that has happened by the `deadline`."""
    while not segment.copied():
        if deadline is not None and deadline.expired:
            return False
        time.sleep(_PAUSE_S)
    segment.close()
    return True


def _unmap_later(segments: Iterable[MappedSegment], held: Iterable[socket.socket]) -> None:
    for segment in segments:
        _unmapped(segment, None)
    for sock in held:
        sock.close()
