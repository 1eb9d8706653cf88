"""`ControlConnection`: a connection of the control plane, served by the process's io loop.

`HubClient`: a member's end of its connection to the hub, with its inboxes and pending requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from weightlane.ckpt_engines import ClosedError, Deadline, WeightlaneError, as_weightlane_error
from weightlane.ckpt_engines.channels.channel import LENGTH, Connection, Frame, Keys, payload_digest
from weightlane.ckpt_engines.channels.io_loop import unwatch, watch, watch_writable

from ..messages import Kind

_READ_BYTES = 256 << 10
"""Most bytes read at once, so that no connection keeps the loop from the others for long."""
_MOST_BUFFERS = 64
"""Most buffers handed to the kernel at once, far below its limit of 1024 (IOV_MAX)."""
CLOSED_BY_PEER = "it was closed at the other end"
"""The reason for which a connection ends that has not failed."""


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


_CANCEL_S = 2.0
"""Time limit in seconds for the hub's list of present keys, which is requested after a request has timed out."""


class PendingReply:
    """A request to the hub without a reply yet. Any thread may end it with an error (`give_up`)."""

    def __init__(self, client: HubClient, number: int, question: Frame) -> None:
        self._client, self._number, self._question = client, number, question
        self._done = threading.Event()
        self._value = b""
        self._error: WeightlaneError | None = None

    def answer(self, value: bytes) -> None:
        """Let `result` return `value`."""
        self._value = value
        self._done.set()

    def give_up(self, error: WeightlaneError) -> None:
        """Let `result` raise `error`."""
        self._error = error
        self._done.set()

    def result(self, deadline: Deadline) -> bytes | None:
        """Wait for the reply; None if it does not arrive in time. Raises the error passed to `give_up`."""
        done = self._done.wait(deadline.remaining_s)
        if not done or self._error is not None:
            self._client.cancel(self._number, self._question)
        if self._error is not None:
            raise self._error
        return self._value if done else None

    def present(self) -> list[str]:
        """The keys that the request's scope has now; none if the hub does not answer within `_CANCEL_S`."""
        found = self._client.ask(_cancelling(self._number, self._question)).result(Deadline.after(_CANCEL_S))
        return [str(key) for key in json.loads(found)] if found else []


Item = bytes | WeightlaneError


class HubClient:
    """The inboxes and the pending requests of one member.

    `send` is set by the owner of the connection. The connection calls `received` and `ended`; in the hub's process the hub itself
    calls `received`.
    """

    def __init__(self) -> None:
        self.send: Callable[[Frame], None] = lambda _: None
        self._lock = threading.Lock()
        self._asked: dict[int, PendingReply] = {}
        """Pending requests by number."""
        self._last = 0
        self._queues: dict[str, SimpleQueue[Item]] = {}
        self._ended: WeightlaneError | None = None
        self._waits_end: WeightlaneError | None = None
        """The error of every request since `end_waits`."""

    def received(self, frame: Frame) -> None:
        """Handle a frame from the hub."""
        if frame.kind == Kind.MESSAGE:
            if (queue := self._queues.get(frame.name)) is not None:
                queue.put(frame.payload)
            return
        with self._lock:
            asked = self._asked.pop(frame.number, None)
        if asked is None:
            return  # the request was cancelled
        if frame.kind == Kind.OVER:
            asked.give_up(ClosedError(frame.payload.decode(errors="replace"), part="mailbox"))
        else:
            asked.answer(frame.payload)

    def ended(self, error: WeightlaneError) -> None:
        """Note that the connection has ended: all pending requests and all reads of inboxes raise `error`."""
        with self._lock:
            self._ended = self._ended or error
            waiting = list(self._asked.values())
            self._asked.clear()
        for asked in waiting:
            asked.give_up(error)
        for queue in list(self._queues.values()):
            queue.put(error)

    def end_waits(self, error: WeightlaneError) -> None:
        """Let all requests, also later ones, raise `error`. Messages still come and go."""
        with self._lock:
            self._waits_end = error
            waiting = list(self._asked.values())
        for asked in waiting:
            asked.give_up(error)

    def tell(self, frame: Frame) -> None:
        """Send a frame that needs no reply. Raises the error with which the connection has ended."""
        if self._ended is not None:
            raise self._ended
        self.send(frame)

    def ask(self, question: Frame) -> PendingReply:
        """Number a request and send it. Raises the error with which the connection has ended, or that of `end_waits`."""
        with self._lock:
            if (error := self._ended or self._waits_end) is not None:
                raise error
            self._last += 1
            asked = self._asked[self._last] = PendingReply(self, self._last, question)
            numbered = question._replace(number=self._last)
        self.send(numbered)
        return asked

    def cancel(self, number: int, question: Frame) -> None:
        """Cancel a request, so that the hub sends no reply. Never waits."""
        with self._lock:
            waited = self._asked.pop(number, None) is not None
        if waited and question.kind in (Kind.GET, Kind.GATHER):
            self.send(_cancelling(number, question))

    def open_inbox(self, name: str) -> SimpleQueue[Item]:
        """The queue of all messages that are posted to an inbox from now on."""
        queue: SimpleQueue[Item] = SimpleQueue()
        with self._lock:
            self._queues[name] = queue
            if self._ended is not None:
                queue.put(self._ended)
        self.send(Frame(Kind.LISTEN, 0, name, b""))
        return queue


def _cancelling(number: int, question: Frame) -> Frame:
    """The frame that cancels a request, whose reply may already be on the wire. If numbered, the frame gets a reply, too."""
    payload = json.dumps([number, question.payload.decode()]).encode()
    return Frame(Kind.CANCEL, 0, question.name, payload)
