"""Bounded waits: every wait of weightlane ends by a `Deadline`, one of an engine's half also when its `Lifecycle` is closed."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from .errors import ClosedError, DeadlineExceededError
from .runtime.threads import call_in_thread

_T = TypeVar("_T")
_LONGEST_S = 10 * 365 * 86400.0
"""Ten years: the timers of the operating system and of torch cannot count much further."""
_LONGEST_POLL_S = 3600.0
"""Longest single ``poll``, which counts milliseconds in 32 bits; a longer wait polls again."""
_PAUSE_S = 0.001
"""Pause between two polls: short compared with the transfer of a bucket, and long enough to leave the core to others."""
_FIRST_POLLS_S, _FIRST_PAUSE_S = 0.002, 0.00002
"""Length of the first phase, and the shorter pauses in it: a copy within one device takes some ten microseconds."""
GRACE_S = 2.0
"""Seconds that the caller waits beyond the call's own deadline: the engine's error says more than the caller's."""
HINT = "The engine does not keep its deadlines: `weightlane conformance` says which of them."


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on this process's monotonic clock by which a blocking call must have ended.

    Every layer passes its deadline unchanged to the calls that it makes, so their waits share one budget and do not add up. A
    deadline is never sent to another process: messages carry the seconds left, and each side makes its own deadline.
    """

    at: float
    """Value of `clock` at the deadline, in seconds."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    """Returns the time in seconds. Only tests pass a clock of their own."""

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """Return the deadline `seconds` from now, ten years at most."""
        return cls(clock() + min(_LONGEST_S, seconds), clock)

    def within(self, seconds: float) -> Deadline:
        """Return this deadline, or the one `seconds` from now if that is earlier."""
        return Deadline(min(self.at, self.clock() + seconds), self.clock)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - self.clock())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.clock() >= self.at

    def timedelta(self) -> timedelta:
        """Return the time left, at least one millisecond, for torch.distributed: some of its calls take zero for *no timeout*."""
        return timedelta(seconds=max(0.001, self.remaining_s))

    def check(self, waiting_for: str, *, part: str, peer: str = "", hint: str = "") -> None:
        """Raise `DeadlineExceededError` if the deadline has passed."""
        if self.expired:
            raise self.error(waiting_for, part=part, peer=peer, hint=hint)

    def error(self, waiting_for: str, *, part: str, peer: str = "", hint: str = "") -> DeadlineExceededError:
        """Return the error to raise when this deadline has passed while the caller waited for `waiting_for`."""
        return DeadlineExceededError(
            f"the deadline passed while waiting for {waiting_for}.",
            part=part,
            peer=peer,
            hint=hint or "Check that the peer is alive and not overloaded, or allow more time.",
        )


def result_of(call: Future[_T], deadline: Deadline, waiting_for: str, part: str, hint: str = HINT) -> _T:
    """Wait for `call`, which has the same `deadline`, and return its result or raise its error.

    Raises `DeadlineExceededError` when the call has not ended `GRACE_S` seconds after the deadline.
    """
    try:
        return call.result(deadline.remaining_s + GRACE_S)
    except TimeoutError as error:
        if call.done():  # just now, or the TimeoutError is the call's own
            return call.result()
        raise deadline.error(waiting_for, part=part, hint=hint) from error


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


def run_bounded(
    function: Callable[[], _T], life: Lifecycle, deadline: Deadline, waiting_for: str, *, peer: str = ""
) -> _T:
    """Run a blocking `function` without a usable timeout in a daemon thread, and return its result or raise its error.

    At the deadline this raises `DeadlineExceededError`, and `ClosedError` when the half is closed, as happens when a peer dies.
    The thread then continues until `function` returns, so `function` must own every buffer that the library may still read or
    write, and must not touch the caller's memory. Public in `toolkit`.
    """
    call = call_in_thread(function, "weightlane-bounded-call")
    call.add_done_callback(lambda _: life.ring())
    while not call.done():
        life.wait({}, deadline.remaining_s)
        if not call.done():
            deadline.check(waiting_for, part=life.part, peer=peer)
    return call.result()


def poll_until(
    done: Callable[[], bool], life: Lifecycle, deadline: Deadline, waiting_for: str, *, peer: str = ""
) -> None:
    """Call `done` until it returns true: every 20 microseconds for the first 2 milliseconds, then every millisecond.

    Keeps no core busy, because trainer and rollout may share the cores. Raises `DeadlineExceededError` that names `peer`,
    `ClosedError` when the half is closed, as happens when a peer dies, and what `done` raises. Public in `toolkit`.
    """
    short_pauses_until = time.monotonic() + _FIRST_POLLS_S
    while not done():
        if time.monotonic() < short_pauses_until:
            life.wait({}, 0.0)
            time.sleep(_FIRST_PAUSE_S)
        else:
            life.wait({}, min(_PAUSE_S, deadline.remaining_s))
        deadline.check(waiting_for, part=life.part, peer=peer)
