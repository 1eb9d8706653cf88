"""`SenderLink` and `ReceiverLink`: one half of an engine, and what the framework does around it.

A link opens authenticated connections between a sender and its receivers: one of its own to each peer, and one for the engine
if it wants any. Over its own one the sender says ahead of each bucket which one it is, how large, and what its checksum is; the
receiver compares that with what it waits for before the engine is asked to do anything. That is said in one direction only, so
it costs no round trip. A thread watches the connection: when a peer hangs up, or complains, the half is closed soon, and the
call that was running says why.

Halves that meet in a store meet nobody: their links have no connections, and nothing is said over them.
"""

from __future__ import annotations

import contextlib
import json
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import torch

from ..channels.channel import Address, Channel, accept_receivers, dial, welcome, welcomed
from ..channels.mac import proof, proves
from ..channels.meeting import Listener
from ..contract.engine import Bucket, CheckpointEngine, Delivery, Topology, WeightReceiver, WeightSender, engine_label
from ..contract.storing import StoringSender, VersionFiles
from ..contract.viewing import ViewableSender, ViewingReceiver
from ..deadline import Deadline
from ..errors import (
    ClosedError,
    PeerLostError,
    ProtocolError,
    TransportError,
    WeightlaneError,
    as_weightlane_error,
)
from ..runtime.lifecycle import Lifecycle

_CONTROL, _ENGINE = "control", "engine"
_BUCKET = "weightlane bucket"
_GRACE_S = 1.0
"""How long a call may go on after its peer hung up: what is under way may still arrive."""
_CULPRIT_WAIT_S = 0.3
"""How long a failed call waits for a peer to hang up: a transport often notices a death first but cannot say whose it was."""
_LOOK_S, _NEVER_S = 0.1, 3600.0
_HANG_UP = getattr(select, "POLLRDHUP", 0)
"""Linux's event for a peer that hung up behind unread data; elsewhere a receiver learns that from what it reads."""

H = TypeVar("H", WeightSender, WeightReceiver)


class _Link(Generic[H]):
    """What both sides share: the connections, who watches them, and what a call raises."""

    def __init__(self, engine: CheckpointEngine, side: str, name: str, half: H) -> None:
        self.half: H = half
        self._engine = engine
        self._name = name
        self.part = f"{engine_label(engine)} {side} {name}"
        self._life = Lifecycle(self.part, self._release)
        self._meets = Delivery.STORE not in engine.capabilities.delivery
        self._control: dict[str, Channel] = {}
        self._channels: dict[str, Channel] = {}
        self._closed = False
        self._session = ""
        self._key = b""
        self._calls = 0
        """Odd while one is running."""
        self._lost: WeightlaneError | None = None
        """Which peer hung up or complained, first."""
        self._noticed = threading.Condition()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _lanes(self) -> list[str]:
        return [_CONTROL, _ENGINE] if self._engine.capabilities.channels else [_CONTROL]

    def _opened(self, lanes: Sequence[Mapping[str, Channel]]) -> None:
        """The connections are there: watch them."""
        self._control = dict(lanes[0])
        self._channels = dict(lanes[1]) if len(lanes) > 1 else {}
        threading.Thread(target=self._watch, name=f"weightlane-watch-{self._name}", daemon=True).start()

    def _release(self) -> None:
        for channel in (*self._control.values(), *self._channels.values()):
            channel.close()

    def close(self) -> None:
        """Close the half and its connections. Idempotent, from any thread, never raises.

        Peers see it at once, though a call that does not end keeps the sockets open for longer.
        """
        first, self._closed = not self._closed, True
        self.half.close()  # which may have to tell its peers
        for channel in self._control.values() if first else ():
            channel.hang_up()
        self._life.close()

    # -- what a call raises -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self, *, final: bool = True) -> Iterator[None]:
        """Wrap every call of the half: what ends it is told as what caused it, and ends the half, too, if it is `final`."""
        if self._lost is not None and self._hopeless and not self._closed:
            raise self._lost
        try:
            with self._life.call():
                self._calls += 1
                try:
                    yield
                finally:
                    self._calls += 1
        except Exception as error:
            cause = self._cause(error)
            if final:
                self.half.close()
            if cause is error:
                raise
            raise cause from error

    _hopeless = True
    """Whether nothing can come once a peer has hung up."""

    def _cause(self, error: Exception) -> WeightlaneError:
        """What to raise in place of `error`."""
        if self._closed:
            return error if isinstance(error, ClosedError) else ClosedError("it was closed.", part=self.part)
        told = as_weightlane_error(error, self.part)
        if isinstance(told, PeerLostError) and told.peer in self._control and not isinstance(self._lost, ProtocolError):
            return told
        if isinstance(error, ClosedError) or (isinstance(error, TransportError) and self._control):
            with self._noticed:
                self._noticed.wait_for(lambda: self._lost is not None, _CULPRIT_WAIT_S)
        if isinstance(error, (ClosedError, TransportError)) and self._lost is not None:
            return self._lost
        return told

    # -- the watching thread ------------------------------------------------------------------------------------------------

    _events: int

    def _watch(self) -> None:
        """Until the link is closed: notice who hangs up or complains, and end what waits for them."""
        watched = {channel.fileno(): channel for channel in self._control.values()}
        call, since = 0, 0.0
        with contextlib.suppress(ClosedError):
            while watched or self._lost is not None:
                with self._life.call():
                    ready = self._life.wait(dict.fromkeys(watched, self._events), _LOOK_S if self._lost else _NEVER_S)
                    for descriptor in ready:
                        self._notice(self._heard(watched.pop(descriptor)))
                if self._lost is None:
                    continue
                if self._calls != call:  # nobody waits, or another call than before
                    call, since = self._calls, time.monotonic()
                if isinstance(self._lost, ProtocolError) or (call % 2 and time.monotonic() - since > _GRACE_S):
                    self.half.close()
                    return

    def _heard(self, channel: Channel) -> WeightlaneError:
        return channel.lost()

    def _notice(self, error: WeightlaneError) -> None:
        with self._noticed:
            if self._lost is None or isinstance(error, ProtocolError):
                self._lost = error
            self._noticed.notify_all()


class SenderLink(_Link[WeightSender]):
    """The sender's end.

    Args:
        engine: Makes the half.
        name: The participant.
        device: Where its buckets live; an accelerator with its index.
    """

    _events = select.POLLIN

    def __init__(self, engine: CheckpointEngine, name: str, device: torch.device) -> None:
        super().__init__(engine, "sender", name, engine.make_sender(name, device))
        self._listener: Listener | None = None

    def address(self) -> Address:
        """Where receivers' links find this one; it can be contacted from now on. Plain data."""
        with self._call():
            if self._meets and self._listener is None:
                self._listener = self._engine.meeting(self._name).listen(self.part)
            meeting = dict(self._listener.address) if self._listener is not None else {}
            return {"meeting": meeting, "engine": dict(self.half.address())}

    def connect(self, topology: Topology, deadline: Deadline) -> None:
        """Let every receiver of `topology` in, and connect the half.

        Raises `PeerLostError`, `DeadlineExceededError`, or what the engine raises.
        """
        self._session, self._key = topology.session, topology.key
        if self._meets:
            self.address()
            with self._call():
                assert self._listener is not None
                lanes = accept_receivers(
                    self._listener.socket,
                    self._life,
                    topology.session,
                    topology.receivers,
                    deadline,
                    lanes=self._lanes(),
                    key=topology.key,
                )
                self._listener.close()
                self._opened(lanes)
                welcome(self._control.values(), deadline)
        with self._call():
            self.half.connect(_of_engine(topology, self.part), self._channels, deadline)

    def post(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline, checksum: str = "") -> None:
        """Say to `receivers` which bucket comes, and post it. Waits for nobody but a receiver whose socket is full."""
        with self._call():
            if unknown := sorted(set(receivers) - set(self._control)) if self._meets else []:
                raise ProtocolError(f"not connected to {', '.join(unknown)}.", part=self.part)
            if self._meets:
                bucket = replace(bucket, to_all=len(set(receivers)) == len(self._control))
            said = [bucket.version, bucket.index, bucket.nbytes, bucket.to_all, checksum]
            header = {"bucket": said, "proof": proof(self._key, _BUCKET, self._session, json.dumps(said))}
            for name in receivers if self._meets else ():
                self._control[name].send_json(header, deadline)
            self.half.post(bucket, receivers)

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """See `WeightSender.flush`."""
        with self._call():
            self.half.flush(deadline, pending)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """See `ViewableSender.reclaim`."""
        with self._call(final=False):  # other memory can be taken
            cast("ViewableSender", self.half).reclaim(version, deadline)

    def open_version(self, files: VersionFiles, deadline: Deadline) -> None:
        """See `StoringSender.open_version`."""
        with self._call():
            cast("StoringSender", self.half).open_version(files, deadline)

    def commit_version(self, version: int, documents: Mapping[str, str], deadline: Deadline) -> None:
        """See `StoringSender.commit_version`."""
        with self._call():
            cast("StoringSender", self.half).commit_version(version, documents, deadline)

    def _heard(self, channel: Channel) -> WeightlaneError:
        """A receiver says nothing unless it complains."""
        try:
            complaint = channel.receive_json(Deadline.after(_CULPRIT_WAIT_S), "a complete message").get("refused")
        except WeightlaneError as error:
            return error if isinstance(error, PeerLostError) else channel.lost()
        return ProtocolError(f"the receiver refused a bucket: {complaint}.", part=self.part, peer=channel.peer)

    def _release(self) -> None:
        if self._listener is not None:
            self._listener.close()
        super()._release()


class ReceiverLink(_Link[WeightReceiver]):
    """A receiver's end.

    Args:
        engine: Makes the half.
        name: The participant.
        device: Where its buckets live; an accelerator with its index.
    """

    _events = _HANG_UP
    _hopeless = False  # what a sender has said before it left can still be read

    def __init__(self, engine: CheckpointEngine, name: str, device: torch.device) -> None:
        super().__init__(engine, "receiver", name, engine.make_receiver(name, device))

    def views_are_copied_to(self, device: torch.device) -> None:
        """Say, before it connects, where the caller copies what it views; see `ViewingReceiver.copied_to`."""
        if self._engine.capabilities.views:
            cast("ViewingReceiver", self.half).copied_to = device

    def address(self) -> Address:
        """What the sender's link gets to know of this one. Plain data."""
        with self._call():
            return {"engine": dict(self.half.address())}

    def connect(self, topology: Topology, deadline: Deadline) -> None:
        """Knock at every sender of `topology`, and connect the half. Raises as `SenderLink.connect`."""
        self._session, self._key = topology.session, topology.key
        if self._meets:
            with self._call():
                self._knock(topology, deadline)
        with self._call():
            self.half.connect(_of_engine(topology, self.part), self._channels, deadline)

    def _knock(self, topology: Topology, deadline: Deadline) -> None:
        meeting = self._engine.meeting(self._name)
        lanes: list[dict[str, Channel]] = [{} for _ in self._lanes()]
        try:
            for sender, address in topology.senders.items():
                target = meeting.target(_part_of(address, "meeting", self.part, sender), self.part, sender)
                for lane, channels in zip(self._lanes(), lanes, strict=True):
                    channels[sender] = dial(
                        target,
                        self._life,
                        deadline,
                        session=topology.session,
                        name=self._name,
                        peer=sender,
                        lane=lane,
                        key=topology.key,
                    )
            for channel in lanes[0].values():
                welcomed(channel, deadline)
        except BaseException:
            for channels in lanes:
                for channel in channels.values():
                    channel.close()
            raise
        self._opened(lanes)

    def announced(self, sender: str) -> bool:
        """Whether `post` and `view` of the next bucket from `sender` would wait for nobody."""
        if not self._meets:
            return True
        with self._call():
            return bool(self._life.wait({self._channel(sender).fileno(): select.POLLIN}, 0.0))

    def post(self, bucket: Bucket, sender: str, deadline: Deadline) -> str:
        """Wait until `sender` says that `bucket` comes next, and post it; returns its checksum as the sender said it.

        Raises `ProtocolError` when another bucket comes, and has the sender raise it, too; else as `flush`.
        """
        with self._call():
            if not self._meets:
                self.half.post(bucket, sender)
                return ""
            to_all, checksum = self._expect(sender, bucket.version, bucket.index, bucket.nbytes, deadline)
            self.half.post(replace(bucket, to_all=to_all), sender)
            return checksum

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """See `WeightReceiver.flush`."""
        with self._call():
            self.half.flush(deadline, pending)

    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> tuple[torch.Tensor, str]:
        """See `ViewingReceiver.view`; the bucket and its checksum. Raises as `post`."""
        with self._call():
            _, checksum = self._expect(sender, version, index, nbytes, deadline)
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

    def _expect(self, sender: str, version: int, index: int, nbytes: int, deadline: Deadline) -> tuple[bool, str]:
        """What `sender` says of the next bucket, which must be this one: whether everybody gets it, and its checksum."""
        channel = self._channel(sender)
        what = f"bucket {index} of version {version}"
        message = channel.receive_json(deadline, what)
        said = message.get("bucket")
        if not proves(self._key, message.get("proof"), _BUCKET, self._session, json.dumps(said)):
            raise ProtocolError(f"what came ahead of {what} is not the sender's.", part=self.part, peer=sender)
        match said:
            case [int() as their_version, int() as their_index, int() as size, bool() as to_all, str() as checksum]:
                if (their_version, their_index, size) == (version, index, nbytes):
                    return to_all, checksum
                offer = f"version {their_version}, bucket {their_index} of {size} bytes"
            case _:
                offer = repr(said)
        with contextlib.suppress(WeightlaneError):  # it may have gone
            channel.send_json({"refused": f"it waits for {what} with {nbytes} bytes"}, deadline.within(_CULPRIT_WAIT_S))
        raise ProtocolError(
            f"expected version {version}, bucket {index} of {nbytes} bytes, but the sender offers {offer}.",
            part=self.part,
            peer=sender,
        )


def _of_engine(topology: Topology, part: str) -> Topology:
    """`topology` with the engine's own addresses."""

    def own(addresses: Mapping[str, Address]) -> dict[str, Address]:
        return {name: _part_of(address, "engine", part, name) for name, address in addresses.items()}

    return Topology(topology.session, own(topology.senders), own(topology.receivers), key=topology.key)


def _part_of(address: Address, key: str, part: str, peer: str) -> Address:
    found: Any = address.get(key)
    if not isinstance(found, Mapping):
        raise ProtocolError(f"{dict(address)} is not the address of a link.", part=part, peer=peer)
    return found


def sender_link(engine: CheckpointEngine, name: str, device: torch.device) -> SenderLink:
    """The link of a new sender of `engine`."""
    kind, _ = engine.link_types or (SenderLink, ReceiverLink)
    return kind(engine, name, device)


def receiver_link(engine: CheckpointEngine, name: str, device: torch.device) -> ReceiverLink:
    """The link of a new receiver of `engine`."""
    _, kind = engine.link_types or (SenderLink, ReceiverLink)
    return kind(engine, name, device)
