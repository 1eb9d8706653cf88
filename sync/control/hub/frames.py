"""Signed frames over TCP, and the one thread of a process that reads them for all its connections.

A frame has a kind, a number, a name and a payload. Before the first one both ends prove that they hold the run's secret, and
derive from it and from two fresh nonces a key for either direction. Every frame carries an HMAC-SHA256 under that key over its
contents and over how many came before it: what was forged, changed, repeated or left out ends the connection. The payload is
signed by its digest, so one payload for many receivers is hashed once.

The kernel watches the other end: keep-alive probes where nothing is said, and a limit on how long what was said may stay
unacknowledged. A host that is gone without a word therefore ends the connection after `silence_s` seconds. A process that is only
busy does not, unless it reads nothing for so long while more waits for it than its socket holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from weightlane.ckpt_engines import (
    Deadline,
    PeerLostError,
    ProtocolError,
    TransportError,
    WeightlaneError,
    as_weightlane_error,
)
from weightlane.ckpt_engines.channels.mac import TAG_BYTES, derive_key, proof, proves, tag

_log = logging.getLogger(__name__)
_PART = "control connection"
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BIH")
"""Kind, number, and length of the name."""
MOST_BYTES = 1 << 30
"""The longest frame, which bounds what a member can make another one hold in memory: the manifest of a model with a million
tensors has a tenth of that."""
_READ_BYTES = 256 << 10
_NONCE_BYTES = 16
_GREETING, _NO_ROOM = b"WLC1", b"WLC0"
"""What whoever listens says first: that it takes part in this protocol, or that it cannot serve one more connection."""
_SILENCE_DIGITS = 8
CLOSED_THERE = "it was closed at the other end"
"""Why a connection has ended that nothing was wrong with."""
_HEX = frozenset("0123456789abcdef")
GREETING_BYTES = len(_GREETING) + 2 * _NONCE_BYTES + _SILENCE_DIGITS
ANSWER_BYTES = 2 * _NONCE_BYTES + 2 * TAG_BYTES
_WELCOME_BYTES = 2 * TAG_BYTES


class Frame(NamedTuple):
    """One message on a connection."""

    kind: int
    number: int
    name: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that sign what one end of a connection sends, and what it receives."""

    sending: bytes
    receiving: bytes


def greeting(silence_s: float) -> tuple[str, bytes]:
    """[listener] A fresh nonce, which ends with how long hosts may be silent, and the bytes that tell it."""
    nonce = f"{secrets.token_hex(_NONCE_BYTES)}{int(1000 * silence_s):0{_SILENCE_DIGITS}x}"
    return nonce, _GREETING + nonce.encode()


def refusal() -> bytes:
    """[listener] The bytes that say that it cannot serve one more connection."""
    return _NO_ROOM.ljust(GREETING_BYTES, b"-")


def admit(secret: str, nonce: str, answer: bytes) -> tuple[Keys, bytes] | None:
    """[listener] The connection's keys and what to send, or None unless `answer` proves that the run's secret is known there."""
    theirs, claim = answer[: 2 * _NONCE_BYTES], answer[2 * _NONCE_BYTES :]
    shared = derive_key(secret, f"control/{nonce}/{theirs.decode(errors='replace')}")
    if not proves(shared, claim.decode(errors="replace"), "join"):
        return None
    return Keys(_directed(shared, "down"), _directed(shared, "up")), proof(shared, "welcome").encode()


def _directed(shared: bytes, direction: str) -> bytes:
    return bytes.fromhex(proof(shared, direction))


def dial(host: str, port: int, secret: str, deadline: Deadline) -> tuple[socket.socket, Keys]:
    """Connect to a listener that proves to be of this run. The socket is prepared.

    Raises `PeerLostError` when nobody listens there, `ProtocolError` for somebody else, `TransportError` when there is no room
    for one more, or `DeadlineExceededError`.
    """
    where = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=max(0.001, deadline.remaining_s))
        try:
            return sock, _introduce(sock, where, secret, deadline)
        except BaseException:
            sock.close()
            raise
    except WeightlaneError:
        raise
    except TimeoutError:
        raise deadline.error(f"a connection to {where}", part=_PART, peer="coordinator") from None
    except OSError as error:
        raise PeerLostError(
            f"cannot connect to {where}: {error}.",
            part=_PART,
            peer="coordinator",
            hint="Check that the process that runs the coordinator is alive, and that the address can be reached from here.",
        ) from error


def _introduce(sock: socket.socket, where: str, secret: str, deadline: Deadline) -> Keys:
    said = _exactly(sock, GREETING_BYTES, deadline)
    if said.startswith(_NO_ROOM):
        raise TransportError(
            f"the coordinator at {where} has no file descriptor left for one more participant.",
            part=_PART,
            peer="coordinator",
            hint="Raise the limit of open files (ulimit -n) of the process that runs the coordinator.",
        )
    other = ProtocolError(
        f"what listens at {where} does not know this run's secret.",
        part=_PART,
        peer="coordinator",
        hint="Another program has the coordinator's port, or the address is of another run.",
    )
    nonce, mine = said[len(_GREETING) :].decode(errors="replace"), secrets.token_hex(_NONCE_BYTES)
    if not said.startswith(_GREETING) or not _HEX.issuperset(nonce):
        raise other
    shared = derive_key(secret, f"control/{nonce}/{mine}")
    sock.sendall(mine.encode() + proof(shared, "join").encode())
    welcome = _exactly(sock, _WELCOME_BYTES, deadline)
    if not proves(shared, welcome.decode(errors="replace"), "welcome"):
        raise other
    prepare(sock, int(nonce[-_SILENCE_DIGITS:], 16) / 1000)
    return Keys(_directed(shared, "up"), _directed(shared, "down"))


def _exactly(sock: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < nbytes:
        sock.settimeout(max(0.001, deadline.remaining_s))
        chunk = sock.recv(nbytes - len(data))
        if not chunk:
            raise PeerLostError(
                "the connection was closed before both ends knew each other.",
                part=_PART,
                peer="coordinator",
                hint="The address may be of another run, or of another program.",
            )
        data += chunk
    return data


class IoLoop:
    """The thread of a process that reads for all its connections. `watch` starts it, and it ends when nothing is watched."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[socket.socket, Callable[[int], None]]] = {}
        # Never joined: a daemon thread that sleeps in epoll does not hold up the end of the process.
        threading.Thread(target=self._run, name="weightlane-control-io", daemon=True).start()

    def watch(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        """See the function `watch`."""
        known = sock.fileno() in self._watched
        self._watched[sock.fileno()] = sock, handler
        if not known:
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def also_writable(self, sock: socket.socket, yes: bool) -> None:
        """Whether the handler is called, too, when there is room to send."""
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile
            self._epoll.modify(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if yes else 0))

    def forget(self, sock: socket.socket) -> None:
        """[loop's thread] Close `sock`: nobody else closes a descriptor that is watched, whose number could be reused."""
        if self._watched.pop(sock.fileno(), None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(sock.fileno())
        sock.close()

    def _run(self) -> None:
        while not self._ends():
            for descriptor, events in self._epoll.poll():
                if (watched := self._watched.get(descriptor)) is not None:
                    try:
                        watched[1](events)
                    except Exception:  # noqa: BLE001 - the others are to be read from, too
                        _log.exception("%s: events of a socket could not be handled", _PART)
                        self.forget(watched[0])

    def _ends(self) -> bool:
        global _loop  # noqa: PLW0603 - the next one who watches something starts another
        with _changing:
            if self._watched or _loop is None:  # as it is until the first socket is watched
                return False
            _loop = None
            self._epoll.close()
            return True

    def leave_to_parent(self) -> None:
        """[in a forked process] Close the copies of descriptors that are the parent's: its peers shall see its end."""
        for sock, _ in self._watched.values():
            sock.close()
        self._epoll.close()


_loop: IoLoop | None = None
_changing = threading.Lock()


def watch(sock: socket.socket, handler: Callable[[int], None]) -> IoLoop:
    """Call `handler` with the events of `sock` from now on, on the loop's thread, and nobody else. Returns the loop."""
    global _loop  # noqa: PLW0603 - one for each process
    with _changing:
        loop = _loop or IoLoop()
        loop.watch(sock, handler)
        _loop = loop
        return loop


def _after_fork() -> None:
    global _loop, _changing
    inherited, _loop, _changing = _loop, None, threading.Lock()
    if inherited is not None:
        inherited.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def prepare(sock: socket.socket, silence_s: float) -> None:
    """Have the kernel send at once, and watch the other end; see the module's text."""
    sock.setblocking(False)
    probes = 3
    between_s = max(1, int(silence_s / (2 * probes)))
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s) - probes * between_s)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s)),
    ):
        sock.setsockopt(level, option, value)


class ControlConnection:
    """One end of a connection whose ends know each other. Every method may be called from any thread.

    Args:
        sock: The socket, prepared; this object owns it.
        keys: See `admit` and `dial`.
        on_frame: Called on the loop's thread with every frame that comes; an error that it raises ends the connection.
        on_end: Called there once, with the reason, when nothing more will come.
    """

    def __init__(
        self,
        sock: socket.socket,
        keys: Keys,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._keys = keys
        self._on_frame = on_frame
        self._on_end = on_end
        self._sent = self._received = 0
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._turn = threading.Lock()
        """Held while something is sent, which keeps frames apart and in their order."""
        self._closing = self._ended = False
        self._loop: IoLoop | None = None

    def start(self) -> None:
        """Begin to read."""
        with self._turn:
            self._loop = watch(self._sock, self._handle)
            if self._outgoing:
                self._loop.also_writable(self._sock, True)

    def send(self, frame: Frame, digest: bytes | None = None) -> None:
        """Send a frame, or keep what there is no room for until there is; nothing happens when the connection has ended.

        `digest` is that of the payload, if it is known. Raises `ProtocolError` for one that is too long.
        """
        name = frame.name.encode()
        head = _HEAD.pack(frame.kind, frame.number, len(name)) + name
        nbytes = TAG_BYTES + len(head) + len(frame.payload)
        if nbytes > MOST_BYTES:
            raise ProtocolError(f"{frame.name}: {nbytes} bytes are too many for one message.", part=_PART)
        digest = digest or payload_digest(frame.payload)
        with self._turn:
            if self._closing or self._ended:
                return
            signed = tag(self._keys.sending, self._sent, head, digest)
            self._sent += 1
            begin = _LENGTH.pack(nbytes) + signed + head
            if self._outgoing:
                self._outgoing += [memoryview(begin), memoryview(frame.payload)]
                return
            self._put_out([memoryview(begin), memoryview(frame.payload)])
            if self._outgoing and self._loop is not None:
                self._loop.also_writable(self._sock, True)

    def abandon(self) -> None:
        """End the connection now. Takes no lock: the collector of garbage may call it anywhere."""
        self._shut()

    def close(self) -> None:
        """End the connection once everything is sent. Idempotent, never waits."""
        with self._turn:
            self._closing = True
            if not self._outgoing:
                self._shut()

    def _handle(self, events: int) -> None:
        """[loop's thread] Something can be read or sent, or the other end is gone."""
        with self._turn:  # the first events may be here before `start` is done
            loop = self._loop
        assert loop is not None, "it calls"
        if events & select.EPOLLOUT:
            with self._turn:
                waiting, self._outgoing = list(self._outgoing), deque()
                self._put_out(waiting)
                if not self._outgoing:
                    loop.also_writable(self._sock, False)
                    if self._closing:
                        self._shut()
        if events & ~select.EPOLLOUT:
            try:
                chunk = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(os.strerror(error.errno) if error.errno else str(error))
                return
            if not chunk:
                self._end(CLOSED_THERE)
                return
            try:
                self._take(chunk)
            except Exception as error:  # noqa: BLE001 - whatever a member has sent, the other connections go on
                self._end(as_weightlane_error(error, _PART).message)

    def _take(self, chunk: bytes) -> None:
        """Handle bytes that were read. Raises `ProtocolError` for what is not signed, or is no frame."""
        incoming = self._incoming
        incoming += chunk
        place = 0
        while len(incoming) - place >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(incoming, place)
            if not TAG_BYTES + _HEAD.size <= nbytes <= MOST_BYTES:
                raise ProtocolError(f"a frame of {nbytes} bytes came, which no member of a run sends.", part=_PART)
            if len(incoming) - place < _LENGTH.size + nbytes:
                break
            start = place + _LENGTH.size
            self._on_frame(self._opened(bytes(memoryview(incoming)[start : start + nbytes])))
            place = start + nbytes
        del incoming[:place]

    def _opened(self, data: bytes) -> Frame:
        kind, number, length = _HEAD.unpack_from(data, TAG_BYTES)
        behind = TAG_BYTES + _HEAD.size + length
        head, payload = data[TAG_BYTES:behind], data[behind:]
        expected = tag(self._keys.receiving, self._received, head, payload_digest(payload))
        if not secrets.compare_digest(expected, data[:TAG_BYTES]):
            raise ProtocolError("what came was not signed with this run's secret.", part=_PART)
        self._received += 1
        return Frame(kind, number, head[_HEAD.size :].decode(errors="replace"), payload)

    def _put_out(self, pieces: list[memoryview]) -> None:
        """Send what there is room for, and keep the rest."""
        try:
            sent = self._sock.sendmsg(pieces[:64])
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the loop hears of the end, and says why
        for piece in pieces:
            if sent < piece.nbytes:
                self._outgoing.append(piece[sent:])
            sent = max(0, sent - piece.nbytes)

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the loop sees that, and closes it

    def _end(self, why: str) -> None:
        with self._turn:
            if self._ended:
                return
            self._ended = True
            self._outgoing.clear()
            assert self._loop is not None, "it calls"
            self._loop.forget(self._sock)
        self._on_end(why)


def payload_digest(payload: bytes) -> bytes:
    """What stands for a payload in the signature of its frame."""
    return hashlib.sha256(payload).digest()
