"""Streams, events, memory and operations of a simulated device, and the rules that a program can break."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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


class Access(NamedTuple):
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
        raw: The bytes, at first garbage. They stay for as long as a transfer uses them, whoever has freed the block.
        stream: On which it was allocated, as far as torch's allocator knows; None for memory of the driver's.
        recorded: Numbers of the streams that the allocator was told of.
    """

    def __init__(self, device: int, nbytes: int, address: int, stream: Stream | None) -> None:
        self.device, self.nbytes, self.address, self.stream = device, nbytes, address, stream
        self.raw = bytearray(b"\xa5" * max(8, nbytes))
        self.recorded: set[int] = set()
        self.accesses: list[Access] = []

    def bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(self.raw, dtype=np.uint8)[start:stop]


class Operation(NamedTuple):
    """Work that was started as number `count` on the stream `stream`, and what it waits for."""

    what: str
    stream: int
    count: int
    clock: Clock


class Transfer(Protocol):
    """An operation that has to meet those of other devices."""

    @property
    def over(self) -> bool: ...


class Stream:
    """Operations of one device, one behind the other."""

    def __init__(self, world: World, device: int, name: str, number: int) -> None:
        self.world, self.device, self.name, self.number = world, device, name, number
        self.queue = 0
        """Number of the hardware queue that it shares with other streams of its device."""
        self.clock: Clock = {}
        self.count = 0
        self.transfers: set[Transfer] = set()
        """Transfers that later work on this stream waits for."""

    @property
    def cuda_stream(self) -> int:
        """The stream's number, in place of torch's native stream handle."""
        return self.number

    def put(self, what: str) -> Operation:
        """Start an operation."""
        with self.world.changed:
            merge(self.clock, self.world.host)
            self.count += 1
            self.clock[self.number] = self.count
            self.world.check_waits(f"{what} on {self.name}", self.number, self.clock)
            return Operation(what, self.number, self.count, dict(self.clock))

    def wait_event(self, event: Event) -> None:
        """Make later operations on this stream wait for `event`, like torch's `Stream.wait_event`."""
        with self.world.changed:
            merge(self.clock, event.clock)
            self.transfers |= event.transfers

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


class Event:
    """An event of a simulated device, with the interface of torch's events."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock: Clock = {}
        self.transfers: set[Transfer] = set()
        self.device: int | None = None
        """On which it is; torch makes it when it is first recorded, or exported."""
        self._asked = False

    def record(self, stream: Stream) -> None:
        """Pass when everything that was started on `stream` is done."""
        if self.device not in (None, stream.device):
            self.world.violate(WRONG_DEVICE, f"an event of device {self.device} is recorded on {stream.name}")
        with self.world.changed:
            self.device = stream.device
            self.clock = stream.put("event").clock
            self.transfers = stream.transfers = {each for each in stream.transfers if not each.over}
            self._asked = False

    @property
    def passed(self) -> bool:
        return all(transfer.over for transfer in self.transfers)

    def query(self) -> bool:
        """Whether it has passed, which whoever asks first does not see yet. The host then knows of everything before."""
        with self.world.changed:
            if not self._asked:
                self._asked = True
                return False
            if self.passed:
                self.world.check_waits("the host", -1, self.clock)
                merge(self.world.host, self.clock)
            return self.passed

    def synchronize(self) -> None:
        """Wait until it has passed."""
        self.world.wait_until(lambda: self.passed, "an event")
        self._asked = True
        self.query()

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
