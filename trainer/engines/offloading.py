"""Free the memory of tensors while their bytes are in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from weightlane.ckpt_engines.runtime.devices import runtime_of


class HostCopies:
    """Copies, in the host's memory, of tensors whose own memory is freed.

    The tensors and all views of them stay the same objects: they share a storage, which has no bytes until `restore`. Its address
    may differ afterwards. Tensors on the meta device are left out. `pinned` has memory for the copies by device, 1-D uint8, which
    is replaced if it has another size than needed.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], pinned: dict[torch.device, torch.Tensor]) -> None:
        locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in locals_ if not tensor.is_meta
        }
        by_device: dict[torch.device, list[torch.UntypedStorage]] = {}
        for storage in storages.values():
            if storage.nbytes() and storage.resizable():  # a mapped file's storage is not resizable
                by_device.setdefault(storage.device, []).append(storage)
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        for device, moved in by_device.items():
            sizes = [storage.nbytes() for storage in moved]
            here = torch.split(_memory(device, sum(sizes), pinned), sizes)
            self._away += zip(moved, here, strict=True)
        for storage, copy in self._away:
            copy.copy_(_bytes_of(storage), non_blocking=True)
        _finish(by_device)
        for storage, _ in self._away:
            storage.resize_(0)
        if any(device.type == "cuda" for device in by_device):
            torch.cuda.empty_cache()  # for other processes on this device

    @property
    def nbytes(self) -> int:
        """The size of the copies."""
        return sum(len(here) for _, here in self._away)

    def restore(self) -> None:
        """Allocate the tensors' memory again, and copy the same bytes into it."""
        for storage, here in self._away:
            storage.resize_(len(here))
            _bytes_of(storage).copy_(here, non_blocking=True)
        _finish({storage.device for storage, _ in self._away})
        self._away = []


def _memory(device: torch.device, nbytes: int, pinned: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    """Return host memory for copies from `device`: uint8 [nbytes]; that in `pinned` if it has the size.

    It has exactly the bytes that are needed, where torch's own pinned memory is rounded up, tensor by tensor, to powers of two
    (`CachingHostAllocator`). Like torch's it is kept, since to pin it takes longer than to copy.
    """
    runtime = runtime_of(device)
    if not runtime.has_streams:
        return runtime.host_memory(nbytes)
    if device not in pinned or len(pinned[device]) != nbytes:
        pinned.pop(device, None)  # freed before there is other memory
        pinned[device] = runtime.host_memory(nbytes)
    return pinned[device]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of all of `storage`: uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish(devices: Iterable[torch.device]) -> None:
    """Wait for the copies that were started on `devices`."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
