"""`ControlConnection`: signed frames in both directions over one TCP connection."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from weightlane.ckpt_engines import as_weightlane_error

from .frames import PART, Frame, FrameReader, frame_start, payload_digest
from .handshake import Keys
from .io_loop import IoLoop, watch

_READ_BYTES = 256 << 10
"""Most bytes read at once, so that no connection keeps the loop from the others for long."""
_MOST_BUFFERS = 64
"""Most buffers handed to the kernel at once, far below its limit of 1024 (IOV_MAX)."""
CLOSED_BY_PEER = "it was closed at the other end"
"""The reason with which a connection ends that has not failed."""


class ControlConnection:
    """One end of a connection after its handshake. Every method may be called from any thread.

    Args:
        sock: The configured socket, which this object owns.
        keys: See `admit` and `dial`.
        on_frame: Called on the loop's thread with every frame that arrives; an error that it raises ends the connection.
        on_end: Called there once, with the reason, when the connection has ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        keys: Keys,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._key = keys.sending
        self._reader = FrameReader(keys.receiving)
        self._on_frame = on_frame
        self._on_end = on_end
        self._sequence = 0
        """How many frames were sent."""
        self._outgoing: deque[memoryview] = deque()
        """Bytes that the socket had no room for."""
        self._turn = threading.Lock()
        """Keeps frames apart and in order while one is sent."""
        self._closing = self._ended = False
        self._loop: IoLoop | None = None

    def start(self) -> None:
        """Begin to read."""
        with self._turn:
            self._loop = watch(self._sock, self._handle)
            if self._outgoing:
                self._loop.watch_writable(self._sock, True)

    def send(self, frame: Frame, digest: bytes | None = None) -> None:
        """Send a frame, or keep it until the socket has room; nothing happens after the connection's end. Never waits.

        `digest` is the payload's, if it is known. Raises `ProtocolError` for a frame that is too long.
        """
        digest = digest or payload_digest(frame.payload)
        with self._turn:
            if self._closing or self._ended:
                return
            buffers = [memoryview(frame_start(frame, self._key, self._sequence, digest)), memoryview(frame.payload)]
            self._sequence += 1
            if self._outgoing:
                self._outgoing += buffers
                return
            self._write(buffers)
            if self._outgoing and self._loop is not None:
                self._loop.watch_writable(self._sock, True)

    def abandon(self) -> None:
        """End the connection now. Takes no lock, since the garbage collector may call it anywhere."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the loop notices, and closes the socket

    def close(self) -> None:
        """End the connection once everything is sent. Idempotent, never waits."""
        with self._turn:
            self._closing = True
            if not self._outgoing:
                self.abandon()

    def _handle(self, events: int) -> None:
        """[loop's thread] Read or send, or notice that the other end is gone."""
        with self._turn:  # the first events may arrive before `start` has returned
            loop = self._loop
        assert loop is not None, "it calls"
        if events & select.EPOLLOUT:
            with self._turn:
                waiting, self._outgoing = list(self._outgoing), deque()
                self._write(waiting)
                if not self._outgoing:
                    loop.watch_writable(self._sock, False)
                    if self._closing:
                        self.abandon()
        if events & ~select.EPOLLOUT:
            self._read(loop)

    def _read(self, loop: IoLoop) -> None:
        try:
            chunk = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(loop, os.strerror(error.errno) if error.errno else str(error))
            return
        if not chunk:
            self._end(loop, CLOSED_BY_PEER)
            return
        try:
            for frame in self._reader.frames(chunk):
                self._on_frame(frame)
        except Exception as error:  # noqa: BLE001 - whatever a member has sent, the other connections go on
            self._end(loop, as_weightlane_error(error, PART).message)

    def _write(self, buffers: list[memoryview]) -> None:
        """Send what the socket has room for, and keep the rest."""
        try:
            sent = self._sock.sendmsg(buffers[:_MOST_BUFFERS])
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the loop notices the end, and its reason
        for buffer in buffers:
            if sent < buffer.nbytes:
                self._outgoing.append(buffer[sent:])
            sent = max(0, sent - buffer.nbytes)

    def _end(self, loop: IoLoop, reason: str) -> None:
        with self._turn:
            if self._ended:
                return
            self._ended = True
            self._outgoing.clear()
            loop.close(self._sock)
        self._on_end(reason)
