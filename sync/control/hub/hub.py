"""`ControlHub`: forwards the control messages of a run's members, in the coordinator's process, and holds their `Mailboxes`.

Members are connected to the hub by a `ControlConnection`, or call it within its process. The hub sends a message for an inbox to
its reader at once, and replies to a request for a value as soon as the value exists: members do not poll.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

from weightlane.ckpt_engines import Deadline, as_weightlane_error
from weightlane.ckpt_engines.channels.channel import LENGTH, Connection, Frame, Keys, payload_digest
from weightlane.ckpt_engines.channels.handshake import Hello
from weightlane.ckpt_engines.channels.io_loop import unwatch, watch, watch_writable
from weightlane.ckpt_engines.channels.listener import Admission, Listener, listen_tcp

from ..messages import COORDINATOR, Kind
from .mailboxes import Mailboxes, Member

_log = logging.getLogger(__name__)
_READ_BYTES = 256 << 10
"""Most bytes read at once, so that no connection keeps the loop from the others for long."""
_MOST_BUFFERS = 64
"""Most buffers handed to the kernel at once, far below its limit of 1024 (IOV_MAX)."""
CLOSED_BY_PEER = "it was closed at the other end"
"""The reason for which a connection ends that has not failed."""
_MOST_PENDING = 8192
"""How many connections may be in their handshake; a thousand members may connect at once."""


class ControlConnection(Connection):
    """A non-blocking connection. Every method may be called from any thread.

    Args:
        sock: The connected socket, which this object owns.
        keys: See `Keys`.
        on_frame: Called on the loop's thread with every received frame; if it raises, the connection ends.
        on_end: Called on the loop's thread once, with the reason, when the connection has ended.
    """

    most_bytes = 1 << 30
    """Limit for the length of a frame, which bounds the memory that a peer can make this process use. The placement of a
    model with a million tensors has about a tenth of that."""

    def __init__(
        self, sock: socket.socket, keys: Keys, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]
    ) -> None:
        super().__init__(sock, keys, "")
        self._on_frame = on_frame
        self._on_end = on_end
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()
        """Bytes that did not fit into the socket's buffer yet."""
        self._turn = threading.Lock()
        """Held while a frame is sent, so that frames do not interleave."""
        self._closing = self._ended = False

    def start(self) -> None:
        """Begin to read."""
        with self._turn:
            watch(self.socket, self._handle)
            if self._outgoing:
                watch_writable(self.socket, True)

    def send(self, frame: Frame, digest: bytes | None = None) -> None:
        """Send a frame, or queue it until the socket has room. Does nothing after the connection's end. Never waits.

        `digest` is the digest of the payload, if it is known. Raises `ProtocolError` for a frame that is too long.
        """
        digest = digest or payload_digest(frame.payload)
        with self._turn:
            if self._closing or self._ended:
                return
            buffers = [memoryview(self._signed(frame, digest)), memoryview(frame.payload)]
            if self._outgoing:
                self._outgoing += buffers
                return
            self._write(buffers)
            if self._outgoing:
                watch_writable(self.socket, True)

    def abandon(self) -> None:
        """End the connection now. Takes no lock, since the garbage collector may call it anywhere."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # the loop notices, and closes the socket

    def close(self) -> None:
        """End the connection once everything is sent. Idempotent, never waits."""
        with self._turn:
            self._closing = True
            if not self._outgoing:
                self.abandon()

    def _handle(self, events: int) -> None:
        """[loop's thread] Handle events of the socket: send, or read, which also notices that the other end is gone."""
        if events & select.EPOLLOUT:
            with self._turn:
                waiting, self._outgoing = list(self._outgoing), deque()
                self._write(waiting)
                if not self._outgoing:
                    watch_writable(self.socket, False)
                    if self._closing:
                        self.abandon()
        if events & ~select.EPOLLOUT:
            self._read()

    def _read(self) -> None:
        try:
            chunk = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(os.strerror(error.errno) if error.errno else str(error))
            return
        if not chunk:
            self._end(CLOSED_BY_PEER)
            return
        try:
            for frame in self._frames(chunk):
                self._on_frame(frame)
        except Exception as error:  # noqa: BLE001 - whatever a member has sent, the other connections go on
            self._end(as_weightlane_error(error, self.part).message)

    def _frames(self, chunk: bytes) -> Iterator[Frame]:
        """Yield the frames that `chunk` completes. Raises `ProtocolError` for bytes that are not a signed frame."""
        incoming = self._incoming
        incoming += chunk
        offset = 0
        while len(incoming) - offset >= LENGTH.size:
            start = offset + LENGTH.size
            end = start + self._length(incoming, offset)
            if len(incoming) < end:
                break
            offset = end
            yield self._verified(bytes(memoryview(incoming)[start:end]))
        del incoming[:offset]

    def _write(self, buffers: list[memoryview]) -> None:
        """Send as many bytes as the socket has room for, and queue the rest."""
        try:
            sent = self.socket.sendmsg(buffers[:_MOST_BUFFERS])
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the loop notices the end, and its reason
        for buffer in buffers:
            if sent < buffer.nbytes:
                self._outgoing.append(buffer[sent:])
            sent = max(0, sent - buffer.nbytes)

    def _end(self, reason: str) -> None:
        with self._turn:
            if self._ended:
                return
            self._ended = True
            self._outgoing.clear()
            unwatch(self.socket)
            self.socket.close()
        self._on_end(reason)


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
        sock = listen_tcp(host, port)
        self.host, self.port = sock.getsockname()[:2]
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

    def _send(self, member: Member, frame: Frame, digest: bytes | None = None) -> None:
        self._count(frame)
        member.send(frame, digest)

    def _count(self, frame: Frame) -> None:
        self.traffic[0] += 1
        self.traffic[1] += len(frame.payload)
