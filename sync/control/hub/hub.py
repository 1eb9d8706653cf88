"""The hub of a run's control plane: inboxes and mailboxes, in the memory of the coordinator's process.

Members are connected to it by TCP (`weightlane.sync.control.hub.frames`), or call it within its process. A message for an inbox
goes on to whoever reads that inbox at once, and a wait for a value is answered when somebody puts it there: nobody asks twice.

Values lie in *scopes*, most of which are named after a session (``"plan/s-1a2b"``). When a session is over its scopes go, and
whoever still waits for something in them hears so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain

from weightlane.ckpt_engines import as_weightlane_error
from weightlane.ckpt_engines.runtime.at_exit import start_thread
from weightlane.ckpt_engines.toolkit import listen_tcp

from .frames import (
    ANSWER_BYTES,
    CLOSED_THERE,
    ControlConnection,
    Frame,
    admit,
    greeting,
    payload_digest,
    prepare,
    refusal,
    watch,
)

_log = logging.getLogger(__name__)
COORDINATOR = "coordinator"
"""Name of the coordinator's inbox, which alone may be written to before it is read: trainers may be quicker than it is."""
_ENTRY = struct.Struct("<HI")
"""Lengths of a key and its value."""
_MOST_STRANGERS = 8192
"""Connections that may wait for their ends to know each other; the one that has waited longest goes when there are more. A
thousand participants may come at once, and take a while for it."""
_STORE = "torch store"
_STRANGER_S = 30.0
"""How long a connection whose ends do not know each other may stay open when another one comes."""
_ENDED_SESSIONS = 1024
"""How many sessions are remembered as over, whose stragglers may still put something there."""


class Kind(IntEnum):
    """What a frame is for. Its name is an inbox, or a scope, which a line feed divides from a key if there is one."""

    LISTEN = 1
    """[member] It reads the inbox."""
    POST = 2
    """[member] Hand the payload to whoever reads the inbox."""
    PUT = 3
    """[member] Keep the payload under the key."""
    DELETE = 4
    """[member] Forget the key."""
    GET = 5
    """[member] `VALUE` when the key is there."""
    GATHER = 6
    """[member] `VALUE` with everything in the scope (see `gathered`) when as many keys are there as the payload says."""
    HAS = 7
    """[member] `VALUE` with whether the key is there."""
    CANCEL = 8
    """[member] Do not answer an earlier question of the same name, whose number and payload are told as a JSON list. `VALUE`, by
    the number of this frame, with the keys that are in the scope; nothing if that number is 0."""
    STORE = 9
    """[member] `VALUE` with the port of the torch store."""
    READ = 10
    """[member] Everything before the `MARK` of this number was read."""
    MESSAGE = 11
    """[hub] The payload was posted to the inbox."""
    MARK = 12
    """[hub] Answer with `READ` once everything before it in the inbox was read."""
    VALUE = 13
    """[hub] The answer to what was asked by this number."""
    OVER = 14
    """[hub] There will be none; the payload says why."""


Send = Callable[..., None]
"""Sends a frame to a member, with the digest of its payload where that is known."""


@dataclass(eq=False)
class Member:
    """A participant that is connected, and the inboxes it reads."""

    send: Send
    inboxes: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Scope:
    values: dict[str, bytes] = field(default_factory=dict)
    waits: dict[str | int, set[tuple[Member, int]]] = field(default_factory=lambda: defaultdict(set))
    """Who waits, and by which number, for a key or for so many of them."""
    gathered: bytes | None = None
    """What `GATHER` gives, until a value changes."""


class ControlHub:
    """Serves the members of one run.

    Args:
        host: Address to listen on.
        port: 0 takes a free one.
        secret: The run's.
        silence_s: After how many seconds a member whose host says nothing any more is gone, and the hub is for members.
        store_port: Gives the port of the torch store, which the first one who asks has opened.

    Raises:
        AddressInUseError: The port is taken.
        ConfigError: `host` is no address of this machine.
    """

    def __init__(self, host: str, port: int, secret: str, silence_s: float, store_port: Callable[[], int]) -> None:
        self._secret, self._silence_s, self._store_port = secret, silence_s, store_port
        self._lock = threading.Lock()
        self._scopes: dict[str, _Scope] = {}
        self._ended: dict[str, None] = {}
        self._readers: dict[str, Member] = {}
        self._early: list[Frame] = []
        """For the coordinator, before it reads."""
        self._marks: dict[int, tuple[str, Callable[[str], None]]] = {}
        self._last_mark = 0
        self._connections: set[ControlConnection] = set()
        self._strangers: dict[int, _Stranger] = {}
        self._closed = False
        self.traffic = [0, 0]
        """Messages and bytes that went through here, in either direction."""
        self._listener = listen_tcp(host, port)
        self._spare: socket.socket | None = socket.socket()
        """Given up when there is no descriptor left for one more: who comes is told so."""
        self.port: int = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._loop = watch(self._listener, self._come)

    # -- members --------------------------------------------------------------------------------------------------------

    def _come(self, _: int) -> None:
        """[loop's thread] Somebody connects, or the hub was closed. Raises nothing: the loop would drop the listener."""
        if self._closed:
            if self._spare is not None:
                self._spare.close()
            for stranger in self._strangers.values():
                stranger.leave()
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                connection.close()
            self._loop.forget(self._listener)
            return
        self._dismiss_strangers()
        try:
            sock, _address = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError) and not _more_descriptors():
                self._turn_away(error)
            return
        stranger = _Stranger(sock, self._silence_s, self._let_in)
        self._strangers[id(stranger)] = stranger
        stranger.begin()

    def _dismiss_strangers(self) -> None:
        """Those who have said nothing for too long, and the oldest when there are too many. They are kept in order of coming."""
        now = time.monotonic()
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if len(self._strangers) < _MOST_STRANGERS and now - oldest.since < _STRANGER_S:
                return
            del self._strangers[id(oldest)]
            oldest.leave()

    def _turn_away(self, error: OSError) -> None:
        """Tell who connects that there is no descriptor for it, on the spare one. Another thread may take that: then it waits."""
        _log.warning("a participant was turned away: %s. Raise the limit of open files (ulimit -n).", error)
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            with sock:
                sock.sendall(refusal())
        with contextlib.suppress(OSError):
            self._spare = socket.socket()

    def _let_in(self, stranger: _Stranger, answer: bytes) -> None:
        """[loop's thread] It has said everything, or nothing more: a member from now on, or gone."""
        self._strangers.pop(id(stranger), None)
        admitted = admit(self._secret, stranger.nonce, answer) if len(answer) == ANSWER_BYTES else None
        if admitted is None or self._closed:
            stranger.leave()
            return
        keys, welcome = admitted
        sock = stranger.sock
        try:
            sock.send(welcome)  # its socket is empty, so there is room for it
            prepare(sock, self._silence_s)
        except OSError:
            stranger.leave()
            return
        member = Member(send=lambda *_: None)
        connection = ControlConnection(
            sock, keys, lambda frame: self.handle(member, frame), lambda why: self._gone(member, connection, why)
        )
        member.send = connection.send
        with self._lock:
            self._connections.add(connection)
        connection.start()

    def _gone(self, member: Member, connection: ControlConnection, why: str) -> None:
        """[loop's thread] A member's connection has ended."""
        level = logging.DEBUG if why == CLOSED_THERE or self._closed else logging.WARNING
        _log.log(level, "the connection of %s has ended: %s", ", ".join(sorted(member.inboxes)) or "a member", why)
        with self._lock:
            self._connections.discard(connection)
            for inbox in member.inboxes:
                if self._readers.get(inbox) is member:
                    del self._readers[inbox]
            for name, scope in list(self._scopes.items()):
                for wanted, waiting in list(scope.waits.items()):
                    waiting -= {wait for wait in waiting if wait[0] is member}
                    if not waiting:
                        del scope.waits[wanted]
                self._drop_if_empty(name, scope)
            unread = [number for number, (inbox, _) in self._marks.items() if inbox in member.inboxes]
            marks = [self._marks.pop(number) for number in unread]
        for inbox, read in marks:
            read(inbox)  # nobody is left who could

    def close(self) -> None:
        """Serve nobody any more. Idempotent, never waits.

        Takes no lock, since the collector of garbage may call it anywhere: the loop sees the listener's end, and does the rest.
        """
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    # -- what members ask -----------------------------------------------------------------------------------------------

    def handle(self, member: Member, frame: Frame) -> None:
        """Do what `frame` of `member` asks for. From any thread; never waits."""
        self.traffic[0] += 1
        self.traffic[1] += len(frame.payload)
        match frame.kind:
            case Kind.POST:
                self.post([frame.name], frame.payload)
            case Kind.LISTEN:
                self._listen(member, frame.name)
            case Kind.READ:
                with self._lock:
                    _, read = self._marks.pop(frame.number, ("", lambda _: None))
                read(frame.name)
            case Kind.STORE:
                start_thread("weightlane-torch-store", self._tell_store_port, member, frame.number)
            case Kind.PUT | Kind.DELETE:
                self._change(frame)
            case Kind.GET | Kind.GATHER | Kind.HAS | Kind.CANCEL:
                self._look(member, frame)
            case _:
                _log.warning("a control frame of kind %d was dropped", frame.kind)

    def post(self, inboxes: Iterable[str], payload: bytes) -> None:
        """Hand a message to whoever reads each of `inboxes`; nobody gets it where nobody reads."""
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

    def mark(self, inbox: str, read: Callable[[str], None]) -> int:
        """Call `read` with the inbox's name once everything that was posted to it until now was read, or nobody can any more.

        Returns the mark's number, for `unmark`.
        """
        number = 0
        with self._lock:
            reader = self._readers.get(inbox)
            if reader is not None:
                self._last_mark += 1
                number = self._last_mark
                self._marks[number] = inbox, read
        if reader is None:
            read(inbox)
        else:
            self._send(reader, Frame(Kind.MARK, number, inbox, b""))
        return number

    def unmark(self, numbers: Iterable[int]) -> None:
        """Nobody waits for these marks any more."""
        with self._lock:
            for number in numbers:
                self._marks.pop(number, None)

    def forget_session(self, session: str) -> None:
        """Drop everything in scopes of `session` and of its links; who waits there hears that it is over."""
        if not session:
            return
        with self._lock:
            self._ended[session] = None
            if len(self._ended) > _ENDED_SESSIONS:
                del self._ended[next(iter(self._ended))]
            over = {name: self._scopes.pop(name) for name in list(self._scopes) if self._is_over(name)}
        for name, scope in over.items():
            for member, number in chain.from_iterable(scope.waits.values()):
                self._send(member, _over(number, name))

    def _listen(self, member: Member, inbox: str) -> None:
        with self._lock:
            member.inboxes.add(inbox)
            if inbox == COORDINATOR:
                for message in self._early:
                    self._send(member, message)
                self._early = []
            # Last: `post` looks without the lock, and what comes from now on has to be behind the rest.
            self._readers[inbox] = member

    def _is_over(self, scope: str) -> bool:
        session = scope.split("/")[1] if "/" in scope else ""
        return session in self._ended or session.rpartition("-")[0] in self._ended

    def _change(self, frame: Frame) -> None:
        name, _, key = frame.name.partition("\n")
        answers: list[tuple[Member, int, bytes]] = []
        with self._lock:
            if frame.kind == Kind.PUT and not self._is_over(name):
                scope = self._scopes.setdefault(name, _Scope())
                scope.values[key] = frame.payload
                scope.gathered = None
                counts = [wanted for wanted in scope.waits if isinstance(wanted, int)]
                for wanted in (key, *counts):
                    if wanted in scope.waits and (value := _found(scope, wanted)) is not None:
                        answers += [(*wait, value) for wait in scope.waits.pop(wanted)]
            elif frame.kind == Kind.DELETE and (known := self._scopes.get(name)) is not None:
                known.values.pop(key, None)
                known.gathered = None
                self._drop_if_empty(name, known)
        digests: dict[int, bytes] = {}
        for member, number, value in answers:  # many may have waited for the same
            if (digest := digests.get(id(value))) is None:
                digest = digests[id(value)] = payload_digest(value)
            self._send(member, Frame(Kind.VALUE, number, "", value), digest)

    def _look(self, member: Member, frame: Frame) -> None:
        name, _, key = frame.name.partition("\n")
        with self._lock:
            over = self._is_over(name)
            scope = self._scopes.setdefault(name, _Scope())
            number, asked = json.loads(frame.payload) if frame.kind == Kind.CANCEL else (frame.number, frame.payload)
            wanted = int(asked) if asked else key
            answer: bytes | None
            if frame.kind == Kind.HAS:
                answer = b"true" if key in scope.values else b"false"
            elif frame.kind == Kind.CANCEL:
                scope.waits[wanted].discard((member, number))
                if not scope.waits[wanted]:
                    del scope.waits[wanted]
                answer = json.dumps(list(scope.values)).encode()
            else:
                answer = _found(scope, wanted)
                if answer is None and not over:
                    scope.waits[wanted].add((member, number))
            self._drop_if_empty(name, scope)
        if answer is not None:
            if frame.number:
                self._answer(member, frame.number, answer)
        elif over:
            self._send(member, _over(frame.number, name))

    def _tell_store_port(self, member: Member, number: int) -> None:
        """[thread of its own] Opening the store may take a while: torch looks names up, and connects to itself."""
        try:
            self._answer(member, number, str(self._store_port()).encode())
        except Exception as error:  # noqa: BLE001 - who asked must learn it
            why = f"the coordinator could not open a torch store: {as_weightlane_error(error, _STORE).message}"
            self._send(member, Frame(Kind.OVER, number, "", why.encode()))

    def _drop_if_empty(self, name: str, scope: _Scope) -> None:
        if not scope.values and not scope.waits:
            del self._scopes[name]

    def _answer(self, member: Member, number: int, value: bytes) -> None:
        self._send(member, Frame(Kind.VALUE, number, "", value))

    def _send(self, member: Member, frame: Frame, digest: bytes | None = None) -> None:
        self.traffic[0] += 1
        self.traffic[1] += len(frame.payload)
        member.send(frame, digest)

    @property
    def kept(self) -> dict[str, int]:
        """How many values each scope has."""
        with self._lock:
            return {name: len(scope.values) for name, scope in self._scopes.items() if scope.values}


def _over(number: int, scope: str) -> Frame:
    """The answer to a question about a scope whose session is over."""
    return Frame(Kind.OVER, number, "", f"the session of mailbox {scope} is over.".encode())


def _found(scope: _Scope, wanted: str | int) -> bytes | None:
    """What a wait is answered with, if it is there."""
    if isinstance(wanted, str):
        return scope.values.get(wanted)
    if len(scope.values) < wanted:
        return None
    if scope.gathered is None:
        parts = ((key.encode(), value) for key, value in scope.values.items())
        scope.gathered = b"".join(_ENTRY.pack(len(key), len(value)) + key + value for key, value in parts)
    return scope.gathered


def gathered(data: bytes) -> dict[str, bytes]:
    """The values by key that `Kind.GATHER` was answered with."""
    values, place = {}, 0
    while place < len(data):
        in_key, in_value = _ENTRY.unpack_from(data, place)
        start = place + _ENTRY.size + in_key
        values[data[place + _ENTRY.size : start].decode()] = data[start : start + in_value]
        place = start + in_value
    return values


class _Stranger:
    """A connection whose end has not proved anything yet."""

    def __init__(self, sock: socket.socket, silence_s: float, heard: Callable[[_Stranger, bytes], None]) -> None:
        self.sock = sock
        self.since = time.monotonic()
        self.nonce, self._greeting = greeting(silence_s)
        self._heard = heard
        self._answer = b""

    def begin(self) -> None:
        self.sock.setblocking(False)
        with contextlib.suppress(OSError):
            self.sock.send(self._greeting)
        self._loop = watch(self.sock, self._read)

    def _read(self, _: int) -> None:
        chunk = b""
        with contextlib.suppress(OSError):
            chunk = self.sock.recv(ANSWER_BYTES - len(self._answer))
        self._answer += chunk
        if not chunk or len(self._answer) == ANSWER_BYTES:
            self._heard(self, self._answer)

    def leave(self) -> None:
        self._loop.forget(self.sock)


def _more_descriptors() -> bool:
    """Raise this process's limit of open files as far as it is allowed to; whether that gave any."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True
