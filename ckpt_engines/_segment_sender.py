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
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._channel import Channel, accept_receivers
from ._handshake import announce, await_acknowledgements, choose
from ._lifecycle import Lifecycle
from ._local_socket import check_same_host, host_identity, listen_local
from ._segment_arena import SegmentArena
from ._segments import OwnedSegment, SegmentKind
from .contract import Address, Bucket, Mailbox, Topology, WeightSender
from .deadline import Deadline
from .errors import ProtocolError

_NO_SEGMENT = -1


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


class SegmentSender(WeightSender):
    """Tells receivers where buckets lie.

    Args:
        part: Name of this half for error messages, e.g. ``"shm sender trainer-0"``.
        kind: What its segments are.
        arena: Where they are, those in which the caller's buckets lie and those for copies of others.
        socket_dir: Where receivers find its socket.
    """

    def __init__(self, part: str, kind: SegmentKind, arena: SegmentArena, *, socket_dir: str) -> None:
        self._life = Lifecycle(part, self._release)
        self._kind = kind
        self._arena = arena
        self._socket_dir = Path(socket_dir)
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._channels: dict[str, Channel] = {}
        self._known: dict[str, dict[int, OwnedSegment]] = {}
        """What each receiver may map. Holds it: device memory must not be freed under a mapping."""
        self._scratch: tuple[int, OwnedSegment] | None = None
        """For copies of buckets that lie elsewhere."""
        self._copies: dict[int, list[int]] = {}
        """Segments with copies of lasting buckets that lie elsewhere, by version."""
        self._shown: dict[int, dict[str, _Showing]] = {}
        """By version and receiver."""

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
            self._known = {name: {} for name in self._channels}
            self._stop_listening()
            for channel in self._channels.values():
                channel.send_json({}, deadline)

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        """Announce the bucket to each receiver, then wait until all have copied it out, or look at it if it is lasting."""
        with self._life.call():
            channels = choose(self._channels, receivers, self._life)
            number, segment, offset = self._place(bucket)
            details: dict[str, Any] = {"segment": number, "offset": offset}
            if bucket.lasting:
                details["lasting"] = True
            if segment is not None:
                segment.publish()
            retired: dict[str, list[int]] = {}
            for name, channel in channels.items():
                retired[name] = self._announce(name, channel, bucket, segment, details, deadline)
            for name in await_acknowledgements(channels, bucket, deadline, aside=self._overhear):
                for gone in retired[name]:  # it has unmapped them before it acknowledged
                    del self._known[name][gone]

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
        if retired := sorted(known.keys() - self._arena.numbers()):
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
            channel.send(b"\0", deadline, descriptors)
        return retired

    def _place(self, bucket: Bucket) -> tuple[int, OwnedSegment | None, int]:
        """Number of the segment in which the bucket lies, that segment, and where; a copy's if it lies in none."""
        data = bucket.data
        if not data.numel():
            return _NO_SEGMENT, None, 0
        if found := self._arena.find(data):
            return found
        if bucket.lasting:
            number, segment = self._arena.make(data.numel(), data.device)
            self._copies.setdefault(bucket.version, []).append(number)
        else:
            if self._scratch is None or self._scratch[1].nbytes < data.numel():
                self._discard_scratch()
                generous = 1 << (data.numel() - 1).bit_length()  # so that growing buckets do not replace it every time
                self._scratch = self._arena.make(data.numel(), data.device, generous_bytes=generous)
            number, segment = self._scratch
        segment.data[: data.numel()].copy_(data)
        return number, segment, 0

    def _discard_scratch(self) -> None:
        """Give up the scratch segment. Nobody reads it: a send returns only when all receivers have copied."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            self._arena.discard(scratch[0])

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """See `WeightSender.reclaim`."""
        with self._life.call():
            shown = self._shown.get(version, {})
            what = f"version {version} to be released"
            while waiting := {name: self._channels[name] for name, showing in shown.items() if not showing.over}:
                by_descriptor = {channel.fileno(): name for name, channel in waiting.items()}
                interest = dict.fromkeys(by_descriptor, select.POLLIN)
                for descriptor in self._life.wait_until(interest, deadline, what, ", ".join(waiting)):
                    name = by_descriptor[descriptor]
                    message = waiting[name].receive_json(deadline, what)
                    if not self._note_release(name, message) and not self._note_answer(name, message):
                        raise ProtocolError(f"unexpected message {message}.", part=self._life.part, peer=name)
                    if not shown[name].over:
                        deadline.check(what, part=self._life.part, peer=name)
            self._shown.pop(version, None)
            for number in self._copies.pop(version, ()):
                self._arena.discard(number)

    def _showing(self, version: int, name: str) -> _Showing:
        return self._shown.setdefault(version, {}).setdefault(name, _Showing())

    def _overhear(self, name: str, message: Mapping[str, Any]) -> bool:
        """Note what a receiver says while a bucket is sent, which may fail for another; whether it is about no bucket."""
        self._note_answer(name, message)
        return self._note_release(name, message)

    def _note_release(self, name: str, message: Mapping[str, Any]) -> bool:
        """Whether `message` says that its sender has released a version."""
        version = message.get("released")
        if not isinstance(version, int):
            return False
        if showing := self._shown.get(version, {}).get(name):
            showing.viewed = False
        return True

    def _note_answer(self, name: str, answer: Mapping[str, Any]) -> bool:
        """Whether `answer` acknowledges a lasting bucket that had not been acknowledged yet."""
        version, index = answer.get("version"), answer.get("taken")
        if not (isinstance(version, int) and isinstance(index, int)):
            return False
        showing = self._shown.get(version, {}).get(name)
        if showing is None or index not in showing.unanswered:
            return False
        showing.unanswered.discard(index)
        showing.viewed = showing.viewed or answer.get("viewed") is True
        return True

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _stop_listening(self) -> None:
        if self._listener is not None and self._path is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _release(self) -> None:
        self._stop_listening()
        self._discard_scratch()
        for numbers in self._copies.values():
            for number in numbers:
                self._arena.discard(number)
        mapped = {id(segment): segment for known in self._known.values() for segment in known.values()}
        self._known.clear()
        self._kind.hang_up(self._channels.values(), mapped.values())
