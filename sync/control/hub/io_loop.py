"""`IoLoop`: the one thread of a process that reads from the sockets of all its control connections."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class IoLoop:
    """Calls the handlers of watched sockets, on a thread of its own that ends when nothing is watched. `watch` makes loops."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[socket.socket, Callable[[int], None]]] = {}
        # Never joined: a daemon thread that sleeps in epoll does not hold up the end of the process.
        threading.Thread(target=self._run, name="weightlane-control-io", daemon=True).start()

    def watch(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events of `sock` from now on, and no other handler."""
        known = sock.fileno() in self._watched
        self._watched[sock.fileno()] = sock, handler
        if not known:
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def watch_writable(self, sock: socket.socket, yes: bool) -> None:
        """Call the handler of `sock` also when there is room to send, or no longer."""
        with contextlib.suppress(OSError, ValueError):  # the socket was closed meanwhile
            self._epoll.modify(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if yes else 0))

    def close(self, sock: socket.socket) -> None:
        """[loop's thread] Close `sock`. No other thread closes a watched socket, since its descriptor could be reused."""
        if self._watched.pop(sock.fileno(), None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(sock.fileno())
        sock.close()

    def _run(self) -> None:
        while not self._ends():
            for descriptor, events in self._epoll.poll():
                if (watched := self._watched.get(descriptor)) is not None:
                    sock, handler = watched
                    try:
                        handler(events)
                    except Exception:  # noqa: BLE001 - the other sockets must be read, too
                        _log.exception("control connection: events of a socket could not be handled")
                        self.close(sock)

    def _ends(self) -> bool:
        global _loop  # noqa: PLW0603 - the next call of `watch` starts another loop
        with _changing:
            if self._watched or _loop is None:  # it is None until the first socket is watched
                return False
            _loop = None
            self._epoll.close()
            return True

    def leave_to_parent(self) -> None:
        """[forked process] Close the copies of the parent's descriptors, so that its peers see its end."""
        for sock, _ in self._watched.values():
            sock.close()
        self._epoll.close()


_loop: IoLoop | None = None
_changing = threading.Lock()


def watch(sock: socket.socket, handler: Callable[[int], None]) -> IoLoop:
    """Have the process's loop call `handler` with the events of `sock`, instead of an earlier handler. Returns the loop."""
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
