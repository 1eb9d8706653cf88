"""`EngineMemory`: the memory that an engine has allocated, with a note for each. Public in `toolkit`."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")


class EngineMemory(Generic[_T]):
    """Memory that `CheckpointEngine.allocate` returned and `CheckpointEngine.free` has not taken back yet.

    Each memory has a note: data that the transport needs to send from it, such as a registration. All memory is contiguous uint8.
    The object belongs to an engine, which shares it with all its senders, and any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[torch.Tensor, _T]] = {}
        """Memory and note, by the address of the memory's storage."""

    def add(self, memory: torch.Tensor, note: _T) -> torch.Tensor:
        """Record `memory` and its `note`, and return `memory`."""
        with self._lock:
            self._known[memory.untyped_storage().data_ptr()] = memory, note
        return memory

    def find(self, data: torch.Tensor) -> _T | None:
        """Return the note of the memory that holds all of `data`, or None when none does."""
        start, stop = data.data_ptr(), data.data_ptr() + data.numel()
        with self._lock:
            for memory, note in self._known.values():
                if memory.data_ptr() <= start and stop <= memory.data_ptr() + memory.numel():
                    return note
        return None

    def discard(self, memory: torch.Tensor) -> _T | None:
        """Forget the recorded memory whose storage `memory` uses, and return its note; None when there is none."""
        with self._lock:
            known = self._known.pop(memory.untyped_storage().data_ptr(), None)
        return None if known is None else known[1]

    def drain(self) -> list[_T]:
        """Forget all memory, and return the notes."""
        with self._lock:
            notes = [note for _, note in self._known.values()]
            self._known.clear()
        return notes
