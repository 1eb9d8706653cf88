"""Where the participants of a run meet: one torch TCPStore, used as inboxes and as a key-value mailbox.

The coordinator's process hosts the store; every other process joins it by host and port. An inbox is a queue of the store
with one reader, so a participant waits in one place for whatever comes next. Values are JSON; nothing is pickled.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError
from weightlane.ckpt_engines.process_group import host_store, join_store

from .messages import Message, decode, encode

COORDINATOR = "coordinator"
"""Name of the coordinator's inbox."""

_FOREVER = timedelta(days=3650)
_JOIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Host and port of a run's store."""

    host: str
    port: int

    def to_plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"host": self.host, "port": self.port}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RendezvousAddress:
        """Parse an address; `ProtocolError` for anything else."""
        try:
            return cls(str(plain["host"]), int(plain["port"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not a rendezvous address: {plain!r} ({error}).", part="rendezvous") from None


class Rendezvous:
    """A process's connection to the run's store. Thread-safe for posting; make one `Inbox` per reading thread."""

    def __init__(self, store: dist.Store, address: RendezvousAddress) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.address = address

    @classmethod
    def host(cls, host: str = "127.0.0.1", port: int = 0) -> Rendezvous:
        """Open the store on `host`; `AddressInUseError` if the port is taken."""
        store, bound = host_store(host, port)
        return cls(store, RendezvousAddress(host, bound))

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
                self._store.queue_push(_queue(name), encode(message))
        except dist.DistError as error:
            raise self._gone() from error

    def inbox(self, name: str) -> Inbox:
        """The inbox called `name`, on a connection of its own: reading blocks a connection."""
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        return Inbox(name, join_store(self.address.host, self.address.port, deadline), self.address)

    def mailbox(self, scope: str) -> StoreMailbox:
        """A key-value mailbox whose keys are private to `scope`, on a connection of its own."""
        deadline = Deadline.after(_JOIN_TIMEOUT_S)
        store = join_store(self.address.host, self.address.port, deadline)
        return StoreMailbox(dist.PrefixStore(f"mailbox/{scope}", store), scope)

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

        Without a deadline the wait ends when a message comes or the store goes away. Raises `DeadlineExceededError`,
        `ClosedError` when the store is gone, or `ProtocolError` for a malformed message.
        """
        self._store.set_timeout(deadline.timedelta() if deadline else _FOREVER)
        try:
            if deadline and deadline.expired and not self._store.queue_len(_queue(self.name)):
                raise deadline.error(waiting_for, part=self.name)
            data = self._store.queue_pop(_queue(self.name))
        except dist.DistNetworkError as error:
            raise _store_gone(self._address) from error
        except dist.DistError as error:
            if deadline and deadline.remaining_s < 0.05:  # noqa: PLR2004 - the store rounds its timeout to milliseconds
                raise deadline.error(waiting_for, part=self.name) from None
            raise _store_gone(self._address) from error
        return decode(data)


class StoreMailbox:
    """The `weightlane.ckpt_engines.Mailbox` given to engines."""

    def __init__(self, store: dist.Store, scope: str) -> None:
        self._store = store
        self._scope = scope

    def put(self, key: str, value: Any) -> None:
        """Publish JSON-representable `value` under `key`."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str, deadline: Deadline) -> Any:
        """Wait for `key`; `DeadlineExceededError` when it does not appear in time."""
        try:
            self._store.wait([key], deadline.timedelta())
        except dist.DistNetworkError as error:
            raise ClosedError(
                f"the rendezvous store is gone, and with it mailbox {self._scope}.", part="mailbox"
            ) from error
        except dist.DistError as error:
            raise deadline.error(f"{key!r} in mailbox {self._scope}", part="mailbox") from error
        try:
            return json.loads(self._store.get(key))
        except ValueError as error:
            raise ProtocolError(f"{key!r} in mailbox {self._scope} is not JSON: {error}.", part="mailbox") from None


def _queue(name: str) -> str:
    return f"inbox/{name}"


def _store_gone(address: RendezvousAddress) -> ClosedError:
    return ClosedError(
        f"the rendezvous store at {address.host}:{address.port} is gone.",
        part="rendezvous",
        hint="The process that started the run has ended.",
    )
