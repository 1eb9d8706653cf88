"""`MadeUpValues`: versions for rehearsals, whose values differ in every element between two seeds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from copy import copy

import torch

from weightlane.sync.version.sliced_tensors import LazyTensors

from ..map.layout_map import SourceSpec

_PERIOD = 1_048_573
"""Elements after which values repeat: a prime, so that no two rows or heads of a tensor have the same values."""
_MANTISSA = 0x7F
"""Seven of the eight bits of a made-up code; the sign is the eighth. In e4m3, all seven bits set mean NaN."""


class MadeUpValues(LazyTensors):
    """A version whose values depend on name, position and `seed` only; each tensor is made on access.

    Every element differs between two seeds, also after a cast to bfloat16. Tensors that are called a scale are positive.

    Args:
        specs: Shape and dtype of every tensor.
        seed: 0 or 1.
        device: The device of the tensors.
        same: Second names of tensors, which have the values of the first name.
    """

    def __init__(
        self, specs: Mapping[str, SourceSpec], seed: int, device: torch.device, same: Mapping[str, str] | None = None
    ) -> None:
        self._specs, self._device, self._same = specs, device, same or {}
        hashed = torch.arange(_PERIOD, dtype=torch.int64, device=device) * 0x9E3779B1 >> 9
        self._codes = (hashed & 0xFF).to(torch.uint8) ^ (0x55 * seed)
        self._periods: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        """One period of values for each dtype, signed or not. A tensor is cut out of its repetitions."""

    def __getitem__(self, name: str) -> torch.Tensor:
        name = self._same.get(name, name)
        spec, signed = self._specs[name], "scale" not in name
        if (period := self._periods.get((spec.dtype, signed))) is None:
            period = self._periods[spec.dtype, signed] = self._period(spec.dtype, signed=signed)
        start = zlib.crc32(name.encode()) % _PERIOD
        repeats = (start + spec.numel) // _PERIOD + 1
        return period.repeat(repeats)[start : start + spec.numel].view(spec.shape)

    def _period(self, dtype: torch.dtype, *, signed: bool) -> torch.Tensor:
        codes = self._codes
        if not dtype.is_floating_point:
            return (codes & 1).to(dtype) if dtype != torch.int8 else codes.view(torch.int8)
        if dtype.itemsize == 1:
            return torch.where(codes & _MANTISSA == _MANTISSA, codes - 2, codes).view(dtype)
        # A mantissa of seven bits and an exponent of two are exact in every dtype.
        mantissa, exponent = (codes & _MANTISSA).float(), (codes >> 3 & 3).float()
        size = (1 + mantissa / 128) * torch.exp2(-2 - exponent)
        return (torch.where(codes > _MANTISSA, -size, size) if signed else size).to(dtype)

    def only(self, specs: Mapping[str, SourceSpec]) -> MadeUpValues:
        """The version with only the tensors of `specs`."""
        other = copy(self)
        other._specs = specs
        return other

    def without_data(self, name: str) -> torch.Tensor:
        """See `LazyTensors.without_data`."""
        return torch.empty(self._specs[name].shape, dtype=self._specs[name].dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)
