"""Copies of single runs within host memory: looked up once, and made with the least that can be done per copy."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines.runtime.host_copies import copy_bytes

from ..map.geometry import simplified
from ..map.layout_map import Slice, SourceSpec

_SMALL = 64 << 10
"""Bytes that are copied without letting another thread run, which takes a fifth of the time of a call that does."""
_DTYPE = operator.attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A slice that is one run on both sides, with the live memory it goes to."""

    live: torch.Tensor
    """1-D uint8."""
    start: int
    """First byte in the source."""
    stop: int
    """One past the last."""

    @classmethod
    def of(cls, piece: Slice, source: SourceSpec, storage: torch.Tensor) -> HostCopy | None:
        """None for casts, other devices, and blocks with gaps on a side: torch copies these as fast as anything.

        Args:
            piece: What is copied.
            source: The tensor it comes from.
            storage: The storage it goes to, of shape ``[elements]``.
        """
        dimensions = simplified(zip(piece.shape, piece.source_strides, piece.target_strides, strict=True))
        if storage.device.type != "cpu" or source.dtype != storage.dtype or not piece.numel:
            return None
        if len(dimensions) > 1 or dimensions[0][1:] != (1, 1) or piece.source_offset + piece.numel > source.numel:
            return None
        width, nbytes = storage.itemsize, piece.numel * storage.itemsize
        start, place = piece.source_offset * width, piece.target_offset * width
        return cls(storage.view(torch.uint8)[place : place + nbytes], start, start + nbytes)

    def run(self, memory: torch.Tensor) -> None:
        """Copy it out of a tensor's `memory`, 1-D uint8."""
        copy_bytes(self.live, memory[self.start : self.stop])


class _Arrangement:
    """What tensors are and how they lie to each other, wherever that is; compared without an object per tensor."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._names = list(tensors)
        self._numels = [tensor.numel() for tensor in tensors.values()]
        self._ranks = [tensor.dim() for tensor in tensors.values()]
        self._shapes = {name: tensor.shape for name, tensor in tensors.items() if tensor.dim() > 1}
        """Of those that have one beside their length: to ask all costs half of the comparison."""
        self._dtypes = [tensor.dtype for tensor in tensors.values()]
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        lowest = min(addresses, default=0)
        places = [address - lowest for address in addresses]
        self.places = dict(zip(self._names, places, strict=True))
        """First byte of each, from the lowest."""

    def lowest(self, tensors: Mapping[str, torch.Tensor]) -> int | None:
        """The lowest address of tensors that are like these, contiguous, and lie alike; None for others, and for none."""
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
            and [address - lowest for address in addresses] == list(self.places.values())
        )
        return lowest if same else None


class StagedCopies:
    """Copies of a whole version whose tensors lie in one storage, worked out once for all versions that lie there alike.

    Args:
        tensors: A version, contiguous tensors on the CPU.
        copies: What is copied, by the name of the tensor.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], copies: Iterable[tuple[str, HostCopy]]) -> None:
        self._arrangement = _Arrangement(tensors)
        places = self._arrangement.places
        self._nbytes = max((places[name] + tensor.nbytes for name, tensor in tensors.items()), default=0)
        self._small: list[tuple[memoryview, int, int]] = []
        self._large: list[tuple[HostCopy, int]] = []
        for name, copy in copies:
            if copy.live.numel() > _SMALL:
                self._large.append((copy, places[name]))
            else:
                self._small.append((copy.live.numpy().data, places[name] + copy.start, places[name] + copy.stop))

    def memory(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The bytes of a version, from its lowest on; None if it is not, or does not lie, like the first one."""
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
        for copy, place in self._large:
            copy.run(memory[place:])
        view = memory.numpy().data
        for live, start, stop in self._small:
            live[:] = view[start:stop]
