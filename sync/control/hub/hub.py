"""`ControlHub`: the inboxes and mailboxes of a run, in the memory of the coordinator's process.

Members are connected to the hub by TCP, or call it within its process. The hub sends a message for an inbox to its reader at
once, and replies to a request for a value as soon as the value exists: members do not poll.

`Mailboxes` has the values that members share, in scopes. Most scopes are named after a session (``"plan/s-1a2b"``). When a
session is over its scopes are dropped, and the requests of members that still wait for their values fail.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch.distributed as dist

from weightlane.ckpt_engines import Deadline, as_weightlane_error
from weightlane.ckpt_engines.channels.channel import Frame, Keys, payload_digest
from weightlane.ckpt_engines.channels.handshake import Hello
from weightlane.ckpt_engines.channels.listener import Admission, Listener, listen_tcp
from weightlane.ckpt_engines.engines.torch_distributed.process_group import host_store
from weightlane.ckpt_engines.runtime.threads import start_thread

from ..messages import COORDINATOR, Kind
from .connection import CLOSED_BY_PEER, ControlConnection

_ENTRY = struct.Struct("<HI")
"""Lengths of a key and its value."""
_ENDED_SESSIONS = 1024
"""How many ended sessions are remembered: a late participant may still put a value into a scope of one."""


@dataclass(eq=False)
class Member:
    """A process that is connected to the hub, and the inboxes it reads."""

    send: Callable[[Frame, bytes | None], None]
    """Sends a frame, with the digest of its payload if that is known. Never waits."""
    inboxes: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Scope:
    values: dict[str, bytes] = field(default_factory=dict)
    waits: dict[str | int, set[tuple[Member, int]]] = field(default_factory=lambda: defaultdict(set))
    """Waiting members with the numbers of their requests, by the key or the number of keys that they wait for."""
    gathered: bytes | None = None
    """The cached reply to `GATHER`; None after a value has changed."""

    def answer_to(self, wanted: str | int) -> bytes | None:
        """The value of the key `wanted`, or all values if there are `wanted` keys; None otherwise."""
        if isinstance(wanted, str):
            return self.values.get(wanted)
        if len(self.values) < wanted:
            return None
        if self.gathered is None:
            parts = ((key.encode(), value) for key, value in self.values.items())
            self.gathered = b"".join(_ENTRY.pack(len(key), len(value)) + key + value for key, value in parts)
        return self.gathered


def gathered(data: bytes) -> dict[str, bytes]:
    """Parse a reply to `Kind.GATHER` into values by key."""
    values, offset = {}, 0
    while offset < len(data):
        key_bytes, value_bytes = _ENTRY.unpack_from(data, offset)
        start = offset + _ENTRY.size + key_bytes
        values[data[offset + _ENTRY.size : start].decode()] = data[start : start + value_bytes]
        offset = start + value_bytes
    return values


class Mailboxes:
    """Values by scope and key. Every method may be called from any thread, and none waits.

    Args:
        send: Sends a frame to a member, with the digest of its payload if that is known. It must not wait.
    """

    def __init__(self, send: Callable[[Member, Frame, bytes | None], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._scopes: dict[str, _Scope] = {}
        self._ended: dict[str, None] = {}
        """Sessions that are over, the oldest first."""

    def change(self, frame: Frame) -> None:
        """Handle a `PUT` or a `DELETE`, and reply to the members that waited for the value."""
        name, _, key = frame.name.partition("\n")
        answers: list[tuple[Member, int, bytes]] = []
        with self._lock:
            if frame.kind == Kind.PUT and not self._is_over(name):
                scope = self._scopes.setdefault(name, _Scope())
                scope.values[key] = frame.payload
                scope.gathered = None
                counts = [wanted for wanted in scope.waits if isinstance(wanted, int)]
                for wanted in (key, *counts):
                    if wanted in scope.waits and (value := scope.answer_to(wanted)) is not None:
                        answers += [(*wait, value) for wait in scope.waits.pop(wanted)]
            elif frame.kind == Kind.DELETE and (known := self._scopes.get(name)) is not None:
                known.values.pop(key, None)
                known.gathered = None
                self._drop_if_empty(name, known)
        digests: dict[int, bytes] = {}
        for member, number, value in answers:  # many may have waited for the same value
            if (digest := digests.get(id(value))) is None:
                digest = digests[id(value)] = payload_digest(value)
            self._send(member, Frame(Kind.VALUE, number, "", value), digest)

    def answer(self, member: Member, frame: Frame) -> None:
        """Reply to a `GET`, `GATHER` or `CANCEL` of `member`, now or once the value exists."""
        name, _, key = frame.name.partition("\n")
        with self._lock:
            over = self._is_over(name)
            scope = self._scopes.setdefault(name, _Scope())
            number, asked = json.loads(frame.payload) if frame.kind == Kind.CANCEL else (frame.number, frame.payload)
            wanted = int(asked) if asked else key
            value: bytes | None
            if frame.kind == Kind.CANCEL:
                scope.waits[wanted].discard((member, number))
                if not scope.waits[wanted]:
                    del scope.waits[wanted]
                value = json.dumps(list(scope.values)).encode()
            else:
                value = scope.answer_to(wanted)
                if value is None and not over:
                    scope.waits[wanted].add((member, number))
            self._drop_if_empty(name, scope)
        if value is None and over:
            self._send(member, _over(frame.number, name), None)
        elif value is not None and frame.number:
            self._send(member, Frame(Kind.VALUE, frame.number, "", value), None)

    def forget_session(self, session: str) -> None:
        """Drop the scopes of `session` and of its links, and send `OVER` to the members that wait in them."""
        with self._lock:
            self._ended[session] = None
            if len(self._ended) > _ENDED_SESSIONS:
                del self._ended[next(iter(self._ended))]
            over = {name: self._scopes.pop(name) for name in list(self._scopes) if self._is_over(name)}
        for name, scope in over.items():
            for member, number in chain.from_iterable(scope.waits.values()):
                self._send(member, _over(number, name), None)

    def forget_member(self, member: Member) -> None:
        """Drop all requests of a member that is gone."""
        with self._lock:
            for name, scope in list(self._scopes.items()):
                for wanted, waiting in list(scope.waits.items()):
                    waiting -= {wait for wait in waiting if wait[0] is member}
                    if not waiting:
                        del scope.waits[wanted]
                self._drop_if_empty(name, scope)

    def _is_over(self, scope: str) -> bool:
        session = scope.split("/")[1] if "/" in scope else ""
        return session in self._ended or session.rpartition("-")[0] in self._ended

    def _drop_if_empty(self, name: str, scope: _Scope) -> None:
        if not scope.values and not scope.waits:
            del self._scopes[name]


def _over(number: int, scope: str) -> Frame:
    """The reply to a request in a scope whose session is over."""
    return Frame(Kind.OVER, number, "", f"the session of mailbox {scope} is over.".encode())


_log = logging.getLogger(__name__)
_MOST_PENDING = 8192
"""How many connections may be in their handshake; a thousand members may connect at once."""


class TorchStore:
    """A torch TCPStore that is opened when the first process group requests it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._opened: tuple[dist.TCPStore, int] | None = None

    def port(self) -> int:
        """The port on which the store listens. Opens the store if necessary, which may take seconds."""
        with self._lock:
            if self._opened is None:
                self._opened = host_store(self._host)
            return self._opened[1]

    def forget(self, session: str) -> None:
        """Delete the keys of the process groups of `session`."""
        with self._lock:
            if self._opened is not None:
                store, _ = self._opened
                # torch 2.9 cannot list them: there they stay until the run ends.
                for key in store.list_keys() if hasattr(store, "list_keys") else ():
                    if session in key.split("/"):
                        store.delete_key(key)


class ControlHub:
    """Serves the members of one run.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        key: The key with which members authenticate.
        silence_s: Seconds of silence after which the host of a member, or of the hub, counts as gone.

    Raises:
        AddressInUseError: The port is taken.
        ConfigError: `host` is no address of this machine.
    """

    def __init__(self, host: str, port: int, key: bytes, silence_s: float) -> None:
        self._lock = threading.Lock()
        self._readers: dict[str, Member] = {}
        """The reader of each inbox."""
        self._early: list[Frame] = []
        """Messages for the coordinator that arrived before it reads its inbox."""
        self._left = threading.Condition(self._lock)
        """Notified when a member has left."""
        self._connections: set[ControlConnection] = set()
        self.traffic = [0, 0]
        """Approximate number of messages and of bytes that the hub has received and sent."""
        self.mailboxes = Mailboxes(self._send)
        self.torch_store = TorchStore(host)
        sock = listen_tcp(host, port)
        self.port: int = sock.getsockname()[1]
        self._listener = Listener(sock, {"host": host, "port": self.port})
        self._listener.admit(
            Admission(
                key,
                lambda _, proven: "" if proven else "this participant did not prove that it knows the run's secret",
                self._connect,
                _MOST_PENDING,
                silence_s,
                tells_when_full=True,
            ),
            self._close_connections,
        )

    def close(self) -> None:
        """Stop serving. Idempotent, never waits. Takes no lock, since the garbage collector may call it anywhere."""
        self._listener.close()

    def handle(self, member: Member, frame: Frame) -> None:
        """Handle `frame` of `member`. From any thread; never waits."""
        self._count(frame)
        match frame.kind:
            case Kind.POST:
                self.post([frame.name], frame.payload)
            case Kind.LISTEN:
                self._listen(member, frame.name)
            case Kind.STORE:
                start_thread("weightlane-torch-store", self._send_store_port, member, frame.number)
            case Kind.PUT | Kind.DELETE:
                self.mailboxes.change(frame)
            case Kind.GET | Kind.GATHER | Kind.CANCEL:
                self.mailboxes.answer(member, frame)
            case _:
                _log.warning("a control frame of kind %d was dropped", frame.kind)

    def post(self, inboxes: Iterable[str], payload: bytes) -> None:
        """Send a message to the reader of each of `inboxes`. Except for the coordinator, inboxes without a reader drop it."""
        digest = payload_digest(payload)
        for inbox in inboxes:
            message = Frame(Kind.MESSAGE, 0, inbox, payload)
            reader = self._readers.get(inbox)
            if reader is None:
                with self._lock:
                    reader = self._readers.get(inbox)
                    if reader is None:
                        if inbox == COORDINATOR:
                            self._early.append(message)
                        continue
            self._send(reader, message, digest)

    def wait_until_unread(self, inboxes: Collection[str], deadline: Deadline) -> list[str]:
        """Wait until nobody reads `inboxes` any more. Returns those that have a reader at `deadline`."""
        with self._left:
            self._left.wait_for(lambda: self._readers.keys().isdisjoint(inboxes), deadline.remaining_s)
            return [inbox for inbox in inboxes if inbox in self._readers]

    def forget_session(self, session: str) -> None:
        """Drop all values of `session` in mailboxes and in the torch store."""
        if session:
            self.mailboxes.forget_session(session)
            self.torch_store.forget(session)

    def _listen(self, member: Member, inbox: str) -> None:
        with self._lock:
            member.inboxes.add(inbox)
            if inbox == COORDINATOR:
                for message in self._early:
                    self._send(member, message)
                self._early = []
            # Last: `post` reads `_readers` without the lock, and later messages must follow the early ones.
            self._readers[inbox] = member

    def _connect(self, sock: socket.socket, keys: Keys, _: Hello) -> None:
        """[loop's thread] Serve a new member."""
        member = Member(send=lambda *_: None)
        connection = ControlConnection(
            sock, keys, lambda frame: self.handle(member, frame), lambda reason: self._leave(member, connection, reason)
        )
        member.send = connection.send
        with self._lock:
            self._connections.add(connection)
        connection.start()

    def _leave(self, member: Member, connection: ControlConnection, reason: str) -> None:
        """[loop's thread] Remove a member whose connection has ended."""
        level = logging.DEBUG if reason == CLOSED_BY_PEER or self._listener.closed else logging.WARNING
        _log.log(level, "the connection of %s has ended: %s", ", ".join(sorted(member.inboxes)) or "a member", reason)
        with self._lock:
            self._connections.discard(connection)
            for inbox in member.inboxes:
                if self._readers.get(inbox) is member:
                    del self._readers[inbox]
            self._left.notify_all()
        self.mailboxes.forget_member(member)

    def _close_connections(self) -> None:
        """[loop's thread] End all connections, once the hub is closed."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _send_store_port(self, member: Member, number: int) -> None:
        """[own thread] Send a member the port of the torch store.

        Opening the store may take a while: torch looks up host names and connects to itself.
        """
        try:
            answer = Frame(Kind.VALUE, number, "", str(self.torch_store.port()).encode())
        except Exception as error:  # noqa: BLE001 - the member that asked must learn it
            reason = as_weightlane_error(error, "torch store").message
            answer = Frame(Kind.OVER, number, "", f"the coordinator could not open a torch store: {reason}".encode())
        self._send(member, answer)

    def _send(self, member: Member, frame: Frame, digest: bytes | None = None) -> None:
        self._count(frame)
        member.send(frame, digest)

    def _count(self, frame: Frame) -> None:
        self.traffic[0] += 1
        self.traffic[1] += len(frame.payload)
