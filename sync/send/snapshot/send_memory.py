"""Memory that a publisher sends from, got from its engine and kept over connections."""

from __future__ import annotations

import torch

from weightlane.ckpt_engines import CheckpointEngine, StorageError
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, runtime_of


class SendMemory:
    """One run of the engine's memory; replaced where somebody may still look at the old one.

    Args:
        engine: Whose memory; torch's own without one.
        nbytes: How much, in bytes.
        device: Where.
        copied_from: The runtime of a device that copies into it, if it is host memory.
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
        """Addresses of what was registered."""
        self.data = self._new()
        """1-D uint8, `nbytes` long. Zero where nothing was written, so that what lies between tensors is the same every time."""

    def _new(self) -> torch.Tensor:
        # Filled once: first-touch page faults would otherwise land in the middle of the first version.
        if self._engine is None:
            data = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._device)
        else:
            data = self._engine.allocate(self._nbytes, self._device).zero_()
        runtime_of(self._device).finish()  # it is written to on other streams, which do not wait for the zeros
        if (
            self._copied_from is not None
            and self._nbytes
            and self._copied_from.register_host(data.data_ptr(), self._nbytes)
        ):
            self._registered.add(data.data_ptr())
        return data

    def renew(self) -> None:
        """Go on with other memory, of the same size. Raises `StorageError` when there is none; try again then.

        Where there is no room for both, the old goes first.
        """
        try:
            new = self._new()
        except StorageError:
            self.close()
            new = self._new()
        old, self.data = self.data, new
        self._give_back(old)

    def grow(self, nbytes: int, *, exactly: bool = False) -> None:
        """Have at least so much; what was there is lost then. Raises `StorageError` when there is too little.

        Unless it is to be `exactly` so much, there will be room for needs that grow slowly.
        """
        if self._nbytes < nbytes:
            self._nbytes = nbytes if exactly else nbytes + nbytes // 4
            self.renew()

    def close(self) -> None:
        """Give it back. Idempotent; `data` is empty then."""
        old, self.data = self.data, self.data[:0].clone()
        if old.numel():
            self._give_back(old)

    def _give_back(self, old: torch.Tensor) -> None:
        if self._copied_from is not None and old.data_ptr() in self._registered:
            self._registered.discard(old.data_ptr())
            self._copied_from.unregister_host(old.data_ptr())
        if self._engine is not None:
            self._engine.free(old)
