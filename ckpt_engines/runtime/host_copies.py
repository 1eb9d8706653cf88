"""Writes to host memory that are faster than torch's loops over elements: copies by libc, single elements by numpy."""

from __future__ import annotations

import numpy as np
import torch

_CHUNK = 1 << 15
"""Elements written at once, few enough for their offsets and values to stay in the cache."""


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`, both 1-D uint8 of one length, on any devices. Other threads run meanwhile.

    With one torch thread libc copies. For large copies (40 MB and more on the development machine, a share of its last-level
    cache) libc writes past the caches, which is nearly twice as fast. Several torch threads divide the copy.
    """
    if target.device.type == source.device.type == "cpu" and torch.get_num_threads() == 1:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def put_elements(target: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """Write each of `values` to its offset in `target`, both 1-D integers of one size on the CPU.

    `offsets` are element offsets, 1-D int64 or int32 (`narrow_offsets`) on the CPU.
    """
    into, at, bits = target.numpy(), offsets.numpy(), values.numpy()
    for start in range(0, at.size, _CHUNK):
        # numpy would also convert narrow offsets by itself, but that makes the write a fifth slower.
        into[at[start : start + _CHUNK].astype(np.int64, copy=False)] = bits[start : start + _CHUNK]


def narrow_offsets(offsets: torch.Tensor, numel: int) -> torch.Tensor:
    """Return `offsets` (int64) into a tensor of `numel` elements as int32, half the memory, if all of them fit."""
    return offsets.to(torch.int32) if numel <= torch.iinfo(torch.int32).max else offsets
