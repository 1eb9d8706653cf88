"""`Lifecycle`: lets any thread close one half of an engine while another thread is blocked in it."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

from ..deadline import Deadline
from ..errors import ClosedError

_LONGEST_POLL_S = 3600.0
"""Longest single ``poll``, which counts milliseconds in 32 bits; a longer wait polls again."""


class Lifecycle:
    """The state of one half, open or closed, with waits that a close ends.

    The last thread that uses the half releases its resources: `close` when no call is running, else the running call as it
    ends. A file descriptor is therefore never closed under a thread that polls it, which could otherwise poll a new descriptor
    of the same number that belongs to something else.

    Args:
        part: Name of the half for error messages, e.g. ``"shm sender trainer-0"``.
        release: Frees the resources of the half. Called exactly once; its exceptions are ignored.
    """

    def __init__(self, part: str, release: Callable[[], None]) -> None:
        self.part = part
        self._release = release
        self._lock = threading.Lock()
        self._running = 0
        self._closed = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Wrap every public method except ``close``. Raises `ClosedError` instead of errors that follow from a close."""
        with self._lock:
            if self._closed:
                raise ClosedError("it is closed.", part=self.part)
            self._running += 1
        try:
            yield
        except Exception as error:
            if self._closed and not isinstance(error, ClosedError):
                raise self._interrupted() from error
            raise
        finally:
            with self._lock:
                self._running -= 1
                last_out = self._closed and self._running == 0
            if last_out:
                self._free()

    def wait(self, interest: Mapping[int, int], timeout_s: float) -> set[int]:
        """Poll file descriptors, mapped to their ``select.POLL*`` events, for at most `timeout_s` seconds.

        Returns the descriptors that are ready; none after the timeout, a `ring` or an hour. With an empty `interest` this is a
        sleep that a close ends. Raises `ClosedError` as soon as `close` is called.
        """
        poller = select.poll()
        poller.register(self._wake_read.fileno(), select.POLLIN)
        for descriptor, events in interest.items():
            poller.register(descriptor, events)
        ready = {descriptor for descriptor, _ in poller.poll(math.ceil(min(timeout_s, _LONGEST_POLL_S) * 1000))}
        if self._closed:
            raise self._interrupted()
        if self._wake_read.fileno() in ready:
            ready.discard(self._wake_read.fileno())
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        return ready

    def wait_until(self, interest: Mapping[int, int], deadline: Deadline, waiting_for: str, peer: str = "") -> set[int]:
        """Poll as `wait` does, until a descriptor is ready. Raises `DeadlineExceededError` when none is by the deadline."""
        while True:
            if ready := self.wait(interest, deadline.remaining_s):
                return ready
            deadline.check(waiting_for, part=self.part, peer=peer)

    def ring(self) -> None:
        """Make a running `wait`, or the next one, return early. Callable from any thread at any time."""
        with contextlib.suppress(OSError):
            self._wake_write.send(b"r")

    def close(self) -> None:
        """End a blocked call and release the resources. Idempotent; never raises."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._running == 0
            self.ring()
        if idle:
            self._free()

    def _interrupted(self) -> ClosedError:
        return ClosedError("it was closed while a call was running.", part=self.part)

    def _free(self) -> None:
        with contextlib.suppress(Exception):
            self._release()
        self._wake_read.close()
        self._wake_write.close()
