"""Free the memory of tensors while their bytes are in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


class HostCopies:
    """Copies, in the host's memory, of tensors whose own memory is freed.

    The tensors and all views of them stay the same objects: they share a storage, which has no bytes until `restore`. Its address
    may differ afterwards.

    Args:
        tensors: Tensors whose storages are copied and freed, each storage once. Tensors on the meta device are left out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in locals_ if not tensor.is_meta
        }
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        devices = set()
        for storage in storages.values():
            if not storage.nbytes() or not storage.resizable():  # a mapped file's storage is not resizable
                continue
            there = _bytes_of(storage)
            here = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=there.is_cuda)
            here.copy_(there, non_blocking=True)
            self._away.append((storage, here))
            devices.add(storage.device)
        _finish(devices)
        for storage, _ in self._away:
            storage.resize_(0)
        if any(device.type == "cuda" for device in devices):
            torch.cuda.empty_cache()  # for other processes on this device

    def restore(self) -> None:
        """Allocate the tensors' memory again, and copy the same bytes into it."""
        for storage, here in self._away:
            storage.resize_(len(here))
            _bytes_of(storage).copy_(here, non_blocking=True)
        _finish({storage.device for storage, _ in self._away})
        self._away = []


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of all of `storage`: uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish(devices: Iterable[torch.device]) -> None:
    """Wait for the copies that were started on `devices`."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
