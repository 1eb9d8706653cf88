"""Transports without weightlane: the limits of the rows, and the blocking sync that weightlane replaces.

This module holds both ends of each transport. Rank 0 is the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weightlane.ckpt_engines import Deadline
from weightlane.ckpt_engines.engines.torch_distributed.process_group import (
    abandon_gloo,
    open_process_group,
    start_broadcast,
    translated,
)
from weightlane.sync.control.rendezvous import Rendezvous

_LARGEST_BROADCAST_BYTES = 1 << 30


class RawGloo:
    """A gloo group of the sender, rank 0, and all receivers. `timeout_s` bounds its start and each operation."""

    def __init__(self, rendezvous: Mapping[str, Any], rank: int, world: int, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s)
        store = Rendezvous.join(rendezvous).store("bench/gloo", leads=rank == 0, deadline=deadline)
        self._timeout_s = timeout_s
        self._rank = rank
        self._group = open_process_group("gloo", store, rank, world, deadline)

    def broadcast(self, data: torch.Tensor) -> None:
        """Broadcast rank 0's `data` (1-D uint8) into that of every other rank."""
        for start in range(0, data.numel(), _LARGEST_BROADCAST_BYTES):
            self._broadcast(data[start : start + _LARGEST_BROADCAST_BYTES])

    def broadcast_in_buckets(self, tensors: Mapping[str, torch.Tensor], bucket: torch.Tensor) -> None:
        """Broadcast every tensor of rank 0 into those of every other rank. One bucket at a time is filled, sent and emptied."""
        for slices, nbytes in _buckets(tensors, bucket.numel()):
            if self._rank == 0:
                for offset, part in slices:
                    bucket[offset : offset + part.numel()].copy_(part)
            self._broadcast(bucket[:nbytes])
            if self._rank:
                for offset, part in slices:
                    part.copy_(bucket[offset : offset + part.numel()])

    def close(self) -> None:
        """Leave the group."""
        abandon_gloo(self._group)

    def _broadcast(self, data: torch.Tensor) -> None:
        deadline = Deadline.after(self._timeout_s)
        with translated("benchmark", deadline, "a raw gloo broadcast"):
            start_broadcast(self._group, data, 0, deadline).wait()


def _buckets(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int
) -> Iterator[tuple[list[tuple[int, torch.Tensor]], int]]:
    """Yield for each bucket its slices of tensors (offset in the bucket, uint8 view) and its size in bytes."""
    slices: list[tuple[int, torch.Tensor]] = []
    used = 0
    for tensor in tensors.values():
        left = tensor.view(-1).view(torch.uint8)
        while left.numel():
            part = left[: bucket_bytes - used]
            slices.append((used, part))
            used += part.numel()
            left = left[part.numel() :]
            if used == bucket_bytes:
                yield slices, used
                slices, used = [], 0
    if slices:
        yield slices, used


def save(tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Write `tensors` as a safetensors file."""
    from safetensors.torch import save_file  # noqa: PLC0415 - optional

    save_file(dict(tensors), path)


def load(path: str, into: Mapping[str, torch.Tensor]) -> None:
    """Read a safetensors file into the tensors of the same names."""
    from safetensors.torch import load_file  # noqa: PLC0415 - optional

    loaded = load_file(path)
    torch._foreach_copy_(list(into.values()), [loaded[name] for name in into])
