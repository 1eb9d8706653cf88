"""Copies within host memory by libc, which reads less of what it overwrites than torch's loops over elements do."""

from __future__ import annotations

import numpy as np
import torch


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` over `target`, both 1-D uint8 of one length, on any device; other threads run meanwhile.

    From a size on that depends on the processor (40 MB here, a share of its last cache) libc writes past the caches, which is
    nearly twice as fast. torch shares the work among its threads where it has several.
    """
    if target.device.type == source.device.type == "cpu" and torch.get_num_threads() == 1:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)
