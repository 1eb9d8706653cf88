"""`Channel`: one connection between a sender and a receiver, bounded by deadlines and ended by a close or a death.

When a process ends, for whatever reason, its sockets are closed, and the other side sees that at once. Messages are JSON objects
in signed frames, or plain bytes of a size that both sides know.
"""

from __future__ import annotations

import functools
import json
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..deadline import Deadline
from ..errors import PeerLostError, ProtocolError
from ..runtime.lifecycle import Lifecycle
from .connection import LEAST_BYTES, LENGTH, Connection, Frame, Keys
from .handshake import decode_text

Address = Mapping[str, Any]
"""JSON data by which peers reach a half or a link. Its maker chooses the keys; it is never pickled."""
_MAX_DESCRIPTORS = 4
"""Most file descriptors that `Channel.receive_descriptors` takes at once; the kernel closes any others. An engine passes one."""
_ROOM = "room to send to it"
_T = TypeVar("_T")


class Channel(Connection):
    """A connection whose calls wait until a deadline.

    One thread at a time may send, and one at a time may receive; they may be different threads. Any thread may poll `fileno` or
    call `hang_up` meanwhile. `close` may be called only when no other call runs and no thread polls; `Lifecycle` takes care of
    that. `life` is that of the half that uses the channel: closing it ends every wait of the channel with `ClosedError`.
    """

    most_bytes = LEAST_BYTES + 64 * 1024
    """Longest frame; real messages have a few kB."""

    def __init__(self, sock: socket.socket, keys: Keys, life: Lifecycle, peer: str) -> None:
        super().__init__(sock, keys, peer)
        self.life = life

    @property
    def part(self) -> str:
        """Name of the half that uses the channel, for error messages."""
        return self.life.part

    def belong_to(self, life: Lifecycle) -> None:
        """Make closing `life` end the channel's waits from now on. A half that gets the channel passes its own."""
        self.life = life

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send all of `data`. Raises `PeerLostError`, `DeadlineExceededError` or `ClosedError`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._when_ready(select.POLLOUT, deadline, _ROOM, functools.partial(self.socket.send, rest)) :]

    def send_some(self, data: memoryview) -> int:
        """Send as much of `data` as the socket has room for now, and return the number of bytes sent, perhaps 0.

        Raises `PeerLostError`.
        """
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.lost() from error

    def receive(self, nbytes: int, deadline: Deadline, waiting_for: str) -> bytes:
        """Return the next `nbytes` bytes. Raises as `send`."""
        data = b""
        while len(data) < nbytes:
            receive = functools.partial(self.socket.recv, nbytes - len(data))
            chunk = self._when_ready(select.POLLIN, deadline, waiting_for, receive)
            if not chunk:
                raise self.lost()
            data += chunk
        return data

    def receive_into(self, view: memoryview, deadline: Deadline, waiting_for: str) -> None:
        """Fill `view`, writable bytes, with the next bytes, without a copy in between. Raises as `send`."""
        while view.nbytes:
            receive = functools.partial(self.socket.recv_into, view)
            count = self._when_ready(select.POLLIN, deadline, waiting_for, receive)
            if not count:
                raise self.lost()
            view = view[count:]

    def send_descriptors(self, descriptors: Sequence[int], deadline: Deadline) -> None:
        """Pass file descriptors, one to four, over a Unix socket; they stay open here. Raises as `send`."""
        self._when_ready(select.POLLOUT, deadline, _ROOM, lambda: socket.send_fds(self.socket, [b"\0"], descriptors))

    def receive_descriptors(self, deadline: Deadline, waiting_for: str) -> list[int]:
        """Return the file descriptors that `send_descriptors` passes; the caller owns them. Raises as `send`."""
        flag, descriptors, _, _ = self._when_ready(
            select.POLLIN,
            deadline,
            waiting_for,
            lambda: socket.recv_fds(self.socket, 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC),
        )
        if not flag:
            raise self.lost()
        return descriptors

    def send_json(self, message: Mapping[str, Any], deadline: Deadline) -> None:
        """Send one JSON object. Raises as `send`."""
        text = json.dumps(message).encode()
        self.send(self._signed(Frame(0, 0, "", text)) + text, deadline)

    def receive_json(self, deadline: Deadline, waiting_for: str) -> dict[str, Any]:
        """Return the next JSON object.

        Raises as `send`, or `ProtocolError` when the message is not signed by the peer, is not a JSON object, or is too long.
        """
        nbytes = self._length(self.receive(LENGTH.size, deadline, waiting_for))
        message = decode_text(self._verified(self.receive(nbytes, deadline, waiting_for)).payload)
        if message is None:
            raise ProtocolError("a message is not a JSON object.", part=self.part, peer=self.peer)
        return message

    def _when_ready(self, event: int, deadline: Deadline, waiting_for: str, operation: Callable[[], _T]) -> _T:
        """Return the result of `operation` on the socket. While it would block, wait for `event` and try again."""
        while True:
            try:
                return operation()
            except BlockingIOError:
                self.life.wait_until({self.fileno(): event}, deadline, waiting_for, self.peer)
            except OSError as error:
                raise self.lost() from error

    def lost(self, circumstance: str = "") -> PeerLostError:
        """Return the error to raise when the peer is gone. `circumstance` may say when that was, e.g. ``"while ..."``."""
        return PeerLostError(
            f"the peer closed its connection or died{circumstance and ' '}{circumstance}.",
            part=self.part,
            peer=self.peer,
            hint="Look at the peer's own log for the reason.",
        )
