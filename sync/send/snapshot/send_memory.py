"""Memory that a publisher sends from, allocated by its engine and kept across sessions: snapshots and packed buckets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch

from weightlane.ckpt_engines import CheckpointEngine, StorageError
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, runtime_of

_log = logging.getLogger(__name__)
PACKING_BUFFERS = 2
"""Most packed buckets in flight: one is packed while the engine sends the other."""


class SendMemory:
    """One contiguous allocation of the engine's memory; it is replaced if receivers may still read the old one.

    Args:
        engine: Allocates the memory; None for torch's allocator.
        nbytes: Size in bytes.
        device: Device of the memory.
        copied_from: Runtime of a device that copies into the memory, if this is host memory.
    """

    def __init__(
        self,
        engine: CheckpointEngine | None,
        nbytes: int,
        device: torch.device,
        *,
        copied_from: DeviceRuntime | None = None,
    ) -> None:
        self._engine = engine
        self._nbytes = nbytes
        self._device = device
        self._copied_from = copied_from if device == HOST else None
        self._registered: set[int] = set()
        """Addresses of registered memory."""
        self.data = self._new()
        """1-D uint8, `nbytes` long. Bytes that were never written are zero, so that gaps between tensors are always the same."""

    def _new(self) -> torch.Tensor:
        # Filled once: first-touch page faults would otherwise slow down the first version.
        if self._engine is None:
            data = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._device)
        else:
            data = self._engine.allocate(self._nbytes, self._device).zero_()
        runtime_of(self._device).synchronize()  # other streams write to it, and do not wait for the zeros
        if self._copied_from and self._nbytes and self._copied_from.register_host(data.data_ptr(), self._nbytes):
            self._registered.add(data.data_ptr())
        return data

    def renew(self) -> None:
        """Replace the memory by other memory of the same size. Raises `StorageError` if there is none; it may be called again.

        If there is no room for both, the old memory is freed first.
        """
        try:
            new = self._new()
        except StorageError:
            self.close()
            new = self._new()
        old, self.data = self.data, new
        self._free(old)

    def grow(self, nbytes: int, *, exactly: bool = False) -> None:
        """Grow to at least `nbytes`, and a quarter more for slowly growing needs unless `exactly` is set.

        If the memory has to grow, its content is lost. Raises `StorageError` if there is too little memory.
        """
        if self._nbytes < nbytes:
            self._nbytes = nbytes if exactly else nbytes + nbytes // 4
            self.renew()

    def close(self) -> None:
        """Free the memory; `data` is empty then. Idempotent."""
        old, self.data = self.data, self.data[:0].clone()
        if old.numel():
            self._free(old)

    def _free(self, old: torch.Tensor) -> None:
        if self._copied_from is not None and old.data_ptr() in self._registered:
            self._registered.discard(old.data_ptr())
            self._copied_from.unregister_host(old.data_ptr())
        if self._engine is not None:
            self._engine.free(old)


class PackingBuffers:
    """Buffers for buckets whose bytes do not lie in a snapshot as in the stream. Allocated when the first bucket is packed.

    Args:
        engine: Allocates the memory; None for torch's allocator.
        device: Device of the buffers.
    """

    def __init__(self, engine: CheckpointEngine | None, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._memories: list[SendMemory] = []

    def of(self, nbytes: int) -> Sequence[torch.Tensor]:
        """The buffers, 1-D uint8, each at least `nbytes` long. Raises `StorageError`."""
        while len(self._memories) < PACKING_BUFFERS:
            self._memories.append(SendMemory(self._engine, 0, self._device))
        for memory in self._memories:
            memory.grow(nbytes, exactly=True)
        return [memory.data for memory in self._memories]

    def close(self) -> None:
        """Free the memory."""
        for memory in self._memories:
            memory.close()


@dataclass(slots=True, eq=False)
class SnapshotSlot:
    """Memory for one snapshot."""

    memory: SendMemory
    exposed: set[tuple[str, int]] = field(default_factory=set)
    """Pairs of session and version in which receivers may read the memory in place."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBase:
    """A version that serves, and its snapshot: the next delta applies to it."""

    version: int
    identity: str
    slot: SnapshotSlot


class SnapshotSlots:
    """One slot, or two if the snapshot of the version that serves is kept as the base of deltas.

    Args:
        allocate: Allocates memory for a snapshot; may raise `StorageError`.
        part: The publisher, for the log.
    """

    def __init__(self, allocate: Callable[[], SendMemory], part: str) -> None:
        self._allocate = allocate
        self._part = part
        self._slots = [SnapshotSlot(allocate())]
        self._only_one = False
        """Whether there is memory for one slot only."""
        self.base: DeltaBase | None = None
        self.writing = Lock()
        """Held by a thread that writes to a snapshot after it was taken."""

    def free(self) -> SnapshotSlot:
        """A slot for the next snapshot. It is not the base's slot, unless there is memory for one slot only."""
        base = self.base
        for slot in self._slots:
            if base is None or slot is not base.slot:
                return slot
        if not self._only_one:
            try:
                self._slots.append(SnapshotSlot(self._allocate()))
            except StorageError as error:
                self._only_one = True
                _log.warning(
                    "%s sends every version in full: no memory to keep the base of a delta: %s", self._part, error
                )
        if self._only_one:
            self.base = None
        return self._slots[-1]

    def close(self) -> None:
        """Free all memory."""
        self.base = None
        for slot in self._slots:
            slot.memory.close()
