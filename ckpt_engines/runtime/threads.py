"""Daemon threads: a pool that does not delay the end of the program, calls into libraries that may hang, and the order at exit.

A thread that is in native code while the interpreter shuts down aborts the process, and the program's exit status is lost. So
objects that a program has not closed are closed when it ends (`close_at_exit`), and threads that may be in native code are
joined.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

_log = logging.getLogger(__name__)


class Closable(Protocol):
    """An object with threads, or with memory that outlives the process."""

    def close(self) -> None:
        """End the threads and free the memory. Idempotent."""


_PATIENCE_S = 5.0
"""Longest wait, in seconds, for all threads to end once every object is closed. A thread that is stuck does no harm."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_opened: list[tuple[int, weakref.ref[Closable]]] = []
"""Process id and object, in the order of opening. The references are weak: an open object is kept alive by its own threads."""


def close_at_exit(opened: Closable) -> None:
    """Close `opened` when this process ends, before objects that were opened earlier. A forked process does not close it."""
    _opened.append((os.getpid(), weakref.ref(opened)))
    for gone in [entry for entry in _opened if entry[1]() is None]:
        with suppress(ValueError):  # one by one: a new list would lose what another thread appends meanwhile
            _opened.remove(gone)


def start_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a daemon thread that may be in a native call when the program ends."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    thread.start()
    _threads.add(thread)  # after its start: a process that is forked before then must not wait for it
    return thread


@atexit.register
def _close_all() -> None:
    for process, each in reversed(_opened):
        opened = each()
        if opened is None or process != os.getpid():
            continue
        try:
            opened.close()
        except Exception as trouble:  # noqa: BLE001 - the other objects are to be closed, too
            _log.debug("an object could not be closed at exit: %s", trouble)
    end = time.monotonic() + _PATIENCE_S
    for thread in [each for each in threading.enumerate() if each in _threads]:  # a thread may start another meanwhile
        thread.join(max(0.0, end - time.monotonic()))


P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
_Call = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """A pool like `ThreadPoolExecutor`, but of daemon threads, `most` at once, each started when it is first needed.

    Python joins the threads of a `ThreadPoolExecutor` when the process ends, so one that is stuck keeps the process from ending.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._started = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`. Raises `RuntimeError` after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"no new calls, {self._name} is shut down.")
            self._calls.put((future, lambda: fn(*args, **kwargs)))
            if not self._idle.acquire(blocking=False) and self._started < self._most:
                name = f"{self._name}_{self._started}"
                start_thread(name, _work, self._calls, self._idle)
                self._started += 1
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`, except that it never waits: the threads end by themselves after their last call."""
        del wait
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if cancel_futures:
                self._cancel()
            for _ in range(self._started):
                self._calls.put(None)

    def in_order(
        self, work: Callable[[U], T], items: Iterable[U], most: Callable[[], int]
    ) -> Generator[tuple[U, T], None, None]:
        """Do `work` on every item, on up to `most()` of them ahead of the consumer. Yields items and results in order.

        Once the generator has ended, or was closed, no thread is working on an item any more.
        """
        begun: deque[tuple[U, Future[T]]] = deque()
        try:
            for item in items:
                while begun and (len(begun) >= most() or begun[0][1].done()):
                    first, done = begun.popleft()
                    yield first, done.result()
                begun.append((item, self.submit(work, item)))
            while begun:
                first, done = begun.popleft()
                yield first, done.result()
        finally:
            for _, each in begun:
                each.cancel()
            wait([each for _, each in begun])

    def _cancel(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call[0].cancel()

    def __del__(self) -> None:
        """End the threads of a pool that was never shut down."""
        self.shutdown()


def _work(calls: SimpleQueue[_Call | None], idle: threading.Semaphore) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        if future.set_running_or_notify_cancel():
            _run(function, future)
        del call, future, function  # keep no reference while waiting for the next call
        idle.release()


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
        future.set_exception(error)


def call_in_thread(call: Callable[[], T], name: str = "weightlane-call") -> Future[T]:
    """Run `call` in a daemon thread of its own, which is never joined. The future gets its result, or whatever it raises."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a task that waits for it and is cancelled would else cancel it under the thread
    threading.Thread(target=_run, args=(call, future), name=name, daemon=True).start()
    return future


def start_call(call: Callable[[], T]) -> Future[T]:
    """Run an engine's `call` in a daemon thread of its own; in this one if the program is ending and can start no thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # as above
    try:
        start_thread("weightlane-engine-call", _run, call, future)
    except RuntimeError:  # from Python 3.12 on
        _run(call, future)
    return future


def within(seconds: float, call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own. Return its result, or raise its exception.

    ``SystemExit`` and other exceptions of `call` that are no `Exception` are raised as `RuntimeError`, so that callers can tell
    them from Ctrl-C and SIGTERM, which end the wait.

    Raises `TimeoutError` after `seconds`; the thread is then abandoned.
    """
    started = call_in_thread(call)
    if not wait([started], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if (error := started.exception()) is not None and not isinstance(error, Exception):
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return started.result()
