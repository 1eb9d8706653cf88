"""The receiving half of the engines whose receivers map the sender's memory. `_segment_sender` describes what is said."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ._channel import Channel, dial
from ._handshake import acknowledge, choose, expect, refuse
from ._lifecycle import Lifecycle
from ._local_socket import check_same_host, host_identity, socket_name
from ._segments import MappedSegment, SegmentKind
from ._waiting import poll_until
from .contract import Address, Bucket, Mailbox, Topology, WeightReceiver
from .deadline import Deadline
from .errors import ProtocolError


class SegmentReceiver(WeightReceiver):
    """Maps the senders' segments, and copies buckets out of them or shows them.

    Args:
        name: Its own.
        part: Name of this half for error messages, e.g. ``"shm receiver rollout-0"``.
        kind: What the segments are.
        socket_dir: Where it finds the senders' sockets.
    """

    def __init__(self, name: str, part: str, kind: SegmentKind, *, socket_dir: str) -> None:
        self._name = name
        self._life = Lifecycle(part, self._release)
        self._kind = kind
        self._socket_dir = Path(socket_dir)
        self._channels: dict[str, Channel] = {}
        self._segments: dict[tuple[str, int], MappedSegment] = {}
        self._viewed: dict[int, set[str]] = {}
        """Senders whose buckets of a version were viewed, by version."""

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
            with self._understanding(announced, sender):
                self._follow(channel, announced, bucket, deadline)
                if bucket.nbytes:
                    segment, offset = self._find(sender, announced, bucket.nbytes)
                    what = f"the copy of bucket {bucket.index} of version {bucket.version}"
                    segment.copy_out(
                        offset,
                        bucket.data,
                        lambda done: poll_until(done, self._life, deadline, what, watch={sender: channel}),
                    )
            acknowledge(channel, bucket, deadline)

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
                self._follow(channel, announced, bucket, deadline)
                if not nbytes:
                    acknowledge(channel, bucket, deadline)
                    return torch.empty(0, dtype=torch.uint8)
                segment, offset = self._find(sender, announced, nbytes)
                data = segment.view(offset, nbytes)
            self._viewed.setdefault(version, set()).add(sender)
            acknowledge(channel, bucket, deadline, viewed=True)
            return data

    def release(self, version: int, deadline: Deadline) -> None:
        """See `WeightReceiver.release`."""
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

    def _follow(self, channel: Channel, announced: Mapping[str, Any], bucket: Bucket, deadline: Deadline) -> None:
        """Unmap what is retired and map what is described."""
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
            try:
                channel.receive(1, deadline, "the segment's descriptors", descriptors)
            except BaseException:
                for descriptor in descriptors:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
                raise
        self._segments[key] = self._kind.adopt(nbytes, described, descriptors, bucket.data.device)

    def _forget(self, sender: str, retired: Iterable[int]) -> None:
        for number in retired:
            self._segments.pop((sender, number)).close()

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
        for segment in self._segments.values():  # first: that a channel ends tells the sender that nothing is copied
            segment.close()
        self._segments.clear()
        for channel in self._channels.values():
            channel.close()
