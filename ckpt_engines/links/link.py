"""`Link`: the framework's wrapper around one half of an engine, with the code that both sides share.

The links of two connected halves have a control connection, separate from the connections that the engine uses. On it the sender
announces each bucket, and a receiver refuses a bucket that it does not wait for. A thread of each link watches the control
connections. When a peer hangs up, the thread closes the half, and a call that waits for the peer raises `PeerLostError`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..channels.channel import Address, Channel
from ..contract.capabilities import Delivery
from ..contract.engine import CheckpointEngine, Topology, WeightReceiver, WeightSender, engine_label
from ..deadline import Deadline
from ..errors import (
    ClosedError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    TransportError,
    WeightlaneError,
    as_weightlane_error,
)
from ..runtime.devices import HOST, checked_device
from ..runtime.lifecycle import Lifecycle

_CONTROL, _ENGINE = "control", "engine"
_GRACE_S = 1.0
"""How long a call may continue after its peer hung up: bytes that the peer has sent may still arrive."""
LOSS_WAIT_S = 0.3
"""How long a failed call waits for a peer to hang up: a transport often notices a death first but cannot say whose it was."""
_LOOK_S, _NEVER_S = 0.1, 3600.0
"""Longest pauses of the watching thread, in seconds. After a loss it must notice when `_GRACE_S` is over; before, only events."""

H = TypeVar("H", WeightSender, WeightReceiver)


class BucketHeader(NamedTuple):
    """Which bucket comes next, and its checksum. A sender's link sends it ahead of each bucket, as a JSON list."""

    version: int
    position: int
    """See `Bucket.index`."""
    nbytes: int
    to_all: bool
    """See `Bucket.to_all`."""
    receiver_set: int | None
    """See `Bucket.receiver_set`."""
    checksum: str
    """The checksum as the sender's caller gave it; empty for none."""

    @classmethod
    def read(cls, fields: object) -> BucketHeader | None:
        """Return the header in `fields`, which a peer sent, or None when they hold anything else."""
        match fields:
            case [int(version), int(position), int(nbytes), bool(to_all), int() | None as receiver_set, str(checksum)]:
                return cls(version, position, nbytes, to_all, receiver_set, checksum)
        return None


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
        self._lanes = [_CONTROL, _ENGINE] if engine.capabilities.channels else [_CONTROL]
        self._control: dict[str, Channel] = {}
        self._channels: dict[str, Channel] = {}
        """The engine's connections, by peer."""
        self._receiver_sets: tuple[frozenset[str], ...] = ()
        self._closed = False
        self._call_start: float | None = None
        """When the running call began, on the monotonic clock; None while none is running."""
        self._lost: WeightlaneError | None = None
        """Error for the first peer that hung up, or refused a bucket."""
        self._lost_at = 0.0
        self._loss_noticed = threading.Condition()

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
        self._receiver_sets = tuple(map(frozenset, topology.receiver_sets))
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


def buffer_device(engine: CheckpointEngine, preferred: torch.device | None, part: str) -> torch.device:
    """Return `preferred`, the device of the weights, if `engine` carries its memory, else the CPU.

    Raises `ConfigError` when the engine carries neither memory, or when `preferred` is an accelerator without index.
    """
    devices = engine.capabilities.devices
    if preferred is not None and preferred.type in devices:
        return checked_device(preferred, part)
    if HOST.type in devices:
        return HOST
    where = "on no device that was named" if preferred is None else f"on {preferred}"
    raise ConfigError(
        f"the weights are {where}, and the engine carries {' and '.join(sorted(devices))} memory only.",
        part=part,
        hint="Choose an engine that carries the memory in which the weights are: checkpoint_engine.backend.",
    )
