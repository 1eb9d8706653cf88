"""Where the participants of a run meet: one torch TCPStore, used as inboxes and as a key-value mailbox.

The coordinator's process hosts the store; every other process joins it by host and port. An inbox is a queue of the store
with one reader, so a participant waits in one place for whatever comes next. Values are JSON, signed with the run's secret,
which is part of the rendezvous address; nothing is pickled, and what is not signed is dropped.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weightlane.ckpt_engines import ClosedError, Deadline, PeerLostError, ProtocolError
from weightlane.ckpt_engines.mac import derive_key, new_secret, sign, verify
from weightlane.ckpt_engines.process_group import host_store, join_store

from .messages import Message, decode, encode

COORDINATOR = "coordinator"
"""Name of the coordinator's inbox."""

_log = logging.getLogger(__name__)
_FOREVER = timedelta(days=3650)
_JOIN_TIMEOUT_S = 30.0
_PORTS = 1 << 16


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Host and port of a run's store, and the secret that its members share. Who has it is a member: hand it on with care."""

    host: str
    port: int
    secret: str = field(repr=False)

    def to_plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"host": self.host, "port": self.port, "secret": self.secret}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RendezvousAddress:
        """Parse an address; `ProtocolError` for anything else."""
        try:
            host, port, secret = str(plain["host"]), int(plain["port"]), plain["secret"]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(
                f"not a rendezvous address: {type(error).__name__} {error}.",
                part="rendezvous",
                hint="It has a host, a port and a secret.",
            ) from None
        if not (isinstance(secret, str) and secret and 0 < port < _PORTS):
            raise ProtocolError(
                "not a rendezvous address: its secret is missing or its port out of range.", part="rendezvous"
            )
        return cls(host, port, secret)


class Rendezvous:
    """A process's connection to the run's store. Thread-safe for posting; make one `Inbox` per reading thread."""

    def __init__(self, store: dist.Store, address: RendezvousAddress) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._connections = _Connections(address)
        self.address = address

    @classmethod
    def host(cls, host: str = "127.0.0.1", port: int = 0) -> Rendezvous:
        """Open the store on `host`; `AddressInUseError` if the port is taken."""
        store, bound = host_store(host, port)
        return cls(store, RendezvousAddress(host, bound, new_secret()))

    @classmethod
    def join(cls, address: RendezvousAddress | Mapping[str, Any], timeout_s: float = _JOIN_TIMEOUT_S) -> Rendezvous:
        """Connect to a store that another process hosts."""
        if not isinstance(address, RendezvousAddress):
            address = RendezvousAddress.from_plain(address)
        return cls(join_store(address.host, address.port, Deadline.after(timeout_s)), address)

    def post(self, name: str, message: Message) -> None:
        """Append `message` to the inbox called `name`; `ClosedError` when the store is gone."""
        try:
            with self._lock:
                self._store.queue_push(_queue(name), sign(self.address.secret, _queue(name), encode(message)))
        except dist.DistError as error:
            raise self._gone() from error

    def unread(self, name: str) -> int:
        """How many messages lie in the inbox called `name`; `ClosedError` when the store is gone."""
        try:
            with self._lock:
                return int(self._store.queue_len(_queue(name)))
        except dist.DistError as error:
            raise self._gone() from error

    def inbox(self, name: str) -> Inbox:
        """The inbox called `name`, on a connection of its own: reading blocks a connection."""
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        return Inbox(name, join_store(self.address.host, self.address.port, deadline), self.address)

    def mailbox(self, scope: str) -> StoreMailbox:
        """A key-value mailbox whose keys are private to `scope`."""
        return StoreMailbox(self._connections, scope, self.address.secret)

    def session_key(self, session: str) -> bytes:
        """The secret of one connection, for `Topology.key`."""
        return derive_key(self.address.secret, f"session/{session}")

    def store(self, scope: str) -> dist.Store:
        """A torch store whose keys are private to `scope`, for handshakes of process groups."""
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        return dist.PrefixStore(scope, join_store(self.address.host, self.address.port, deadline))

    @property
    def local_host(self) -> str:
        """This machine's address on the network that leads to the store; loopback when the store is here."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
            probe.connect((self.address.host, self.address.port))
            return str(probe.getsockname()[0])

    def _gone(self) -> ClosedError:
        return _store_gone(self.address)


class Inbox:
    """A queue of control messages with one reader."""

    def __init__(self, name: str, store: dist.Store, address: RendezvousAddress) -> None:
        self.name = name
        self._store = store
        self._address = address

    def get(self, deadline: Deadline | None = None, *, waiting_for: str = "a control message") -> Message:
        """The next message.

        Without a deadline the wait ends when a message comes or the store goes away. What nobody of this run has signed is
        dropped. Raises `DeadlineExceededError`, `ClosedError` when the store is gone, or `ProtocolError` for a malformed
        message.
        """
        while True:
            data = self._pop(deadline, waiting_for)
            try:
                body = verify(self._address.secret, _queue(self.name), data)
            except ProtocolError as error:
                _log.warning("%s: a message was dropped: %s", self.name, error)
                continue
            return decode(body)

    def get_nowait(self) -> Message | None:
        """The next message if one is there already."""
        try:
            if not self._store.queue_len(_queue(self.name)):
                return None
        except dist.DistError as error:
            raise _store_gone(self._address) from error
        return self.get(Deadline.after(1.0))

    def _pop(self, deadline: Deadline | None, waiting_for: str) -> bytes:
        self._store.set_timeout(deadline.timedelta() if deadline else _FOREVER)
        try:
            if deadline and deadline.expired and not self._store.queue_len(_queue(self.name)):
                raise deadline.error(waiting_for, part=self.name)
            return bytes(self._store.queue_pop(_queue(self.name)))
        except dist.DistNetworkError as error:
            raise _store_gone(self._address) from error
        except dist.DistError as error:
            if deadline and deadline.remaining_s < 0.05:  # noqa: PLR2004 - the store rounds its timeout to milliseconds
                raise deadline.error(waiting_for, part=self.name) from None
            raise _store_gone(self._address) from error


class _Connections:
    """A process's connections to a store that can be used for one operation at a time each, kept for the next one.

    To make one takes longer than what goes through it, and torch looks up the name of whom it connects to: where a name server
    does not answer, that alone takes five seconds.
    """

    def __init__(self, address: RendezvousAddress) -> None:
        self._address = address
        self._idle: list[dist.Store] = []

    @contextmanager
    def one(self, deadline: Deadline | None = None) -> Iterator[dist.Store]:
        """One that nobody else uses meanwhile; `ClosedError` when the store is gone."""
        try:
            store = self._idle.pop()
        except IndexError:
            limit = Deadline.after(_JOIN_TIMEOUT_S) if deadline is None else deadline
            try:
                store = join_store(self._address.host, self._address.port, limit)
            except PeerLostError as error:
                raise _store_gone(self._address) from error
        try:
            yield store
        except dist.DistNetworkError as error:
            raise _store_gone(self._address) from error
        self._idle.append(store)  # not after a failure: nobody knows what it still waits for


class StoreMailbox:
    """Signed JSON values by key, which all participants share. Every method raises `ClosedError` when the store is gone."""

    def __init__(self, connections: _Connections, scope: str, secret: str) -> None:
        self._connections = connections
        self._scope = scope
        self._secret = secret

    def put(self, key: str, value: Any) -> None:
        """Publish JSON-representable `value` under `key`."""
        context = self._context(key)
        with self._connections.one() as store:
            store.set(context, sign(self._secret, context, json.dumps(value).encode()).decode())

    def get(self, key: str, deadline: Deadline) -> Any:
        """Wait for `key`; `DeadlineExceededError` when it does not appear in time."""
        context = self._context(key)
        with self._connections.one(deadline) as store:
            try:
                store.wait([context], deadline.timedelta())
            except dist.DistNetworkError:
                raise
            except dist.DistError as error:
                raise deadline.error(f"{key!r} in mailbox {self._scope}", part="mailbox") from error
            data = store.get(context)
        try:
            return json.loads(verify(self._secret, context, data))
        except (ValueError, RecursionError) as error:
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"{key!r} in mailbox {self._scope} is not JSON: {error}.", part="mailbox") from None

    def has(self, key: str) -> bool:
        """Whether `key` is there."""
        with self._connections.one() as store:
            return bool(store.check([self._context(key)]))

    def delete(self, key: str) -> None:
        """Forget `key`, which need not be there. Nobody may be waiting for it."""
        with self._connections.one() as store:
            store.delete_key(self._context(key))

    def _context(self, key: str) -> str:
        return f"mailbox/{self._scope}/{key}"


def _queue(name: str) -> str:
    return f"inbox/{name}"


def _store_gone(address: RendezvousAddress) -> ClosedError:
    return ClosedError(
        f"the rendezvous store at {address.host}:{address.port} is gone.",
        part="rendezvous",
        hint="The process that started the run has ended.",
    )
