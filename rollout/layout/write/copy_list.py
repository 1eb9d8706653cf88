"""Copies of contiguous runs within host memory, looked up once and made with as little work per copy as possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines.runtime.tensor_bytes import copy_bytes

from ..map.geometry import simplified
from ..map.layout_map import LayoutCopy, SourceSpec

_SMALL = 64 << 10
"""Largest copy in bytes that keeps the interpreter lock, which takes a fifth of the time of a call that releases it."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy that is one contiguous run on both sides, with the live memory that it writes."""

    live: torch.Tensor
    """1-D uint8."""
    start: int
    """First byte in the source tensor."""
    stop: int
    """One past the last byte."""

    @classmethod
    def of(cls, copy: LayoutCopy, source: SourceSpec, storage: torch.Tensor) -> HostCopy | None:
        """The host copy of `copy`, from `source` to a `storage` of shape ``[elements]``.

        None for casts, other devices, and blocks with gaps, which torch copies as fast.
        """
        dimensions = simplified(zip(copy.shape, copy.source_strides, copy.target_strides, strict=True))
        if storage.device.type != "cpu" or source.dtype != storage.dtype or not copy.numel:
            return None
        if len(dimensions) > 1 or dimensions[0][1:] != (1, 1) or copy.source_offset + copy.numel > source.numel:
            return None
        width, nbytes = storage.itemsize, copy.numel * storage.itemsize
        start, place = copy.source_offset * width, copy.target_offset * width
        return cls(storage.view(torch.uint8)[place : place + nbytes], start, start + nbytes)

    def run(self, memory: torch.Tensor) -> None:
        """Make the copy, from a checkpoint tensor's `memory`, 1-D uint8."""
        copy_bytes(self.live, memory[self.start : self.stop])


def _arrangement(tensors: Mapping[str, torch.Tensor]) -> tuple[int, list[tuple[object, ...]]]:
    """The lowest address of `tensors`, and how each lies in memory: its first byte is relative to that address."""
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    lowest = min(addresses, default=0)
    arranged: list[tuple[object, ...]] = [
        (name, tensor.shape, tensor.dtype, address - lowest, tensor.is_contiguous())
        for (name, tensor), address in zip(tensors.items(), addresses, strict=True)
    ]
    return lowest, arranged


class StagedCopies:
    """Copies of a version whose tensors share one storage, computed once for all versions with the same arrangement.

    The `tensors` of the first version are contiguous ones on the CPU; `copies` have the names of the tensors that they read.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], copies: Iterable[tuple[str, HostCopy]]) -> None:
        lowest, self._arranged = _arrangement(tensors)
        offsets = {name: tensor.data_ptr() - lowest for name, tensor in tensors.items()}
        self._nbytes = max((offsets[name] + tensor.nbytes for name, tensor in tensors.items()), default=0)
        self._small: list[tuple[memoryview, int, int]] = []
        self._large: list[tuple[HostCopy, int]] = []
        for name, copy in copies:
            if copy.live.numel() > _SMALL:
                self._large.append((copy, offsets[name]))
            else:
                self._small.append((copy.live.numpy().data, offsets[name] + copy.start, offsets[name] + copy.stop))

    def memory(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The bytes of a version from its lowest address on; None if the version is not arranged like the first one."""
        lowest, arranged = _arrangement(tensors)
        if not arranged or arranged != self._arranged:
            return None
        storage = next(iter(tensors.values())).untyped_storage()
        start = lowest - storage.data_ptr()
        if storage.device.type != "cpu" or not 0 <= start <= start + self._nbytes <= storage.nbytes():
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage)[start : start + self._nbytes]

    def run(self, memory: torch.Tensor) -> None:
        """Make all copies of the version in `memory`."""
        for copy, offset in self._large:
            copy.run(memory[offset:])
        view = memory.numpy().data
        for live, start, stop in self._small:
            live[:] = view[start:stop]
