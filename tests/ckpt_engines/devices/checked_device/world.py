"""Pretended devices on a CPU, on which a program that would be wrong on real ones is told so.

Every thread has a current device, number 0 at first. What is started on a stream runs late, and between streams in an order
drawn from a seed. An operation may touch memory only after whatever touched it before, which it must have been made to wait
for: by its stream, by an event, or because the host has seen that it was done. That is followed by vector clocks, so a wait
that is missing is found whatever order was drawn. Memory must outlive the operations that use it.

What is wrong is noted in `World.violations`, each with the rule that it breaks, and nothing hangs because of it.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from waiting import HANG_S

Clock = dict[int, int]
"""How many operations of each stream have been waited for, by the stream's number."""

WRONG_DEVICE = "wrong device"
NO_WAIT = "no wait for what is written"
REUSED = "memory reused too early"
TRAINER = "waits for the training"
FREED = "memory freed too early"
ORDER = "different orders"
OTHER_BYTES = "other bytes than were sent"


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken."""

    rule: str
    what: str


@dataclass(slots=True)
class Access:
    """That an operation reads or writes some bytes of a block."""

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
        """The bytes from `start` on."""
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
        """As torch's streams."""
        return self.number

    def wait_event(self, event: Event) -> None:
        """As torch's streams."""
        with self.world.changed:
            self._waits.append(event)
            _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        """As torch's streams."""
        event = Event(self.world)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        """As torch's streams."""
        event = Event(self.world)
        event.record(self)
        event.synchronize()

    def put(self, what: str, run: Callable[[], object], *, ready: Callable[[], bool] = lambda: True) -> Operation:
        """Start an operation; it begins when its turn has come."""
        with self.world.changed:
            _merge(self.clock, self.world.host)
            self.count += 1
            self.clock[self.number] = self.count
            operation = Operation(what, run, dict(self.clock), self.count, self._waits, ready)
            self._waits = []
            self.queue.append(operation)
            self.world.started(self, operation)
            return operation


class Event:
    """As torch's."""

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
        self.device = stream.device
        self.passed = False
        operation = stream.put("event", self._pass)
        self.clock = operation.clock

    def _pass(self) -> None:
        self.passed = True

    def query(self) -> bool:
        """Whether it has passed. The host then knows of everything before."""
        with self.world.changed:
            if self.passed:
                _merge(self.world.host, self.clock)
            return self.passed

    def synchronize(self) -> None:
        """Wait until it has passed."""
        self.world.wait_until(self.query, "an event")

    def wait(self, stream: Stream) -> None:
        """Have `stream` wait."""
        stream.wait_event(self)

    def ipc_handle(self) -> bytes:
        """By which another half opens it."""
        if self.device is None:
            self.device = self.world.current_device
        return self.world.handle_of(self)


class World:
    """Devices, streams, memory and what was wrong with their use.

    Args:
        seed: Of the order in which streams get on.
        devices: How many there are.
    """

    def __init__(self, seed: int, devices: int) -> None:
        self.devices = devices
        self.changed = threading.Condition(threading.RLock())
        self.violations: list[Violation] = []
        self.host: Clock = {}
        self._random = random.Random(seed)
        self._numbers = 0
        self._next_address = 1 << 40
        self._blocks: dict[int, Block] = {}
        self._streams: list[Stream] = []
        self._handles: list[Any] = []
        self._forbidden: dict[int, tuple[int, Stream]] = {}
        self.registered: dict[int, tuple[int, int]] = {}
        """Host memory that CUDA was told of: where it begins, one past its end, and the flags."""
        self.idle: list[Callable[[], None]] = []
        """Called when no stream can get on."""
        self._threads = threading.local()
        self.default = [self.stream(device, f"default stream of {device}") for device in range(devices)]
        self._over = False
        self.hold = threading.Event()
        """Set while no transfer is to get on."""
        self.let_go = False
        self._thread = threading.Thread(target=self._run, name="checked-device", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let everything get on that waits for something: what is wrong is known."""
        with self.changed:
            self.let_go = True
            self.changed.notify_all()

    # -- what threads have ---------------------------------------------------------------------------------------------------

    @property
    def current_device(self) -> int:
        """This thread's; 0 in a new one."""
        return getattr(self._threads, "device", 0)

    @contextmanager
    def on_device(self, device: int) -> Any:
        """Make it this thread's."""
        before, self._threads.device = self.current_device, device
        try:
            yield
        finally:
            self._threads.device = before

    def current_stream(self, device: int) -> Stream:
        """This thread's on a device."""
        return getattr(self._threads, "streams", {}).get(device, self.default[device])

    @contextmanager
    def on_stream(self, stream: Stream) -> Any:
        """Make it this thread's, and its device, too."""
        streams = self._threads.streams = getattr(self._threads, "streams", {})
        before = streams.get(stream.device)
        with self.on_device(stream.device):
            streams[stream.device] = stream
            try:
                yield
            finally:
                if before is None:
                    del streams[stream.device]
                else:
                    streams[stream.device] = before

    # -- streams -------------------------------------------------------------------------------------------------------------

    def stream(self, device: int, name: str = "a stream") -> Stream:
        """A new one."""
        with self.changed:
            made = Stream(self, device, name)
            self._streams.append(made)
            return made

    def number(self) -> int:
        """A fresh number."""
        self._numbers += 1
        return self._numbers

    def forbid(self, stream: Stream) -> None:
        """Nothing but `stream` itself may wait for what is started on it from now on: it is the training's."""
        self._forbidden[stream.number] = stream.count, stream

    def started(self, stream: Stream, operation: Operation) -> None:
        """An operation was started."""
        for number, (count, training) in self._forbidden.items():
            if number != stream.number and operation.clock.get(number, 0) > count:
                self.violate(TRAINER, f"{operation.what} on {stream.name} waits for {training.name}")
        self.changed.notify_all()

    def violate(self, rule: str, what: str) -> None:
        """Note that a rule was broken."""
        with self.changed:
            self.violations.append(Violation(rule, what))
            self.changed.notify_all()

    @property
    def broken(self) -> set[str]:
        """The rules that were broken."""
        return {violation.rule for violation in self.violations}

    # -- memory --------------------------------------------------------------------------------------------------------------

    def garbage(self, nbytes: int) -> bytes:
        """What fresh memory holds."""
        return self._random.randbytes(nbytes)

    def place(self, nbytes: int) -> int:
        """A fresh address."""
        address = self._next_address
        self._next_address += (nbytes + 511) // 512 * 512 + 512
        return address

    def allocate(self, device: int, nbytes: int, *, by_driver: bool = False) -> Block:
        """Memory of a device; torch's belongs to the stream that is current in this thread."""
        with self.changed:
            block = Block(self, device, nbytes, None if by_driver else self.current_stream(device))
            self._blocks[block.address] = block
            return block

    def watch(self, block: Block, owner: object) -> None:
        """The block is freed when `owner` is gone."""
        weakref.finalize(owner, self.free, block).atexit = False

    def free(self, block: Block) -> None:
        """Nobody holds the block any more."""
        with self.changed:
            if self._blocks.pop(block.address, None) is None:
                return
            known = dict(self.host)
            if block.stream is not None:
                # The allocator lets the memory's own stream use it again, behind what the streams it was told of do now.
                _merge(known, block.stream.clock)
                for stream in self._streams:
                    if stream.number in block.recorded:
                        _merge(known, stream.clock)
            for access in block.accesses:
                if known.get(access.stream, 0) < access.count:
                    self.violate(FREED, f"{access.what} uses memory of device {block.device} that was given back")
                    return

    def find(self, address: int) -> tuple[Block, int]:
        """The block at an address, and where in it."""
        for block in self._blocks.values():
            if block.address <= address < block.address + max(1, block.nbytes):
                return block, address - block.address
        raise AssertionError(f"there is no device memory at {address:#x}")

    def access(
        self, operation: Operation, stream: Stream, block: Block, start: int, stop: int, *, writes: bool
    ) -> None:
        """Note that `operation` uses memory, and that it should have waited for whoever used it before."""
        with self.changed:
            for other in block.accesses:
                if not (writes or other.writes) or other.stop <= start or stop <= other.start:
                    continue
                if operation.clock.get(other.stream, 0) < other.count:
                    verb = "writes to" if writes else "reads"
                    self.violate(
                        NO_WAIT if other.writes else REUSED,
                        f"{operation.what} on {stream.name} {verb} what {other.what} uses, and does not wait",
                    )
            block.accesses.append(Access(start, stop, writes, stream.number, operation.count, operation.what))

    # -- handles -------------------------------------------------------------------------------------------------------------

    def handle_of(self, thing: object) -> bytes:
        """64 bytes by which `thing` is found."""
        with self.changed:
            self._handles.append(thing)
            return (len(self._handles) - 1).to_bytes(64, "little")

    def by_handle(self, handle: bytes) -> Any:
        """What `handle_of` was given."""
        return self._handles[int.from_bytes(handle, "little")]

    # -- running -------------------------------------------------------------------------------------------------------------

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for what streams do."""
        with self.changed:
            assert self.changed.wait_for(reached, HANG_S), f"{what} never came; {self.violations}"

    def _run(self) -> None:
        while not self._over:
            with self.changed:
                runnable = [
                    stream
                    for stream in self._streams
                    if stream.queue and (self.let_go or self._may_run(stream.queue[0]))
                ]
                if runnable:
                    stream = self._random.choice(runnable)
                    operation = stream.queue.popleft()
                    operation.run()
                    self.changed.notify_all()
                elif not self._over:
                    for look in self.idle:
                        look()
                    self.changed.wait(0.01)
            if runnable and self._random.random() < 0.3:
                time.sleep(0)  # somebody else's turn

    def _may_run(self, operation: Operation) -> bool:
        held = self.hold.is_set() and operation.what == "transfer"
        return not held and all(event.passed for event in operation.waits) and operation.ready()

    def close(self) -> None:
        """Stop."""
        with self.changed:
            self._over = True
            self.changed.notify_all()
        self._thread.join(5.0)


def _merge(into: Clock, other: Mapping[int, int]) -> None:
    for number, count in other.items():
        if into.get(number, 0) < count:
            into[number] = count


def names(violations: Iterable[Violation]) -> str:
    """All of them, for a failure's text."""
    return "\n".join(f"{violation.rule}: {violation.what}" for violation in violations)
