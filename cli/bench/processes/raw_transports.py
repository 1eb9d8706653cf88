"""Transports without weightlane: the limits that rows are held against, and the blocking way that they replace.

Both ends of each live here; rank 0 is the sender's. Everything is timed on `time.monotonic`, which all processes share.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError, Deadline
from weightlane.ckpt_engines.engines.torch_distributed.process_group import (
    abandon_gloo,
    open_process_group,
    start_broadcast,
    translated,
)
from weightlane.sync.control.rendezvous import Rendezvous

_LARGEST_BROADCAST_BYTES = 1 << 30


class RawGloo:
    """A gloo group of the sender and all receivers.

    Args:
        rendezvous: Where they meet, as plain data.
        rank: 0 for the sender.
        world: Processes in the group.
        timeout_s: For the meeting and for each operation.
    """

    def __init__(self, rendezvous: Mapping[str, Any], rank: int, world: int, timeout_s: float) -> None:
        store = Rendezvous.join(rendezvous).store("bench/gloo")
        self._timeout_s = timeout_s
        self._rank = rank
        self._group = open_process_group("gloo", store, rank, world, Deadline.after(timeout_s))

    def broadcast(self, data: torch.Tensor) -> None:
        """Rank 0's `data` (1-D uint8) into everybody's, in one piece."""
        for start in range(0, data.numel(), _LARGEST_BROADCAST_BYTES):
            self._broadcast(data[start : start + _LARGEST_BROADCAST_BYTES])

    def broadcast_in_buckets(self, tensors: Mapping[str, torch.Tensor], bucket: torch.Tensor) -> None:
        """Every tensor of rank 0 into everybody's: one bucket at a time is filled, sent, and emptied."""
        for pieces, nbytes in _buckets(tensors, bucket.numel()):
            if self._rank == 0:
                for place, piece in pieces:
                    bucket[place : place + piece.numel()].copy_(piece)
            self._broadcast(bucket[:nbytes])
            if self._rank:
                for place, piece in pieces:
                    piece.copy_(bucket[place : place + piece.numel()])

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
    """Pieces of tensors (uint8 views) with their places in a bucket, and how full that is."""
    pieces: list[tuple[int, torch.Tensor]] = []
    used = 0
    for tensor in tensors.values():
        left = tensor.view(-1).view(torch.uint8)
        while left.numel():
            piece = left[: bucket_bytes - used]
            pieces.append((used, piece))
            used += piece.numel()
            left = left[piece.numel() :]
            if used == bucket_bytes:
                yield pieces, used
                pieces, used = [], 0
    if pieces:
        yield pieces, used


def has_safetensors() -> bool:
    """Whether files can be measured against."""
    try:
        importlib.import_module("safetensors.torch")
    except ImportError:
        return False
    return True


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write `tensors` as a safetensors file; `ConfigError` where the library is missing."""
    _safetensors().save_file(dict(tensors), str(path))


def load(path: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Read a safetensors file into tensors of the same names."""
    loaded = _safetensors().load_file(str(path))
    torch._foreach_copy_(list(into.values()), [loaded[name] for name in into])


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ConfigError("safetensors is not installed.", part="benchmark", hint="pip install safetensors.") from error
