"""`SenderLink`: the framework's wrapper around a sending half."""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from ..channels.admission import accept_receivers, welcome
from ..channels.channel import Address, Channel
from ..channels.listener import Listener
from ..contract.bucket import Bucket
from ..contract.engine import CheckpointEngine, Topology, WeightSender
from ..contract.storing import StoringSender, VersionFiles
from ..contract.viewing import ViewableSender
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
