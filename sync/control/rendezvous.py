"""`Rendezvous`: a process's connection to the control plane of a run, with its inboxes and mailboxes.

Each participant has one connection to the hub in the coordinator's process (`weightlane.sync.control.hub.hub`). Over it the hub
sends messages for the participant's inbox as soon as they are posted, and the participant reads and writes mailboxes. Both ends
prove that they know the run's secret, which is part of the rendezvous address. All frames are signed; nothing is pickled. The
process groups of torch.distributed use a TCPStore, which the coordinator's process opens when the first group requests it.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

import torch.distributed as dist

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError, WeightlaneError
from weightlane.ckpt_engines.channels.channel import Frame, derive_key, new_secret
from weightlane.ckpt_engines.channels.dialer import dial
from weightlane.ckpt_engines.channels.handshake import Hello
from weightlane.ckpt_engines.engines.torch_distributed.process_group import join_store
from weightlane.ckpt_engines.runtime.lifecycle import Lifecycle

from ..config import SILENCE_S
from .hub.connection import ControlConnection, HubClient, Item, PendingReply
from .hub.hub import ControlHub, Member
from .messages import COORDINATOR, Kind, Message, Stop, decode, encode, from_bytes, to_bytes

_JOIN_TIMEOUT_S = 30.0
"""Time limit to connect to the hub, or to get the port of its torch store: a thousand participants may connect at once."""
_PORTS = 1 << 16


class Inbox:
    """A queue of control messages with one reader.

    Args:
        client: This process's connection to the hub.
        name: The inbox's name; it gets the messages that are posted to that name from now on.
        keep_open: The owner of the connection. The reference keeps the connection open.
    """

    def __init__(self, client: HubClient, name: str, keep_open: object) -> None:
        self.name = name
        self._client = client
        self._keep_open = keep_open
        self._queue = client.open_inbox(name)

    def get(self, deadline: Deadline | None = None) -> Message:
        """Wait for the next message.

        Raises `DeadlineExceededError`, `ClosedError` if the connection to the hub has ended, or `ProtocolError` for a malformed
        message.
        """
        while (message := self._next(deadline)) is None:
            if deadline is not None and deadline.expired:
                raise deadline.error("a control message", part=self.name)
        return message

    def get_nowait(self) -> Message | None:
        """The next message if there is one. Raises the same errors as `get`."""
        return self._next(Deadline.after(0.0))

    def stop(self) -> None:
        """Append a `Stop` message for this inbox's reader."""
        self._queue.put(encode(Stop()))

    def _next(self, deadline: Deadline | None) -> Message | None:
        item: Item
        try:
            item = self._queue.get(timeout=deadline.remaining_s if deadline else None)
        except Empty:
            return None
        if isinstance(item, WeightlaneError):
            self._queue.put(item)  # the next call raises it, too
            raise item
        return decode(item)


class Mailbox:
    """JSON values by key, in one scope. Every method raises `ClosedError` if the connection to the hub has ended.

    Args:
        client: This process's connection to the hub.
        scope: The scope. A scope that is named after a session ends with it.
        keep_open: The owner of the connection. The reference keeps the connection open.
    """

    def __init__(self, client: HubClient, scope: str, keep_open: object) -> None:
        self._client = client
        self._keep_open = keep_open
        self.scope = scope

    def within(self, part: str) -> Mailbox:
        """The mailbox of a part of this scope."""
        return Mailbox(self._client, f"{self.scope}/{part}", self._keep_open)

    def put(self, key: str, value: Any) -> None:
        """Store the JSON-representable `value` under `key`."""
        self._client.tell(Frame(Kind.PUT, 0, self._name(key), to_bytes(value)))

    def get(self, key: str, deadline: Deadline) -> Any:
        """Wait for the value of `key`. Raises `DeadlineExceededError`, or `ClosedError` when the scope's session is over."""
        what = f"{key!r} in mailbox {self.scope}"
        asked = self._client.ask(Frame(Kind.GET, 0, self._name(key), b""))
        if (value := asked.result(deadline)) is None:
            raise deadline.error(what, part="mailbox")
        return from_bytes(value, what)

    def gather(self, count: int) -> PendingReply:
        """Request all values of this scope once it has `count` keys; parse them with `sync.control.hub.mailboxes.gathered`."""
        return self._client.ask(Frame(Kind.GATHER, 0, self.scope, str(count).encode()))

    def delete(self, key: str) -> None:
        """Delete the value of `key`, if it has one. No participant may be waiting for it."""
        self._client.tell(Frame(Kind.DELETE, 0, self._name(key), b""))

    def _name(self, key: str) -> str:
        return f"{self.scope}\n{key}"


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Host and port of a run's hub, and the run's secret. Every program that has it can join the run: keep it secret."""

    host: str
    port: int
    secret: str = field(repr=False)

    def to_plain(self) -> dict[str, Any]:
        """The address as JSON-representable data."""
        return {"host": self.host, "port": self.port, "secret": self.secret}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RendezvousAddress:
        """The inverse of `to_plain`. Raises `ProtocolError` for other data."""
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
    """Connects this process to a run's control plane, until it is closed or garbage-collected. Thread-safe.

    Its methods raise `ClosedError`, which names the coordinator, if the connection to the hub has ended.
    """

    def __init__(
        self,
        client: HubClient,
        address: RendezvousAddress,
        close: Callable[[], None],
        abandon: Callable[[], None],
        hosted: ControlHub | None = None,
    ) -> None:
        self.address = address
        self._client = client
        self._hosted = hosted
        self._close, self._process = close, os.getpid()
        _when_forgotten(self, abandon)

    @classmethod
    def host(cls, host: str = "127.0.0.1", port: int = 0, silence_s: float = SILENCE_S) -> Rendezvous:
        """Open a hub on `host`. Raises `AddressInUseError` if the port is taken.

        The host of a member, or of the hub, counts as gone after `silence_s` seconds of silence.
        """
        secret, client = new_secret(), HubClient()
        hub = ControlHub(host, port, _key(secret), silence_s)
        member = Member(lambda frame, _digest: client.received(frame))
        client.send = lambda frame: hub.handle(member, frame)
        return cls(client, RendezvousAddress(host, hub.port, secret), hub.close, hub.close, hub)

    @classmethod
    def join(cls, address: RendezvousAddress | Mapping[str, Any], timeout_s: float = _JOIN_TIMEOUT_S) -> Rendezvous:
        """Connect to the hub of another process. Raises the errors of `weightlane.ckpt_engines.channels.dialer.dial`."""
        if not isinstance(address, RendezvousAddress):
            address = RendezvousAddress.from_plain(address)
        client, life = HubClient(), Lifecycle("control connection", lambda: None)
        try:
            where, deadline = (address.host, address.port), Deadline.after(timeout_s)
            channel = dial(where, life, deadline, peer=COORDINATOR, key=_key(address.secret), hello=Hello())
        finally:
            life.close()
        connection = ControlConnection(
            channel.socket, channel.keys, client.received, lambda reason: client.ended(_gone(address, reason))
        )
        client.send = connection.send
        connection.start()
        return cls(client, address, connection.close, connection.abandon)

    def end_waits(self, error: WeightlaneError) -> None:
        """Let every wait for a value in a mailbox, also a later one, raise `error`."""
        self._client.end_waits(error)

    def close(self) -> None:
        """Leave the run; in the hub's process, close the hub. Idempotent, never waits."""
        if os.getpid() == self._process:  # else it is the parent's
            self._close()

    def post(self, name: str, message: Message) -> None:
        """Append `message` to the inbox `name`."""
        self.post_all([name], message)

    def post_all(self, names: Iterable[str], message: Message) -> None:
        """Append `message` to the inboxes `names`; it is encoded once."""
        payload = encode(message)
        if self._hosted is not None:
            self._hosted.post(names, payload)
            return
        for name in names:
            self._client.tell(Frame(Kind.POST, 0, name, payload))

    def wait_until_unread(self, inboxes: Collection[str], deadline: Deadline) -> list[str]:
        """[host] Wait until nobody reads `inboxes` any more. Returns those that have a reader at `deadline`."""
        return self._hub.wait_until_unread(inboxes, deadline)

    def inbox(self, name: str) -> Inbox:
        """Open the inbox `name`, which gets all messages posted to it from now on."""
        return Inbox(self._client, name, self)

    def mailbox(self, scope: str) -> Mailbox:
        """The mailbox of `scope`."""
        return Mailbox(self._client, scope, self)

    def forget_session(self, session: str) -> None:
        """[host] Drop a session's values in mailboxes and in the torch store. Waits for such values raise `ClosedError`."""
        self._hub.forget_session(session)

    def session_key(self, session: str) -> bytes:
        """The secret of one session, for `Topology.key`."""
        return derive_key(self.address.secret, f"session/{session}")

    def store(self, scope: str) -> dist.Store:
        """A torch store with a key prefix for `scope`, for the handshakes of process groups."""
        port = self._client.ask(Frame(Kind.STORE, 0, "", b"")).result(deadline := Deadline.after(_JOIN_TIMEOUT_S))
        if port is None:
            raise deadline.error("the port of the torch store", part="rendezvous", peer=COORDINATOR)
        return dist.PrefixStore(scope, join_store(self.address.host, int(port), deadline, COORDINATOR))

    @property
    def _hub(self) -> ControlHub:
        assert self._hosted is not None, "called in the hub's process"
        return self._hosted

    @property
    def local_host(self) -> str:
        """This machine's address on the network that leads to the hub; loopback in the hub's process."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
            probe.connect((self.address.host, self.address.port))
            return str(probe.getsockname()[0])

    @property
    def traffic(self) -> tuple[int, int]:
        """[host] Approximate number of messages and of bytes that the hub has received and sent."""
        messages, nbytes = self._hub.traffic
        return messages, nbytes


def _key(secret: str) -> bytes:
    """The key that the members of a run and its hub use to authenticate each other."""
    return derive_key(secret, "control")


def _when_forgotten(owner: object, close: Callable[[], None]) -> None:
    """Call `close`, which takes no lock, once `owner` is garbage-collected.

    A forked process leaves the call to its parent, and an exiting process leaves closing to the kernel.
    """
    process = os.getpid()
    weakref.finalize(owner, lambda: close() if os.getpid() == process else None).atexit = False


def _gone(address: RendezvousAddress, reason: str) -> ClosedError:
    return ClosedError(
        f"the coordinator at {address.host}:{address.port} is gone: {reason}.",
        part="rendezvous",
        peer=COORDINATOR,
        hint="The process that started the run has ended, or its host or the network in between has failed.",
    )
