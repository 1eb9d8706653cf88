"""Positions of the set entries of a mask, on CPU.

numpy compares at memory bandwidth, but its ``nonzero`` reads every byte of the mask. Where few entries are set, that costs three
times as much as the comparison. So the mask is first searched as 64-bit words, and these words in groups of eight, and only
groups with a set entry are opened. In an opened group about 13 % of the entries are set when 1 % of the elements changed; above
10 % ``nonzero`` takes its branchless path. So two steps are faster than one, and one step is faster than none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .integer_views import Positions

Mask = npt.NDArray[np.bool_]

_RAMP = np.arange(0, 1 << 23, 8)
_PLAIN_FROM = 0.57
"""Share of changed 8-element words above which more than a tenth of the elements changed: plain ``nonzero`` is fastest."""
_ONE_STEP_FROM = 0.2
"""Share of changed 8-element words above which grouping the words no longer pays."""


def positions_in(mask: Mask) -> Positions:
    """Indices of the set entries of `mask`, ascending.

    Args:
        mask: 1-D; the length is a multiple of 64 and at most 2**22.
    """
    words: Mask = mask.view(np.uint64) != 0
    share = np.count_nonzero(words) / max(words.size, 1)
    if share == 0:
        return np.empty(0, np.int64)
    if share > _PLAIN_FROM:
        return mask.nonzero()[0]
    if share > _ONE_STEP_FROM:
        at = words.nonzero()[0]
    else:
        pairs = words.view(np.uint64)
        at = _open(pairs, (pairs != 0).nonzero()[0])
    return _open(mask.view(np.uint64), at)


def _open(groups: npt.NDArray[np.uint64], at: Positions) -> Positions:
    """Indices of the set bytes in the eight-byte groups number `at`; overwrites `at`."""
    inside = groups.take(at).view(np.bool_).nonzero()[0]
    at <<= 3
    at -= _RAMP[: at.size]  # the k-th opened group begins at byte 8 k of `inside`
    inside += at.take(inside >> 3)
    return inside
