"""Halves of the engines whose receivers copy buckets straight out of the sender's memory: ``shm`` and ``cuda_ipc``.

A *segment* is a run of the sender's memory that another process can map. The sender tells a receiver of each segment once,
and of each bucket where it lies; the receiver copies it out and acknowledges; the sender uses the memory again when all
have. All of that goes as JSON over a Unix socket, whose end of file tells of a peer's death at once. What a segment is,
and how it is mapped and copied, is the `SegmentKind`'s business.

The announcement of a bucket carries, beside what `announce` puts there: ``segment`` and ``offset``; ``retired``, numbers of
segments that are no longer used; and ``described``, the segment itself, when this receiver hears of it for the first time.
A single byte with the segment's file descriptors then follows, if the kind has any.
"""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ._channel import Channel, accept_receivers, dial
from ._handshake import acknowledge, announce, await_acknowledgements, choose, expect
from ._lifecycle import Lifecycle
from ._local_socket import check_same_host, host_identity, listen_local, socket_name
from ._waiting import poll_until
from .contract import Address, Bucket, Mailbox, Topology, WeightReceiver, WeightSender
from .deadline import Deadline
from .errors import ProtocolError, StorageError

_NO_SEGMENT = -1
_MIB = 1 << 20


class OwnedSegment(ABC):
    """A segment in the process that made it."""

    nbytes: int
    data: torch.Tensor
    """All of it as contiguous one-dimensional uint8. Keeps the memory alive by itself."""

    @abstractmethod
    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """What a receiver needs to map it: JSON data, and file descriptors that stay the sender's."""

    def publish(self) -> None:  # noqa: B027 - host memory needs no such mark
        """Mark that whatever was written until now belongs to the bucket about to be announced."""

    def offset_of(self, data: torch.Tensor) -> int | None:
        """Where contiguous `data` lies in this segment, None when it does not."""
        offset = data.data_ptr() - self.data.data_ptr()
        return offset if 0 <= offset <= self.nbytes - data.numel() else None

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class MappedSegment(ABC):
    """A segment in a process that maps it."""

    nbytes: int

    @abstractmethod
    def copy_out(self, offset: int, into: torch.Tensor, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Copy as many bytes as `into` has from `offset` on, and return when they are there.

        ``wait(done)`` asks `done` until it is true, and raises when the deadline passes or the sender is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap it."""


class SegmentKind(ABC):
    """Makes and maps the segments of one half."""

    def facts(self) -> Mapping[str, Any]:
        """[sender] JSON data for this half's address."""
        return {}

    def check(self, facts: Address, part: str, peer: str) -> None:  # noqa: B027 - one host is enough for most
        """[receiver] Raise `TransportError` when segments of the sender with this address cannot be mapped here."""

    @abstractmethod
    def create(self, nbytes: int) -> OwnedSegment:
        """[sender] A new segment of at least `nbytes`; `StorageError` when there is too little memory."""

    @abstractmethod
    def adopt(
        self, nbytes: int, description: Mapping[str, Any], descriptors: Sequence[int], device: torch.device
    ) -> MappedSegment:
        """[receiver] Map a segment, to be copied from to `device`, and own `descriptors` whatever happens.

        `ProtocolError` when the description makes no sense, `TransportError` when it cannot be mapped.
        """

    def part_with(self, segments: Iterable[OwnedSegment], channels: Iterable[Channel]) -> None:
        """[sender] Let go of `segments`, which the receivers behind `channels` may still map, and close those."""
        for channel in channels:
            channel.close()
        for segment in segments:
            segment.close()


class SegmentSender(WeightSender):
    """Owns the memory and the listening socket.

    Args:
        part: Name of this half for error messages, e.g. ``"shm sender trainer-0"``.
        kind: What its segments are.
        socket_dir: Where receivers find its socket.
        limit_bytes: How much memory its segments may take together.
    """

    def __init__(self, part: str, kind: SegmentKind, *, socket_dir: str, limit_bytes: int) -> None:
        self._life = Lifecycle(part, self._release)
        self._kind = kind
        self._socket_dir = Path(socket_dir)
        self._limit_bytes = limit_bytes
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._channels: dict[str, Channel] = {}
        self._segments: dict[int, OwnedSegment] = {}
        self._known_to: dict[int, set[str]] = {}
        self._retired: dict[str, list[int]] = {}
        self._next_number = 0
        self._scratch = _NO_SEGMENT

    def address(self) -> Address:
        """Name of the socket in the socket directory, identity of the host, and what the kind adds."""
        with self._life.call():
            self._listen()
            assert self._path is not None
            return {"socket": self._path.name, "host": host_identity(), **self._kind.facts()}

    def _listen(self) -> socket.socket:
        if self._listener is None:
            self._listener, self._path = listen_local(self._socket_dir, self._life.part)
        return self._listener

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Let every receiver in, then remove the socket's name."""
        with self._life.call():
            listener = self._listen()
            for name, address in topology.receivers.items():
                check_same_host(address, self._life.part, name)
            self._channels = accept_receivers(
                listener, self._life, topology.session, topology.receivers, deadline, key=topology.key
            )
            self._stop_listening()
            for channel in self._channels.values():
                channel.send_json({}, deadline)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that receivers can map: a bucket that lies in it is not copied by `send`."""
        with self._life.call():
            return self._segments[self._new_segment(nbytes)].data[:nbytes]

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        """Announce the bucket to each receiver, then wait until all have copied it out."""
        with self._life.call():
            channels = choose(self._channels, receivers, self._life)
            number, offset = self._place(bucket.data)
            if number != _NO_SEGMENT:
                self._segments[number].publish()
            for name, channel in channels.items():
                self._ring(name, channel, bucket, number, offset, deadline)
            await_acknowledgements(channels, bucket, deadline)

    def _ring(self, name: str, channel: Channel, bucket: Bucket, number: int, offset: int, deadline: Deadline) -> None:
        details: dict[str, Any] = {"segment": number, "offset": offset}
        descriptors: Sequence[int] = ()
        if retired := self._retired.pop(name, None):
            details["retired"] = retired
        if number != _NO_SEGMENT and name not in self._known_to[number]:
            segment = self._segments[number]
            description, descriptors = segment.describe()
            details["described"] = {**description, "nbytes": segment.nbytes, "descriptors": len(descriptors)}
            self._known_to[number].add(name)
        announce({name: channel}, bucket, deadline, **details)
        if descriptors:
            channel.send(b"\0", deadline, descriptors)

    def _place(self, data: torch.Tensor) -> tuple[int, int]:
        """Segment and offset of `data`, copied into the scratch segment unless it lies in a segment already."""
        if not data.numel():
            return _NO_SEGMENT, 0
        for number, segment in self._segments.items():
            offset = segment.offset_of(data)
            if offset is not None:
                return number, offset
        if self._scratch == _NO_SEGMENT or self._segments[self._scratch].nbytes < data.numel():
            self._retire_scratch()
            generous = 1 << (data.numel() - 1).bit_length()  # so that growing buckets do not replace it every time
            self._scratch = self._new_segment(min(generous, max(data.numel(), self._room_bytes())))
        self._segments[self._scratch].data[: data.numel()].copy_(data)
        return self._scratch, 0

    def _room_bytes(self) -> int:
        return self._limit_bytes - sum(segment.nbytes for segment in self._segments.values())

    def _new_segment(self, nbytes: int) -> int:
        if nbytes > self._room_bytes():
            held = self._limit_bytes - self._room_bytes()
            raise StorageError(
                f"{nbytes / _MIB:.1f} MiB for buckets would exceed max_shared_mib ({self._limit_bytes // _MIB} MiB),"
                f" of which {held / _MIB:.1f} MiB are in use.",
                part=self._life.part,
                hint="Use smaller buckets, or raise checkpoint_engine.options.max_shared_mib.",
            )
        segment = self._kind.create(nbytes)
        number, self._next_number = self._next_number, self._next_number + 1
        self._segments[number] = segment
        self._known_to[number] = set()
        return number

    def _retire_scratch(self) -> None:
        """Give up the scratch segment. Nobody reads it: a send returns only when all receivers have copied."""
        number, self._scratch = self._scratch, _NO_SEGMENT
        if number == _NO_SEGMENT:
            return
        for name in self._known_to.pop(number):
            self._retired.setdefault(name, []).append(number)
        self._kind.part_with([self._segments.pop(number)], [])

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _stop_listening(self) -> None:
        if self._listener is not None and self._path is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _release(self) -> None:
        self._stop_listening()
        self._kind.part_with(self._segments.values(), self._channels.values())
        self._segments.clear()


class SegmentReceiver(WeightReceiver):
    """Maps the senders' segments and copies buckets out of them. Arguments as for `SegmentSender`."""

    def __init__(self, name: str, part: str, kind: SegmentKind, *, socket_dir: str) -> None:
        self._name = name
        self._life = Lifecycle(part, self._release)
        self._kind = kind
        self._socket_dir = Path(socket_dir)
        self._channels: dict[str, Channel] = {}
        self._segments: dict[tuple[str, int], MappedSegment] = {}

    def address(self) -> Address:
        """Identity of the host: receivers dial."""
        return {"host": host_identity()}

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Dial every sender in turn."""
        with self._life.call():
            for sender, address in topology.senders.items():
                check_same_host(address, self._life.part, sender)
                self._kind.check(address, self._life.part, sender)
                path = str(self._socket_dir / socket_name(address, self._life.part, sender))
                self._channels[sender], _ = dial(
                    path,
                    self._life,
                    deadline,
                    session=topology.session,
                    name=self._name,
                    peer=sender,
                    key=topology.key,
                )

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        """Wait for the announcement, copy the bucket out, acknowledge."""
        with self._life.call():
            channel = choose(self._channels, [sender], self._life)[sender]
            announced = expect(channel, bucket, deadline)
            try:
                self._forget(sender, announced.get("retired", ()))
                self._learn(channel, announced, bucket, deadline)
                if bucket.nbytes:
                    segment, offset = self._find(sender, announced, bucket.nbytes)
                    what = f"the copy of bucket {bucket.index} of version {bucket.version}"
                    segment.copy_out(
                        offset,
                        bucket.data,
                        lambda done: poll_until(done, self._life, deadline, what, watch={sender: channel}),
                    )
            except (TypeError, KeyError, AttributeError) as error:
                raise ProtocolError(f"bad announcement: {announced}.", part=self._life.part, peer=sender) from error
            acknowledge(channel, bucket, deadline)

    def _forget(self, sender: str, retired: Iterable[int]) -> None:
        for number in retired:
            self._segments.pop((sender, number)).close()

    def _learn(self, channel: Channel, announced: Mapping[str, Any], bucket: Bucket, deadline: Deadline) -> None:
        described = announced.get("described")
        if described is None:
            return
        key = (channel.peer, announced["segment"])
        nbytes = described["nbytes"]
        if key in self._segments or not (isinstance(nbytes, int) and nbytes > 0 and isinstance(key[1], int)):
            raise KeyError(key)
        descriptors: list[int] = []
        if described["descriptors"]:
            try:
                channel.receive(1, deadline, "the segment's descriptors", descriptors)
            except BaseException:
                for descriptor in descriptors:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
                raise
        self._segments[key] = self._kind.adopt(nbytes, described, descriptors, bucket.data.device)

    def _find(self, sender: str, announced: Mapping[str, Any], nbytes: int) -> tuple[MappedSegment, int]:
        offset = announced["offset"]
        segment = self._segments.get((sender, announced["segment"]))
        if segment is None or not isinstance(offset, int) or not 0 <= offset <= segment.nbytes - nbytes:
            raise ProtocolError(
                f"no {nbytes} bytes at {offset} of segment {announced['segment']}.", part=self._life.part, peer=sender
            )
        return segment, offset

    def close(self) -> None:
        """See `WeightReceiver.close`."""
        self._life.close()

    def _release(self) -> None:
        for segment in self._segments.values():  # first: that a channel ends tells the sender that nothing is mapped
            segment.close()
        self._segments.clear()
        for channel in self._channels.values():
            channel.close()
