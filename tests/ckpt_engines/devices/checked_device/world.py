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
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from waiting import HANG_S

from .streams import FREED, NO_WAIT, REUSED, TRAINER, Access, Block, Clock, Operation, Stream, Violation, merge


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
        return getattr(self._threads, "device", 0)

    @contextmanager
    def on_device(self, device: int) -> Any:
        before, self._threads.device = self.current_device, device
        try:
            yield
        finally:
            self._threads.device = before

    def current_stream(self, device: int) -> Stream:
        return getattr(self._threads, "streams", {}).get(device, self.default[device])

    @contextmanager
    def on_stream(self, stream: Stream) -> Any:
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
        with self.changed:
            made = Stream(self, device, name)
            self._streams.append(made)
            return made

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def forbid(self, stream: Stream) -> None:
        """Nothing but `stream` itself may wait for what is started on it from now on: it is the training's."""
        with self.changed:
            self._forbidden[stream.number] = stream.count, stream

    def started(self, stream: Stream, operation: Operation) -> None:
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
        """Return random bytes, which stand for the content of fresh memory."""
        return self._random.randbytes(nbytes)

    def place(self, nbytes: int) -> int:
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
        with self.changed:
            if self._blocks.pop(block.address, None) is None:
                return
            known = dict(self.host)
            if block.stream is not None:
                # The allocator lets the memory's own stream use it again, behind what the streams it was told of do now.
                merge(known, block.stream.clock)
                for stream in self._streams:
                    if stream.number in block.recorded:
                        merge(known, stream.clock)
            for access in block.accesses:
                if known.get(access.stream, 0) < access.count:
                    self.violate(FREED, f"{access.what} uses memory of device {block.device} that was given back")
                    return

    def find(self, address: int) -> tuple[Block, int]:
        with self.changed:
            blocks = list(self._blocks.values())  # the loop below may make garbage go, and with it a block
        for block in blocks:
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
        with self.changed:
            self._handles.append(thing)
            return (len(self._handles) - 1).to_bytes(64, "little")

    def by_handle(self, handle: bytes) -> Any:
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
        with self.changed:
            self._over = True
            self.changed.notify_all()
        self._thread.join(5.0)
