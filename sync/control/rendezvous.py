"""Where the participants of a run meet: a hub in the coordinator's process, and a torch TCPStore for process groups.

Each participant has one connection to the hub (`weightlane.sync.control.hub.hub`), over which messages for its inbox come as soon
as they are posted, and over which it reads and writes mailboxes. Both ends prove that they hold the run's secret, which is
part of the rendezvous address, and everything that they say is signed; nothing is pickled. Groups of torch.distributed meet in
a TCPStore that the same process opens when the first of them asks for it.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError, WeightlaneError
from weightlane.ckpt_engines.channels.mac import derive_key, new_secret
from weightlane.ckpt_engines.engines.torch_distributed.tcp_store import host_store, join_store

from ..config import SILENCE_S
from .hub.client import HubClient, Mark, PendingReply, next_of
from .hub.frames import ControlConnection, Frame, dial
from .hub.hub import COORDINATOR, ControlHub, Kind, Member
from .hub.plain_bytes import from_bytes, to_bytes
from .messages import Message, Stop, decode, encode

__all__ = ["COORDINATOR", "Inbox", "Mailbox", "Rendezvous", "RendezvousAddress"]

_JOIN_TIMEOUT_S = 30.0
_ANSWER_S = 30.0
"""Most seconds for an answer that the hub has at once."""
_PORTS = 1 << 16


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Host and port of a run's hub, and the secret that its members share. Who has it is a member: hand it on with care."""

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
    """A process's place in a run's control plane. Thread-safe. Closed when nobody refers to it any more.

    Its methods raise `ClosedError`, which names the coordinator, when the hub is gone.
    """

    def __init__(
        self,
        member: HubClient,
        address: RendezvousAddress,
        close: Callable[[], None],
        abandon: Callable[[], None],
        hosted: tuple[ControlHub, _Store] | None = None,
    ) -> None:
        self._member = member
        self._hosted = hosted
        self._close, self._process = close, os.getpid()
        _when_forgotten(self, abandon)
        self.address = address

    @classmethod
    def host(cls, host: str = "127.0.0.1", port: int = 0, silence_s: float = SILENCE_S) -> Rendezvous:
        """Open a hub on `host`; `AddressInUseError` if the port is taken.

        Both it and its members take a host that has said nothing for `silence_s` seconds for gone.
        """
        secret, store = new_secret(), _Store(host)
        hub = ControlHub(host, port, secret, silence_s, store.port)
        member = HubClient()
        local = Member(member.received)
        member.send = lambda frame, _digest=None: hub.handle(local, frame)
        return cls(member, RendezvousAddress(host, hub.port, secret), hub.close, hub.close, (hub, store))

    @classmethod
    def join(cls, address: RendezvousAddress | Mapping[str, Any], timeout_s: float = _JOIN_TIMEOUT_S) -> Rendezvous:
        """Connect to a hub that another process hosts. Raises as `control_wire.dial`."""
        if not isinstance(address, RendezvousAddress):
            address = RendezvousAddress.from_plain(address)
        sock, keys = dial(address.host, address.port, address.secret, Deadline.after(timeout_s))
        member = HubClient()
        connection = ControlConnection(sock, keys, member.received, lambda why: member.ended(_gone(address, why)))
        member.send = connection.send
        connection.start()
        return cls(member, address, connection.close, connection.abandon)

    def close(self) -> None:
        """Leave, or where the hub is, let nobody meet here any more. Idempotent, never waits."""
        if os.getpid() == self._process:  # else it is the parent's
            self._close()

    def post(self, name: str, message: Message) -> None:
        """Append `message` to the inbox called `name`."""
        self.post_all([name], message)

    def post_all(self, names: Iterable[str], message: Message) -> None:
        """Append `message` to several inboxes; it is encoded once."""
        payload = encode(message)
        if self._hosted is not None:
            self._hub.post(names, payload)
            return
        for name in names:
            self._member.tell(Frame(Kind.POST, 0, name, payload))

    def wait_until_read(self, names: Iterable[str], deadline: Deadline) -> list[str]:
        """[host] Wait until everything in these inboxes was read. Returns those whose readers have not come so far in time."""
        hub = self._hub
        unread, changed = set(names), threading.Condition()

        def read(name: str) -> None:
            with changed:
                unread.discard(name)
                changed.notify_all()

        marks = [hub.mark(name, read) for name in list(unread)]
        with changed:
            changed.wait_for(lambda: not unread, deadline.remaining_s)
            left = sorted(unread)
        hub.unmark(marks)
        return left

    def inbox(self, name: str) -> Inbox:
        """The inbox called `name`, which is read here from now on."""
        return Inbox(name, self)

    def mailbox(self, scope: str) -> Mailbox:
        """A key-value mailbox whose keys are private to `scope`."""
        return Mailbox(self, scope)

    def forget_session(self, session: str) -> None:
        """[host] A session is over: what it has left in mailboxes and in the store goes, and who waits for more hears of it."""
        self._hub.forget_session(session)
        if self._hosted is not None:
            self._hosted[1].forget(session)

    def session_key(self, session: str) -> bytes:
        """The secret of one connection, for `Topology.key`."""
        return derive_key(self.address.secret, f"session/{session}")

    def store(self, scope: str) -> dist.Store:
        """A torch store whose keys are private to `scope`, for handshakes of process groups."""
        port = self._member.ask(Frame(Kind.STORE, 0, "", b"")).result(deadline := Deadline.after(_JOIN_TIMEOUT_S))
        if port is None:
            raise deadline.error("the port of the torch store", part="rendezvous", peer=COORDINATOR)
        return dist.PrefixStore(scope, join_store(self.address.host, int(port), deadline, COORDINATOR))

    @property
    def _hub(self) -> ControlHub:
        assert self._hosted is not None, "called where the hub is"
        return self._hosted[0]

    @property
    def local_host(self) -> str:
        """This machine's address on the network that leads to the hub; loopback when the hub is here."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
            probe.connect((self.address.host, self.address.port))
            return str(probe.getsockname()[0])

    @property
    def traffic(self) -> tuple[int, int]:
        """[host] About how many messages and bytes have gone through the hub, in either direction."""
        messages, nbytes = self._hub.traffic
        return messages, nbytes

    @property
    def kept(self) -> dict[str, int]:
        """[host] How many values the mailbox of each scope has."""
        return self._hub.kept


class Inbox:
    """A queue of control messages with one reader."""

    def __init__(self, name: str, rendezvous: Rendezvous) -> None:
        self.name = name
        self._rendezvous = rendezvous  # which stays open for as long as this is read
        self._member = rendezvous._member
        self._queue = self._member.open_inbox(name)

    def get(self, deadline: Deadline | None = None, *, waiting_for: str = "a control message") -> Message:
        """The next message.

        Without a deadline the wait ends when a message comes or the hub is gone. Raises `DeadlineExceededError`, `ClosedError`
        when the hub is gone, or `ProtocolError` for a malformed message.
        """
        while (message := self._next(deadline.remaining_s if deadline else None)) is None:
            if deadline is not None and deadline.expired:
                raise deadline.error(waiting_for, part=self.name)
        return message

    def get_nowait(self) -> Message | None:
        """The next message if one is there already."""
        return self._next(0.0)

    def stop(self) -> None:
        """Have the reader find a `Stop` behind what is there."""
        self._queue.put(encode(Stop()))

    def _acknowledge(self, mark: Mark) -> None:
        self._member.send(Frame(Kind.READ, mark.number, self.name, b""))

    def _next(self, timeout_s: float | None) -> Message | None:
        deadline = Deadline.after(timeout_s) if timeout_s is not None else None
        while isinstance(item := next_of(self._queue, deadline.remaining_s if deadline else None), Mark):
            self._acknowledge(item)
        if isinstance(item, WeightlaneError):
            self._queue.put(item)  # for the next one who reads
            raise item
        return None if item is None else decode(item)


class Mailbox:
    """JSON values by key, which the participants share. Every method raises `ClosedError` when the hub is gone."""

    def __init__(self, rendezvous: Rendezvous, scope: str) -> None:
        self._rendezvous = rendezvous
        self._member = rendezvous._member
        self.scope = scope

    def within(self, part: str) -> Mailbox:
        """The mailbox of a part of this scope."""
        return Mailbox(self._rendezvous, f"{self.scope}/{part}")

    def put(self, key: str, value: Any) -> None:
        """Publish JSON-representable `value` under `key`."""
        self._member.tell(Frame(Kind.PUT, 0, self._name(key), to_bytes(value)))

    def get(self, key: str, deadline: Deadline) -> Any:
        """Wait for `key`; `DeadlineExceededError` when it does not appear in time, `ClosedError` when its session is over."""
        what = f"{key!r} in mailbox {self.scope}"
        asked = self._member.ask(Frame(Kind.GET, 0, self._name(key), b""))
        if (value := asked.result(deadline)) is None:
            raise deadline.error(what, part="mailbox")
        return from_bytes(value, what)

    def gather(self, count: int) -> PendingReply:
        """Ask for everything in this scope once there are `count` keys; see `control_hub.gathered`."""
        return self._member.ask(Frame(Kind.GATHER, 0, self.scope, str(count).encode()))

    def has(self, key: str) -> bool:
        """Whether `key` is there."""
        deadline = Deadline.after(_ANSWER_S)
        found = self._member.ask(Frame(Kind.HAS, 0, self._name(key), b"")).result(deadline)
        if found is None:
            raise deadline.error(f"whether {key!r} is in mailbox {self.scope}", part="mailbox", peer=COORDINATOR)
        return found == b"true"

    def delete(self, key: str) -> None:
        """Forget `key`, which need not be there. Nobody may be waiting for it."""
        self._member.tell(Frame(Kind.DELETE, 0, self._name(key), b""))

    def _name(self, key: str) -> str:
        return f"{self.scope}\n{key}"


class _Store:
    """The torch store of a run, opened when it is first asked for."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._opened: tuple[dist.TCPStore, int] | None = None

    def port(self) -> int:
        """Where it listens."""
        with self._lock:
            if self._opened is None:
                self._opened = host_store(self._host)
            return self._opened[1]

    def forget(self, session: str) -> None:
        """Delete the keys of the groups that met for `session`."""
        with self._lock:
            if self._opened is not None:
                store, _ = self._opened
                for key in store.list_keys():
                    if session in key.split("/"):
                        store.delete_key(key)


def _when_forgotten(owner: object, close: Callable[[], None]) -> None:
    """Call `close`, which takes no lock, once nobody refers to `owner` any more.

    A forked process leaves that to its parent, and a process that ends to the kernel.
    """
    process = os.getpid()
    weakref.finalize(owner, lambda: close() if os.getpid() == process else None).atexit = False


def _gone(address: RendezvousAddress, why: str) -> ClosedError:
    return ClosedError(
        f"the coordinator at {address.host}:{address.port} is gone: {why}.",
        part="rendezvous",
        peer=COORDINATOR,
        hint="The process that started the run has ended, or its host or the network in between has failed.",
    )
