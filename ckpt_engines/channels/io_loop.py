"""The one thread of a process that serves listening sockets and the connections of the hub.

The thread starts with the first watched socket, and ends when none is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class _IoLoop:
    """Calls the handlers of watched sockets on a thread of its own."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.watched: dict[int, tuple[socket.socket, Callable[[int], None]]] = {}
        # Never joined: a daemon thread that sleeps in epoll does not hold up the end of the process.
        threading.Thread(target=self._run, name="weightlane-io", daemon=True).start()

    def _run(self) -> None:
        while not self._ends():
            for descriptor, events in self.epoll.poll():
                self._handle(descriptor, events)

    def _handle(self, descriptor: int, events: int) -> None:
        """Call a handler. A function of its own: no variable holds the handler, and memory behind it, until the next event."""
        if (watched := self.watched.get(descriptor)) is not None:
            sock, handler = watched
            try:
                handler(events)
            except Exception:  # noqa: BLE001 - the other sockets must be served, too
                _log.exception("events of a socket could not be handled")
                unwatch(sock)
                sock.close()

    def _ends(self) -> bool:
        global _loop  # noqa: PLW0603 - the next call of `watch` starts another loop
        with _changing:
            if self.watched or _loop is None:  # it is None until the first socket is watched
                return False
            _loop = None
            self.epoll.close()
            return True


_loop: _IoLoop | None = None
_changing = threading.Lock()


def watch(sock: socket.socket, handler: Callable[[int], None]) -> None:
    """Call `handler` with the events of `sock` from now on, on the loop's thread."""
    global _loop  # noqa: PLW0603 - one for each process
    with _changing:
        loop = _loop or _IoLoop()
        loop.watched[sock.fileno()] = sock, handler
        loop.epoll.register(sock.fileno(), select.EPOLLIN)
        _loop = loop


def watch_writable(sock: socket.socket, yes: bool) -> None:
    """Start or stop (`yes`) calling the handler of `sock` when there is room to send, in addition to its other events."""
    if (loop := _loop) is not None:
        with contextlib.suppress(OSError, ValueError):  # the socket was closed meanwhile
            loop.epoll.modify(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if yes else 0))


def unwatch(sock: socket.socket) -> None:
    """[loop's thread] Stop watching `sock`. No other thread may do so, or close `sock` before: its descriptor could be reused."""
    if (loop := _loop) is not None and loop.watched.pop(sock.fileno(), None) is not None:
        with contextlib.suppress(OSError):
            loop.epoll.unregister(sock.fileno())


def _after_fork() -> None:
    """[forked process] Close the copies of the parent's descriptors, so that its peers see its end."""
    global _loop, _changing
    inherited, _loop, _changing = _loop, None, threading.Lock()
    if inherited is not None:
        for sock, _ in inherited.watched.values():
            sock.close()
        inherited.epoll.close()


os.register_at_fork(after_in_child=_after_fork)
