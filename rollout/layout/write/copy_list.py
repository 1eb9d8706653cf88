"""Copies of contiguous runs within host memory, looked up once and made with as little work per copy as possible."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines.runtime.tensor_bytes import copy_bytes

from ..map.geometry import simplified
from ..map.layout_map import LayoutCopy, SourceSpec

_SMALL = 64 << 10
"""Largest copy in bytes that keeps the interpreter lock, which takes a fifth of the time of a call that releases it."""
_DTYPE = operator.attrgetter("dtype")


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


class _Arrangement:
    """Shapes, dtypes and relative addresses of tensors; compared without an object per tensor."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._names = list(tensors)
        self._numels = [tensor.numel() for tensor in tensors.values()]
        self._ranks = [tensor.dim() for tensor in tensors.values()]
        self._shapes = {name: tensor.shape for name, tensor in tensors.items() if tensor.dim() > 1}
        """Shapes of tensors with more than one dimension: asking all tensors would double the cost of the comparison."""
        self._dtypes = [tensor.dtype for tensor in tensors.values()]
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        lowest = min(addresses, default=0)
        self.offsets = {name: address - lowest for name, address in zip(self._names, addresses, strict=True)}
        """First byte of each tensor, relative to the lowest address."""

    def lowest(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """The lowest address of `tensors` if they are contiguous and arranged like the first ones, else None."""
        values = tensors.values()
        if not values or list(tensors) != self._names:
            return None
        addresses = list(map(torch.Tensor.data_ptr, values))
        lowest = min(addresses)
        same = (
            all(map(operator.eq, map(torch.Tensor.numel, values), self._numels))
            and all(map(operator.eq, map(torch.Tensor.dim, values), self._ranks))
            and all(tensors[name].shape == shape for name, shape in self._shapes.items())
            and all(map(operator.is_, map(_DTYPE, values), self._dtypes))
            and all(map(torch.Tensor.is_contiguous, values))
            and [address - lowest for address in addresses] == list(self.offsets.values())
        )
        return lowest if same else None


class StagedCopies:
    """Copies of a version whose tensors share one storage, computed once for all versions with the same arrangement.

    The `tensors` of the first version are contiguous ones on the CPU; `copies` have the names of the tensors that they read.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], copies: Iterable[tuple[str, HostCopy]]) -> None:
        self._arrangement = _Arrangement(tensors)
        offsets = self._arrangement.offsets
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
        lowest = self._arrangement.lowest(tensors)
        if lowest is None:
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
