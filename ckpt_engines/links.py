"""`SenderLink` and `ReceiverLink`: the framework's wrappers around the halves of an engine. `Link` is what both sides share.

The links of two connected halves have a control connection, separate from the connections that the engine uses. On it the sender
announces each bucket, and a receiver refuses a bucket that it does not wait for. A thread of each link watches the control
connections. When a peer hangs up, the thread closes the half, and a call that waits for the peer raises `PeerLostError`.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar, cast

import torch

from .channels.channel import Address, Channel
from .channels.handshake import Hello
from .channels.joining import accept_receivers, dial, welcome, welcomed
from .channels.listener import Listener
from .contract.bucket import Bucket
from .contract.capabilities import Delivery
from .contract.engine import CheckpointEngine, Topology, WeightReceiver, WeightSender, engine_label
from .contract.storing import StoringSender, VersionFiles
from .contract.viewing import ViewableSender, ViewingReceiver
from .errors import (
    ClosedError,
    PeerLostError,
    ProtocolError,
    TransportError,
    WeightlaneError,
    as_weightlane_error,
)
from .waits import Deadline, Lifecycle

_GRACE_S = 1.0
"""How long a call may continue after its peer hung up: bytes that the peer has sent may still arrive."""
LOSS_WAIT_S = 0.3
"""How long a failed call waits for a peer to hang up: a transport often notices a death first but cannot say whose it was."""
_LOOK_S, _NEVER_S = 0.1, 3600.0
"""Longest pauses of the watching thread, in seconds. After a loss it must notice when `_GRACE_S` is over; before, only events."""

H = TypeVar("H", WeightSender, WeightReceiver)


class Link(ABC, Generic[H]):
    """Holds the connections of one half, watches them, and decides which error a call raises.

    `side` is ``"sender"`` or ``"receiver"``, and `name` that of the participant in the topology.
    """

    _watched_events: int
    """Events of a control connection, ``select.POLL*``, for which `_loss_on` returns the error."""
    _fails_after_loss = True
    """Whether no call can succeed once a peer has hung up."""

    def __init__(self, engine: CheckpointEngine, side: str, name: str, half: H) -> None:
        self.half: H = half
        self._engine = engine
        self._name = name
        self.part = f"{engine_label(engine)} {side} {name}"
        self._life = Lifecycle(self.part, self._release)
        self._connects = Delivery.STORE not in engine.capabilities.delivery
        """Whether sender and receivers have connections; those of a store have none."""
        self._lanes = ["control", "engine"] if engine.capabilities.channels else ["control"]
        self._control: dict[str, Channel] = {}
        self._channels: dict[str, Channel] = {}
        """The engine's connections, by peer."""
        self._receiver_sets: dict[frozenset[str], int] = {}
        """Index of each set in `Topology.receiver_sets`."""
        self._closed = False
        self._call_start: float | None = None
        """When the running call began, on the monotonic clock; None while none is running."""
        self._lost: WeightlaneError | None = None
        """Error for the first peer that hung up, or refused a bucket."""
        self._lost_at = 0.0
        self._loss_noticed = threading.Condition()

    @classmethod
    def of(cls, engine: CheckpointEngine, name: str, device: torch.device) -> Self:
        """Make the link of a new half of `engine`, of the engine's own type of link if it has one."""
        made: Self = engine.link_types.get(cls, cls)(engine, name, device)
        return made

    def close(self) -> None:
        """Close the half and its connections. Idempotent, callable from any thread, never raises.

        Peers notice the close at once, even if a call that does not end keeps the sockets open for longer.
        """
        first, self._closed = not self._closed, True
        self.half.close()  # before the connections: it may have to tell its peers
        if first:
            for channel in self._control.values():
                channel.hang_up()
        self._life.close()

    def _release(self) -> None:
        for channel in (*self._control.values(), *self._channels.values()):
            channel.close()

    # -- connecting ---------------------------------------------------------------------------------------------------------

    def connect(self, topology: Topology, deadline: Deadline) -> None:
        """Connect to the peers in `topology`, all sides at the same time, and then connect the half.

        Raises `PeerLostError`, `ProtocolError`, `DeadlineExceededError`, `ClosedError`, or the half's errors.
        """
        self._receiver_sets = {frozenset(names): number for number, names in enumerate(topology.receiver_sets)}
        with self._call():
            if self._connects:
                self._connect_peers(topology, deadline)
            self.half.connect(self._engine_topology(topology), self._channels, deadline)

    @abstractmethod
    def _connect_peers(self, topology: Topology, deadline: Deadline) -> None:
        """Open the connections and `_keep` them."""

    def _keep(self, lanes: Sequence[Mapping[str, Channel]]) -> None:
        """Store the connections, by lane and peer, and watch the control connections from now on."""
        self._control, self._channels = dict(lanes[0]), dict(lanes[1]) if len(lanes) > 1 else {}
        threading.Thread(target=self._watch, name=f"weightlane-watch-{self._name}", daemon=True).start()

    def _engine_topology(self, topology: Topology) -> Topology:
        """Return `topology` with the addresses of the halves instead of those of the links."""

        def of_halves(addresses: Mapping[str, Address]) -> dict[str, Address]:
            return {name: self._address_part(address, "engine", name) for name, address in addresses.items()}

        return replace(topology, senders=of_halves(topology.senders), receivers=of_halves(topology.receivers))

    def _address_part(self, address: Address, key: str, peer: str) -> Address:
        found: Any = address.get(key)
        if not isinstance(found, Mapping):
            raise ProtocolError(f"{dict(address)} is not the address of a link.", part=self.part, peer=peer)
        return found

    # -- calls of the half --------------------------------------------------------------------------------------------------

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """See `WeightSender.flush` and `WeightReceiver.flush`."""
        with self._call():
            self.half.flush(deadline, pending)

    @contextlib.contextmanager
    def _call(self, *, close_on_error: bool = True) -> Iterator[None]:
        """Wrap every call of the half. An error is replaced by its cause, and closes the half if `close_on_error` is true."""
        if self._lost is not None and self._fails_after_loss and not self._closed:
            raise self._lost
        try:
            with self._life.call():
                self._call_start = time.monotonic()
                try:
                    yield
                finally:
                    self._call_start = None
        except Exception as error:
            cause = self._cause(error)
            if close_on_error:
                self.half.close()
            if cause is error:
                raise
            raise cause from error

    def _cause(self, error: Exception) -> WeightlaneError:
        """Return the error to raise instead of `error`."""
        if self._closed:
            return error if isinstance(error, ClosedError) else ClosedError("it was closed.", part=self.part)
        raised = as_weightlane_error(error, self.part)
        if (
            isinstance(raised, PeerLostError)
            and raised.peer in self._control
            and not isinstance(self._lost, ProtocolError)
        ):
            return raised
        may_follow_from_a_loss = isinstance(error, (ClosedError, TransportError))
        if may_follow_from_a_loss and (self._control or isinstance(error, ClosedError)):
            with self._loss_noticed:
                self._loss_noticed.wait_for(lambda: self._lost is not None, LOSS_WAIT_S)
        return self._lost if may_follow_from_a_loss and self._lost is not None else raised

    # -- the watching thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Notice peers that hang up or refuse a bucket, until the link closes.

        After a refusal it closes the half at once; after a loss, as soon as a call has run for `_GRACE_S` since the loss.
        """
        watched = {channel.fileno(): channel for channel in self._control.values()}
        with contextlib.suppress(ClosedError):
            while watched or self._lost is not None:
                with self._life.call():
                    pause_s = _NEVER_S if self._lost is None else _LOOK_S
                    for descriptor in self._life.wait(dict.fromkeys(watched, self._watched_events), pause_s):
                        self._notice(self._loss_on(watched.pop(descriptor)))
                start = self._call_start
                waits_since = None if start is None else max(start, self._lost_at)
                if isinstance(self._lost, ProtocolError) or (
                    self._lost is not None and waits_since is not None and time.monotonic() - waits_since > _GRACE_S
                ):
                    self.half.close()
                    return

    def _loss_on(self, channel: Channel) -> WeightlaneError:
        """Return the error for a peer on whose control connection `_watched_events` happened."""
        return channel.lost()

    def _notice(self, error: WeightlaneError) -> None:
        with self._loss_noticed:
            if self._lost is None:
                self._lost_at = time.monotonic()
            if self._lost is None or isinstance(error, ProtocolError):
                self._lost = error
            self._loss_noticed.notify_all()


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
                to_all = len(set(receivers)) == len(self._control)
                receiver_set = self._receiver_sets.get(frozenset(receivers))
                bucket = replace(bucket, to_all=to_all, receiver_set=receiver_set)
                header = [bucket.version, bucket.index, bucket.nbytes, to_all, receiver_set, checksum]
                for name in receivers:
                    self._control[name].send_json({"bucket": header}, deadline)
            self.half.post(bucket, receivers)

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
            to_all, receiver_set, checksum = self._expect(sender, bucket.version, bucket.index, bucket.nbytes, deadline)
            self.half.post(replace(bucket, to_all=to_all, receiver_set=receiver_set), sender)
            return checksum

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> tuple[torch.Tensor, str]:
        """Return the bucket as `ViewingReceiver.view` does, and its checksum. Raises as `post`."""
        with self._call():
            _, _, checksum = self._expect(sender, version, index, nbytes, deadline)
            return cast("ViewingReceiver", self.half).view(version, index, nbytes, sender, deadline), checksum

    def release(self, version: int, deadline: Deadline) -> None:
        """See `ViewingReceiver.release`."""
        with self._call():
            cast("ViewingReceiver", self.half).release(version, deadline)

    def _channel(self, sender: str) -> Channel:
        try:
            return self._control[sender]
        except KeyError:
            raise ProtocolError(f"not connected to {sender}.", part=self.part) from None

    def _expect(
        self, sender: str, version: int, index: int, nbytes: int, deadline: Deadline
    ) -> tuple[bool, int | None, str]:
        """Wait for the next header from `sender`, which must be that of this bucket.

        Returns `Bucket.to_all`, `Bucket.receiver_set`, and the checksum as the sender's caller gave it; empty for none.
        """
        channel = self._channel(sender)
        what = f"bucket {index} of version {version}"
        header = channel.receive_json(deadline, what).get("bucket")
        match header:
            case [int(said), int(place), int(size), bool(to_all), int() | None as receiver_set, str(checksum)]:
                mine = (number for members, number in self._receiver_sets.items() if self._name in members)
                if receiver_set is not None and receiver_set not in mine:
                    offer = f"a bucket for set {receiver_set} of the receivers"
                elif (said, place, size) == (version, index, nbytes):
                    return to_all, receiver_set, checksum
                else:
                    offer = f"version {said}, bucket {place} of {size} bytes"
            case _:
                offer = repr(header)
        with contextlib.suppress(WeightlaneError):  # the sender may be gone
            channel.send_json({"refused": f"it waits for {what} with {nbytes} bytes"}, deadline.within(LOSS_WAIT_S))
        raise ProtocolError(
            f"expected version {version}, bucket {index} of {nbytes} bytes, but the sender offers {offer}.",
            part=self.part,
            peer=sender,
        )
