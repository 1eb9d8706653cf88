"""Streams, events, memory and operations of a pretended device, and the rules that a program can break."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .world import World

Clock = dict[int, int]
"""How many operations of each stream have been waited for, by the stream's number."""

WRONG_DEVICE = "wrong device"
NO_WAIT = "no wait for what is written"
REUSED = "memory reused too early"
TRAINER = "waits for the training"
FREED = "memory freed too early"
ORDER = "different orders"
SAME_STREAM = "two streams are the same one"
UNBOUNDED = "the host waits for a peer without a deadline"
OTHER_BYTES = "other bytes than were sent"


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken."""

    rule: str
    what: str


@dataclass(slots=True)
class Access:
    """One operation's read or write of a range of bytes in a block."""

    start: int
    stop: int
    writes: bool
    stream: int
    count: int
    what: str


class Block:
    """A run of device memory.

    Attributes:
        device: Whose.
        raw: The bytes; they stay for as long as an operation uses them, whoever has freed the block.
    """

    def __init__(self, world: World, device: int, nbytes: int, stream: Stream | None) -> None:
        self.device = device
        self.raw = bytearray(world.garbage(max(8, nbytes)))
        self.address = world.place(nbytes)
        self.nbytes = nbytes
        self.stream = stream
        """On which it was allocated, as far as torch's allocator knows; None for memory of the driver's."""
        self.recorded: set[int] = set()
        """Streams that the allocator was told of."""
        self.accesses: list[Access] = []

    def bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self.raw, dtype=np.uint8)[start:stop]


@dataclass(slots=True)
class Operation:
    """Something to be done on a stream."""

    what: str
    run: Callable[[], object]
    clock: Clock
    count: int
    waits: list[Event] = field(default_factory=list)
    ready: Callable[[], bool] = lambda: True
    """Whether it can run, for one that has to meet others."""


class Stream:
    """Operations of one device, one behind the other."""

    def __init__(self, world: World, device: int, name: str) -> None:
        self.world, self.device, self.name = world, device, name
        self.number = world.number()
        self.clock: Clock = {}
        self.count = 0
        self.queue: deque[Operation] = deque()
        self._waits: list[Event] = []

    @property
    def cuda_stream(self) -> int:
        """The stream's number, in place of torch's native stream handle."""
        return self.number

    def wait_event(self, event: Event) -> None:
        """Make later operations on this stream wait for `event`, like torch's `Stream.wait_event`."""
        with self.world.changed:
            self._waits.append(event)
            merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        """Make later operations on this stream wait for everything started on `other`, like torch's `Stream.wait_stream`."""
        event = Event(self.world)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Wait until everything started on this stream is done, like torch's `Stream.synchronize`."""
        event = Event(self.world)
        event.record(self)
        event.synchronize()

    def put(self, what: str, run: Callable[[], object], *, ready: Callable[[], bool] = lambda: True) -> Operation:
        with self.world.changed:
            merge(self.clock, self.world.host)
            self.count += 1
            self.clock[self.number] = self.count
            operation = Operation(what, run, dict(self.clock), self.count, self._waits, ready)
            self._waits = []
            self.queue.append(operation)
            self.world.started(self, operation)
            return operation


class Event:
    """An event of the checked device, with the interface of torch's events."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: Clock = {}
        self.passed = True
        self.device: int | None = None
        """On which it is; torch makes it when it is first recorded, or exported."""

    def record(self, stream: Stream) -> None:
        """Pass when everything that was started on `stream` is done."""
        if self.device not in (None, stream.device):
            self.world.violate(WRONG_DEVICE, f"an event of device {self.device} is recorded on {stream.name}")
        with self.world.changed:  # it can pass as soon as it is put, and who sees that must find its new clock
            self.device = stream.device
            self.passed = False
            self.clock = stream.put("event", self._pass).clock

    def _pass(self) -> None:
        self.passed = True

    def query(self) -> bool:
        """Whether it has passed. The host then knows of everything before."""
        with self.world.changed:
            if self.passed:
                merge(self.world.host, self.clock)
            return self.passed

    def synchronize(self) -> None:
        """Wait until it has passed."""
        self.world.wait_until(self.query, "an event")

    def ipc_handle(self) -> bytes:
        if self.device is None:
            self.device = self.world.current_device
        return self.world.handle_of(self)


def merge(into: Clock, other: Mapping[int, int]) -> None:
    for number, count in other.items():
        if into.get(number, 0) < count:
            into[number] = count


def names(violations: Iterable[Violation]) -> str:
    return "\n".join(f"{violation.rule}: {violation.what}" for violation in violations)
