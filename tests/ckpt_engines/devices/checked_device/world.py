"""Simulated devices on a CPU, which find what would be wrong on real ones: missing waits, wrong devices, memory reused too early.

Every thread has a current device, number 0 at first. Work that is started on a stream runs at once, and only transfers of
process groups wait for each other. Whether a program waits for everything that it must wait for is not seen by running it, but
followed by vector clocks: an operation may touch memory only after whatever touched it before, which it must have been made to
wait for by its stream, by an event, or because the host has seen that it was done. So a missing wait is found every time.
Memory must outlive the operations that use it.

A broken rule is noted in `World.violations`, and nothing hangs because of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from waiting import HANG_S

from .streams import FREED, NO_WAIT, REUSED, TRAINER, Access, Block, Clock, Operation, Stream, Violation, merge


class World:
    """Devices, streams, memory, and the violations that their use has caused.

    Args:
        devices: The number of devices.
        queues: The number of hardware queues of each, which streams take in turns: a transfer begins after all those that were
            started before it on its queue. CUDA has 8, or ``CUDA_DEVICE_MAX_CONNECTIONS``.
    """

    def __init__(self, devices: int, queues: int = 8) -> None:
        self.devices, self.queues = devices, queues
        self.changed = threading.Condition(threading.RLock())
        self.violations: list[Violation] = []
        self.host: Clock = {}
        """The operations of which the host has seen the end."""
        self.streams: list[Stream] = []
        self.fleets: list[Any] = []
        """Communicators of these devices."""
        self.sent: Counter[int] = Counter()
        """Bytes that transfers of a device have sent, once for each receiver; a broadcast's once."""
        self._next_address = 1 << 40
        self._blocks: dict[int, Block] = {}
        self._handles: list[Any] = []
        self._training: dict[int, int] = {}
        self._threads = threading.local()
        self.default = [self.stream(device, f"default stream of {device}") for device in range(devices)]

    # -- current devices and streams of threads ------------------------------------------------------------------------------

    @property
    def current_device(self) -> int:
        return getattr(self._threads, "device", 0)

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        before, self._threads.device = self.current_device, device
        try:
            yield
        finally:
            self._threads.device = before

    def current_stream(self, device: int) -> Stream:
        return getattr(self._threads, "streams", {}).get(device, self.default[device])

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._threads, "streams", {})
        self._threads.streams = {**before, stream.device: stream}
        try:
            with self.on_device(stream.device):
                yield
        finally:
            self._threads.streams = before

    def stream(self, device: int, name: str = "a stream") -> Stream:
        with self.changed:
            made = Stream(self, device, name, len(self.streams))
            made.queue = sum(each.device == device for each in self.streams) % self.queues
            self.streams.append(made)
            return made

    # -- rules ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def training(self, device: int) -> Iterator[None]:
        """Run a step on the device's default stream inside the block; nothing but that stream may wait for the step."""
        stream = self.default[device]
        with self.changed:
            self._training[stream.number] = stream.count
            stream.put("a step")
        yield
        with self.changed:
            del self._training[stream.number]

    def check_waits(self, what: str, number: int, clock: Clock) -> None:
        """Note a violation where `what`, on the stream `number`, waits for a step of the training on another stream."""
        for training, count in self._training.items():
            if number != training and clock.get(training, 0) > count:
                self.violate(TRAINER, f"{what} waits for the {self.streams[training].name}")

    def violate(self, rule: str, what: str) -> None:
        """Note that a rule was broken."""
        with self.changed:
            self.violations.append(Violation(rule, what))

    @property
    def broken(self) -> set[str]:
        """The rules that were broken."""
        return {violation.rule for violation in self.violations}

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for what other threads do."""
        with self.changed:
            assert self.changed.wait_for(reached, HANG_S), f"{what} never came; {self.violations}"

    # -- memory --------------------------------------------------------------------------------------------------------------

    def allocate(self, device: int, nbytes: int, *, by_driver: bool = False) -> Block:
        """Memory of a device; torch's belongs to the stream that is current in this thread."""
        with self.changed:
            stream = None if by_driver else self.current_stream(device)
            block = Block(device, nbytes, self._next_address, stream)
            self._next_address += (nbytes + 511) // 512 * 512 + 512
            self._blocks[block.address] = block
            return block

    def watch(self, block: Block, owner: object) -> None:
        """Free the block when `owner` is collected."""
        weakref.finalize(owner, self.free, block).atexit = False

    def free(self, block: Block) -> None:
        with self.changed:
            if self._blocks.pop(block.address, None) is None:
                return
            known = dict(self.host)
            if block.stream is not None:
                # The allocator lets the memory's own stream use it again, behind what the streams it was told of do now.
                merge(known, block.stream.clock)
                for number in block.recorded:
                    merge(known, self.streams[number].clock)
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

    def access(self, operation: Operation, block: Block, start: int, stop: int, *, writes: bool) -> None:
        """Note that `operation` uses memory, and a violation if it does not wait for an operation that used it before."""
        with self.changed:
            for other in block.accesses:
                if not (writes or other.writes) or other.stop <= start or stop <= other.start:
                    continue
                if operation.clock.get(other.stream, 0) < other.count:
                    verb = "writes to" if writes else "reads"
                    self.violate(
                        NO_WAIT if other.writes else REUSED,
                        f"{operation.what} {verb} what {other.what} uses, and does not wait",
                    )
            block.accesses.append(Access(start, stop, writes, operation.stream, operation.count, operation.what))

    # -- handles -------------------------------------------------------------------------------------------------------------

    def handle_of(self, thing: object) -> bytes:
        with self.changed:
            self._handles.append(thing)
            return (len(self._handles) - 1).to_bytes(64, "little")

    def by_handle(self, handle: bytes) -> Any:
        return self._handles[int.from_bytes(handle, "little")]
