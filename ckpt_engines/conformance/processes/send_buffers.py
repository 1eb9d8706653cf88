"""Memory from which a sending half sends its buckets."""

from __future__ import annotations

import torch

from ...contract.engine import CheckpointEngine


class SendBuffers:
    """Numbered buffers, allocated by the engine or by this process, that grow when a larger bucket needs them."""

    def __init__(self, engine: CheckpointEngine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._buffers: dict[tuple[bool, int], torch.Tensor] = {}

    def get(self, number: int, nbytes: int, *, allocated: bool) -> torch.Tensor:
        """Return buffer `number`, uint8 of at least `nbytes` elements, `allocated` by the engine or not."""
        buffer = self._buffers.get((allocated, number))
        if buffer is None or buffer.numel() < nbytes:
            if buffer is not None and allocated:
                self._engine.free(buffer)
            if allocated:
                buffer = self._engine.allocate(nbytes, self._device)
            else:
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._buffers[allocated, number] = buffer
        return buffer

    def free(self) -> None:
        """Return the memory to the engine."""
        for (allocated, _), buffer in self._buffers.items():
            if allocated:
                self._engine.free(buffer)
        self._buffers.clear()
