"""`ControlConnection`: a connection of the control plane, served by the process's io loop."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator

from weightlane.ckpt_engines import as_weightlane_error
from weightlane.ckpt_engines.channels.connection import LENGTH, Connection, Frame, Keys, payload_digest
from weightlane.ckpt_engines.channels.io_loop import unwatch, watch, watch_writable

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
