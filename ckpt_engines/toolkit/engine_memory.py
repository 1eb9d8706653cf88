"""`EngineMemory`: what an engine has allocated, so that its senders know a bucket that lies in it. Public in `toolkit`."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")


class EngineMemory(Generic[_T]):
    """What `CheckpointEngine.allocate` handed out and `CheckpointEngine.free` has not taken back yet.

    With each memory goes a note: what the transport needs to send from it, such as a registration. Belongs to an engine object,
    is shared with all its senders, and may be used by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[torch.Tensor, _T]] = {}
        """By address."""

    def add(self, memory: torch.Tensor, note: _T) -> torch.Tensor:
        """Remember `memory` (contiguous uint8), and return it."""
        with self._lock:
            self._known[memory.untyped_storage().data_ptr()] = memory, note
        return memory

    def find(self, data: torch.Tensor) -> _T | None:
        """The note of the memory in which all of `data` (contiguous uint8) lies; None when it lies in none."""
        start, stop = data.data_ptr(), data.data_ptr() + data.numel()
        with self._lock:
            for memory, note in self._known.values():
                if memory.data_ptr() <= start and stop <= memory.data_ptr() + memory.numel():
                    return note
        return None

    def discard(self, memory: torch.Tensor) -> _T | None:
        """Forget `memory`, or that of which it is a part; its note, None when it was not known."""
        with self._lock:
            known = self._known.pop(memory.untyped_storage().data_ptr(), None)
        return None if known is None else known[1]

    def drain(self) -> list[_T]:
        """Forget everything; all notes."""
        with self._lock:
            known = list(self._known.values())
            self._known.clear()
        return [note for _, note in known]
