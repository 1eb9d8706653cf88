"""The shared-memory engine: both halves on one host, no copy on the sender's side, one on the receiver's.

The sender keeps buckets in anonymous memory files and passes their descriptors over a Unix socket; the same socket
carries the doorbells and the acknowledgements. So nothing has a name that could be left behind, even by ``kill -9``,
and a peer's death is an end of file at once. Only the listening socket has a name, from ``address`` to the end of
``connect``; one whose owner was killed in between is removed by the next sender.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from pydantic import Field, field_validator

from ._channel import Channel, accept_receivers, dial
from ._lifecycle import Lifecycle
from ._memfd import Segment
from .contract import (
    API_VERSION,
    Address,
    Bucket,
    Capabilities,
    CheckpointEngine,
    Delivery,
    EngineConfig,
    Mailbox,
    Topology,
    WeightReceiver,
    WeightSender,
)
from .deadline import Deadline
from .errors import ConfigError, ProtocolError, StorageError, TransportError

_BUCKET, _SEGMENT, _RETIRE = 1, 2, 3
_FRAME = struct.Struct("<Bqqqqq")
"""Kind; for a bucket its version, index, size, segment and offset; otherwise the segment's size and its number."""
_TAKEN, _REFUSED = 1, 2
_ACK = struct.Struct("<Bqqq")
"""Taken or refused; then the version, index and size that the receiver waits for."""
_NO_SEGMENT = -1
_MAX_SOCKET_PATH_BYTES = 107
_SOCKET_NAME = "weightlane-{}.sock"
_TOKEN_BYTES = 8
_SOCKET_PATTERN = re.compile(r"weightlane-[0-9a-f]{16}\.sock")
_STALE_PATTERN = _SOCKET_NAME.format("*")


class ShmConfig(EngineConfig):
    """Options of ``shm``."""

    socket_dir: str = Field(
        "/dev/shm",  # noqa: S108 - mode 0600, a random name, and gone after connect
        description="Directory for the sender's socket while it waits for receivers; containers must share it.",
    )

    @field_validator("socket_dir")
    @classmethod
    def _is_short(cls, socket_dir: str) -> str:
        length = len(os.fsencode(socket_dir)) + 1 + len(_SOCKET_NAME.format("")) + 2 * _TOKEN_BYTES
        if length > _MAX_SOCKET_PATH_BYTES:
            limit = _MAX_SOCKET_PATH_BYTES - length + len(os.fsencode(socket_dir))
            raise ValueError(f"is too long for the path of a Unix socket; at most {limit} bytes")
        return socket_dir


class ShmSender(WeightSender):
    """Owns the memory and the listening socket."""

    def __init__(self, name: str, config: ShmConfig) -> None:
        self._life = Lifecycle(f"shm sender {name}", self._release)
        self._socket_dir = Path(config.socket_dir)
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._channels: dict[str, Channel] = {}
        self._segments: dict[int, Segment] = {}
        self._shared_with: dict[int, set[str]] = {}
        self._next_segment = 0
        self._scratch = _NO_SEGMENT

    def address(self) -> Address:
        """Name of the socket in `socket_dir`, and identity of the host."""
        with self._life.call():
            if self._path is None:
                _remove_stale_sockets(self._socket_dir)
                self._listener, self._path = _listen(self._socket_dir, self._life.part)
            return {"socket": self._path.name, "host": _host_identity()}

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Let every receiver in, then remove the socket's name."""
        self.address()
        with self._life.call():
            for name, address in topology.receivers.items():
                _check_same_host(address, self._life.part, name)
            listener = cast("socket.socket", self._listener)
            self._channels = accept_receivers(listener, self._life, topology.session, topology.receivers, deadline)
            self._stop_listening()
            for channel in self._channels.values():
                channel.send_json({}, deadline)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Shared memory: a bucket that lies in it is not copied by `send`."""
        with self._life.call():
            return self._segments[self._new_segment(nbytes)].data[:nbytes]

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:
        """Ring for each receiver, then wait until all have copied the bucket out."""
        with self._life.call():
            if unknown := set(receivers) - set(self._channels):
                raise ProtocolError(f"not connected to {', '.join(sorted(unknown))}.", part=self._life.part)
            number, offset = self._place(bucket.data, deadline)
            doorbell = _FRAME.pack(_BUCKET, bucket.version, bucket.index, bucket.nbytes, number, offset)
            waiting = {name: self._channels[name] for name in receivers}
            for name, channel in waiting.items():
                self._share(number, name, deadline)
                channel.send(doorbell, deadline)
            while waiting:
                by_descriptor = {channel.fileno(): name for name, channel in waiting.items()}
                interest = dict.fromkeys(by_descriptor, select.POLLIN)
                who = ", ".join(waiting)
                ready = self._life.wait_until(interest, deadline, f"{who} to take bucket {bucket.index}", who)
                for descriptor in ready:
                    self._take_ack(waiting.pop(by_descriptor[descriptor]), bucket, deadline)

    def _take_ack(self, channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
        kind, version, index, nbytes = _ACK.unpack(channel.receive(_ACK.size, deadline, "a complete acknowledgement"))
        if kind != _TAKEN:
            raise ProtocolError(
                f"offered bucket {bucket.index} of version {bucket.version} with {bucket.nbytes} bytes, but the"
                f" receiver waits for {index} of {version} with {nbytes}.",
                part=self._life.part,
                peer=channel.peer,
            )

    def _place(self, data: torch.Tensor, deadline: Deadline) -> tuple[int, int]:
        """Segment and offset of `data`, copied into the scratch segment unless it lies in a segment already."""
        if not data.numel():
            return _NO_SEGMENT, 0
        for number, segment in self._segments.items():
            offset = segment.offset_of(data)
            if offset is not None:
                return number, offset
        if self._scratch == _NO_SEGMENT or self._segments[self._scratch].nbytes < data.numel():
            self._retire(self._scratch, deadline)
            self._scratch = _NO_SEGMENT
            self._scratch = self._new_segment(1 << (data.numel() - 1).bit_length())
        self._segments[self._scratch].data[: data.numel()].copy_(data)
        return self._scratch, 0

    def _new_segment(self, nbytes: int) -> int:
        number, self._next_segment = self._next_segment, self._next_segment + 1
        self._segments[number] = Segment.create(nbytes)
        self._shared_with[number] = set()
        return number

    def _share(self, number: int, name: str, deadline: Deadline) -> None:
        if number == _NO_SEGMENT or name in self._shared_with[number]:
            return
        segment = self._segments[number]
        frame = _FRAME.pack(_SEGMENT, segment.nbytes, number, 0, 0, 0)
        self._channels[name].send(frame, deadline, [segment.descriptor])
        self._shared_with[number].add(name)

    def _retire(self, number: int, deadline: Deadline) -> None:
        if number == _NO_SEGMENT:
            return
        for name in self._shared_with.pop(number):
            self._channels[name].send(_FRAME.pack(_RETIRE, 0, number, 0, 0, 0), deadline)
        self._segments.pop(number).close()

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _stop_listening(self) -> None:
        if self._listener is not None and self._path is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _release(self) -> None:
        for channel in self._channels.values():
            channel.close()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._stop_listening()


class ShmReceiver(WeightReceiver):
    """Maps the senders' segments and copies buckets out of them."""

    def __init__(self, name: str, config: ShmConfig) -> None:
        self._name = name
        self._life = Lifecycle(f"shm receiver {name}", self._release)
        self._socket_dir = Path(config.socket_dir)
        self._channels: dict[str, Channel] = {}
        self._segments: dict[tuple[str, int], Segment] = {}

    def address(self) -> Address:
        """Identity of the host: receivers dial."""
        return {"host": _host_identity()}

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Dial every sender in turn."""
        with self._life.call():
            for sender, address in topology.senders.items():
                _check_same_host(address, self._life.part, sender)
                name = address.get("socket")
                if not (isinstance(name, str) and _SOCKET_PATTERN.fullmatch(name)):
                    raise ProtocolError(f"{name!r} is not the name of a socket.", part=self._life.part, peer=sender)
                path = str(self._socket_dir / name)
                self._channels[sender], _ = dial(
                    path, self._life, deadline, session=topology.session, name=self._name, peer=sender
                )

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        """Wait for the doorbell and copy the bucket out."""
        with self._life.call():
            if sender not in self._channels:
                raise ProtocolError(f"not connected to {sender}.", part=self._life.part)
            channel = self._channels[sender]
            version, index, nbytes, number, offset = self._next_doorbell(bucket, sender, deadline)
            expected = (bucket.version, bucket.index, bucket.nbytes)
            if (version, index, nbytes) != expected:
                channel.send(_ACK.pack(_REFUSED, *expected), deadline)
                raise ProtocolError(
                    f"expected version {bucket.version}, bucket {bucket.index} of {bucket.nbytes} bytes, but the sender"
                    f" offers {version}, {index} of {nbytes}.",
                    part=self._life.part,
                    peer=sender,
                )
            if nbytes:
                segment = self._segments.get((sender, number))
                if segment is None or not 0 <= offset <= segment.nbytes - nbytes:
                    raise ProtocolError(
                        f"no {nbytes} bytes at {offset} of segment {number}.", part=self._life.part, peer=sender
                    )
                bucket.data.copy_(segment.data[offset : offset + nbytes])
            channel.send(_ACK.pack(_TAKEN, *expected), deadline)

    def _next_doorbell(self, bucket: Bucket, sender: str, deadline: Deadline) -> tuple[int, int, int, int, int]:
        """The next bucket's frame, after taking in segments that come before it."""
        what = f"bucket {bucket.index} of version {bucket.version}"
        while True:
            descriptors: list[int] = []
            try:
                frame = self._channels[sender].receive(_FRAME.size, deadline, what, descriptors)
                kind, first, second, *rest = _FRAME.unpack(frame)
                if kind == _BUCKET:
                    version, index, (nbytes, number, offset) = first, second, rest
                    return version, index, nbytes, number, offset
                if kind == _SEGMENT and descriptors:
                    self._segments[sender, second] = Segment.adopt(descriptors.pop(), first)
                elif kind == _RETIRE and (sender, second) in self._segments:
                    self._segments.pop((sender, second)).close()
                else:
                    raise ProtocolError(f"unexpected frame of kind {kind}.", part=self._life.part, peer=sender)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def close(self) -> None:
        """See `WeightReceiver.close`."""
        self._life.close()

    def _release(self) -> None:
        for channel in self._channels.values():
            channel.close()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


class ShmEngine(CheckpointEngine):
    """CPU memory shared between processes of one host."""

    api_version = API_VERSION
    config_type = ShmConfig
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        same_host_only=True,
        zero_copy=True,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        return None if hasattr(os, "memfd_create") else "this platform has no memfd_create"

    def make_sender(self, name: str) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return ShmSender(name, cast("ShmConfig", self.config))

    def make_receiver(self, name: str) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return ShmReceiver(name, cast("ShmConfig", self.config))


def _host_identity() -> str:
    """Same for all processes under one kernel, containers included: they can share memory files."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _check_same_host(address: Address, part: str, peer: str) -> None:
    if address.get("host") != _host_identity():
        raise TransportError(
            "the peer runs on another host.",
            part=part,
            peer=peer,
            hint="Set checkpoint_engine.backend to one that crosses hosts, such as gloo.",
        )


def _listen(socket_dir: Path, part: str) -> tuple[socket.socket, Path]:
    """A listening Unix socket of mode 0600 under a fresh name.

    It gets its final name only once it listens, so that a socket of that form on which nobody listens is known to be
    dead.
    """
    path = socket_dir / _SOCKET_NAME.format(secrets.token_hex(_TOKEN_BYTES))
    unfinished = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(unfinished))
        unfinished.chmod(stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(socket.SOMAXCONN)
        unfinished.rename(path)
    except OSError as error:
        listener.close()
        unfinished.unlink(missing_ok=True)
        if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
            raise ConfigError(f"socket_dir {str(socket_dir)!r}: {error.strerror}.", part=part) from error
        raise StorageError(f"cannot create a socket in {socket_dir}: {error.strerror}.", part=part) from error
    return listener, path


def _remove_stale_sockets(socket_dir: Path) -> None:
    """Remove the sockets of senders that were killed before their receivers came."""
    for path in socket_dir.glob(_STALE_PATTERN):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
