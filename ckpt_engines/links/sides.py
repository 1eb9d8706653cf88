"""`SenderLink` and `ReceiverLink`: the framework's wrappers around a sending and a receiving half."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from ..channels.admission import accept_receivers, welcome, welcomed
from ..channels.channel import Address, Channel
from ..channels.dialer import dial
from ..channels.handshake import Hello
from ..channels.listener import Listener
from ..contract.bucket import Bucket
from ..contract.engine import CheckpointEngine, Topology, WeightReceiver, WeightSender
from ..contract.storing import StoringSender, VersionFiles
from ..contract.viewing import ViewableSender, ViewingReceiver
from ..deadline import Deadline
from ..errors import PeerLostError, ProtocolError, WeightlaneError
from .link import LOSS_WAIT_S, BucketHeader, Link


class SenderLink(Link[WeightSender]):
    """Admits receivers, announces buckets to them, and calls the sending half of the participant `name`.

    Its buckets live on `device`; an accelerator with its index.
    """

    _watched_events = select.POLLIN

    def __init__(self, engine: CheckpointEngine, name: str, device: torch.device) -> None:
        super().__init__(engine, "sender", name, engine.make_sender(name, device))
        self._listener: Listener | None = None

    def address(self) -> Address:
        """Return JSON data by which receivers' links find this one. From now on they can connect."""
        with self._call():
            where = self._listen().address if self._connects else {}
            return {"sockets": dict(where), "engine": dict(self.half.address())}

    def _listen(self) -> Listener:
        if self._listener is None:
            self._listener = self._engine.socket_factory(self._name).listen(self.part)
        return self._listener

    def _connect_peers(self, topology: Topology, deadline: Deadline) -> None:
        session, names, key = topology.session, topology.receivers, topology.key
        self._keep(accept_receivers(self._listen(), self._life, session, names, deadline, lanes=self._lanes, key=key))
        welcome(self._control.values(), deadline)

    def _release(self) -> None:
        if self._listener is not None:
            self._listener.close()
        super()._release()

    def post(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline, checksum: str = "") -> None:
        """Announce `bucket` and its checksum to `receivers`, and post it to the half.

        Waits only for a receiver whose socket is full. Raises `ProtocolError` when a receiver is not connected; otherwise as
        `flush`.
        """
        with self._call():
            if self._connects:
                if unknown := sorted(set(receivers) - set(self._control)):
                    raise ProtocolError(f"not connected to {', '.join(unknown)}.", part=self.part)
                to_all, receiver_set = len(set(receivers)) == len(self._control), self._set_of(receivers)
                bucket = replace(bucket, to_all=to_all, receiver_set=receiver_set)
                header = BucketHeader(bucket.version, bucket.index, bucket.nbytes, to_all, receiver_set, checksum)
                for name in receivers:
                    self._control[name].send_json({"bucket": header}, deadline)
            self.half.post(bucket, receivers)

    def _set_of(self, receivers: Sequence[str]) -> int | None:
        names = frozenset(receivers)
        return next((number for number, members in enumerate(self._receiver_sets) if members == names), None)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """See `ViewableSender.reclaim`."""
        with self._call(close_on_error=False):  # the caller can take other memory and try again
            cast("ViewableSender", self.half).reclaim(version, deadline)

    def open_version(self, files: VersionFiles, deadline: Deadline) -> None:
        """See `StoringSender.open_version`."""
        with self._call():
            cast("StoringSender", self.half).open_version(files, deadline)

    def commit_version(self, version: int, documents: Mapping[str, str], deadline: Deadline) -> None:
        """See `StoringSender.commit_version`."""
        with self._call():
            cast("StoringSender", self.half).commit_version(version, documents, deadline)

    def _loss_on(self, channel: Channel) -> WeightlaneError:
        """Read the receiver's message, its refusal of a bucket, unless the receiver hung up. Returns the error to raise."""
        try:
            complaint = channel.receive_json(Deadline.after(LOSS_WAIT_S), "a complete message").get("refused")
        except WeightlaneError as error:
            return error if isinstance(error, PeerLostError) else channel.lost()
        return ProtocolError(f"the receiver refused a bucket: {complaint}.", part=self.part, peer=channel.peer)


def make_sender_link(engine: CheckpointEngine, name: str, device: torch.device) -> SenderLink:
    """Make the link of a new sender of `engine`. See `SenderLink` for the arguments."""
    kind: type[SenderLink] = engine.link_types[0] if engine.link_types else SenderLink
    return kind(engine, name, device)


class ReceiverLink(Link[WeightReceiver]):
    """Connects to senders, checks which bucket each announces, and calls the receiving half of the participant `name`.

    Its buckets live on `device`; an accelerator with its index.
    """

    _watched_events = getattr(select, "POLLRDHUP", 0)
    """Linux's event for a peer that hung up after data not read yet; on other systems a receiver learns that from its reads."""
    _fails_after_loss = False  # what a sender sent before it hung up can still be read

    def __init__(self, engine: CheckpointEngine, name: str, device: torch.device) -> None:
        super().__init__(engine, "receiver", name, engine.make_receiver(name, device))

    def views_are_copied_to(self, device: torch.device) -> None:
        """Set `ViewingReceiver.copied_to`, the device to which the caller copies viewed buckets. Call it before `connect`."""
        if self._engine.capabilities.views:
            cast("ViewingReceiver", self.half).copied_to = device

    def address(self) -> Address:
        """Return JSON data about this link for the sender's link."""
        with self._call():
            return {"engine": dict(self.half.address())}

    def _connect_peers(self, topology: Topology, deadline: Deadline) -> None:
        sockets = self._engine.socket_factory(self._name)
        lanes: list[dict[str, Channel]] = [{} for _ in self._lanes]
        with contextlib.ExitStack() as opened:
            for sender, address in topology.senders.items():
                target = sockets.target(self._address_part(address, "sockets", sender), self.part, sender)
                for lane, channels in zip(self._lanes, lanes, strict=True):
                    hello = Hello(topology.session, self._name, lane)
                    channels[sender] = dial(target, self._life, deadline, peer=sender, key=topology.key, hello=hello)
                    opened.callback(channels[sender].close)
            for channel in lanes[0].values():
                welcomed(channel, deadline)
            opened.pop_all()
        self._keep(lanes)

    def announced(self, sender: str) -> bool:
        """Tell whether the next bucket from `sender` is announced, so that `post` and `view` need not wait."""
        if not self._connects:
            return True
        with self._call():
            return bool(self._life.wait({self._channel(sender).fileno(): select.POLLIN}, 0.0))

    def post(self, bucket: Bucket, sender: str, deadline: Deadline) -> str:
        """Wait until `sender` announces `bucket`, post it to the half, and return the checksum that the sender announced.

        Raises `ProtocolError` when the sender announces another bucket, and makes the sender raise it, too; otherwise as `flush`.
        """
        with self._call():
            if not self._connects:
                self.half.post(bucket, sender)
                return ""
            header = self._expect(sender, bucket.version, bucket.index, bucket.nbytes, deadline)
            self.half.post(replace(bucket, to_all=header.to_all, receiver_set=header.receiver_set), sender)
            return header.checksum

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> tuple[torch.Tensor, str]:
        """Return the bucket as `ViewingReceiver.view` does, and its checksum. Raises as `post`."""
        with self._call():
            header = self._expect(sender, version, index, nbytes, deadline)
            data = cast("ViewingReceiver", self.half).view(version, index, nbytes, sender, deadline)
            return data, header.checksum

    def release(self, version: int, deadline: Deadline) -> None:
        """See `ViewingReceiver.release`."""
        with self._call():
            cast("ViewingReceiver", self.half).release(version, deadline)

    def _channel(self, sender: str) -> Channel:
        try:
            return self._control[sender]
        except KeyError:
            raise ProtocolError(f"not connected to {sender}.", part=self.part) from None

    def _is_in(self, receiver_set: int | None) -> bool:
        sets = self._receiver_sets
        return receiver_set is None or (0 <= receiver_set < len(sets) and self._name in sets[receiver_set])

    def _expect(self, sender: str, version: int, index: int, nbytes: int, deadline: Deadline) -> BucketHeader:
        """Return the next header from `sender`, which must be the header of this bucket."""
        channel = self._channel(sender)
        what = f"bucket {index} of version {version}"
        message = channel.receive_json(deadline, what)
        header = BucketHeader.read(message.get("bucket"))
        if header is None:
            offer = repr(message.get("bucket"))
        elif not self._is_in(header.receiver_set):
            offer = f"a bucket for set {header.receiver_set} of the receivers"
        elif header[:3] == (version, index, nbytes):
            return header
        else:
            offer = f"version {header.version}, bucket {header.position} of {header.nbytes} bytes"
        with contextlib.suppress(WeightlaneError):  # the sender may be gone
            channel.send_json({"refused": f"it waits for {what} with {nbytes} bytes"}, deadline.within(LOSS_WAIT_S))
        raise ProtocolError(
            f"expected version {version}, bucket {index} of {nbytes} bytes, but the sender offers {offer}.",
            part=self.part,
            peer=sender,
        )


def make_receiver_link(engine: CheckpointEngine, name: str, device: torch.device) -> ReceiverLink:
    """Make the link of a new receiver of `engine`. See `ReceiverLink` for the arguments."""
    kind: type[ReceiverLink] = engine.link_types[1] if engine.link_types else ReceiverLink
    return kind(engine, name, device)
