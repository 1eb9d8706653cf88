"""What is written to host memory faster than by torch's loops over elements: copies by libc, single elements by numpy."""

from __future__ import annotations

import numpy as np
import torch

_CHUNK = 1 << 15
"""Elements written at once: their offsets and values stay in the cache."""


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` over `target`, both 1-D uint8 of one length, on any device; other threads run meanwhile.

    From a size on that depends on the processor (40 MB here, a share of its last cache) libc writes past the caches, which is
    nearly twice as fast. torch shares the work among its threads where it has several.
    """
    if target.device.type == source.device.type == "cpu" and torch.get_num_threads() == 1:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def put_elements(target: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` to `offsets` in `target`, all 1-D on the CPU; `target` and `values` are integers of one size.

    Args:
        target: What is written to.
        offsets: int64, or int32 where that is enough (`narrow_offsets`).
        values: As many.
    """
    into, at, bits = target.numpy(), offsets.numpy(), values.numpy()
    for start in range(0, at.size, _CHUNK):
        # numpy would convert narrow offsets, too, at a fifth of the whole cost more.
        into[at[start : start + _CHUNK].astype(np.int64, copy=False)] = bits[start : start + _CHUNK]


def narrow_offsets(offsets: torch.Tensor, numel: int) -> torch.Tensor:
    """`offsets` (int64) in a tensor of `numel` elements, in half the memory if they fit in 31 bits."""
    return offsets.to(torch.int32) if numel <= torch.iinfo(torch.int32).max else offsets
