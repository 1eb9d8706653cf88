"""Where two runs of words differ, on CPU.

numpy compares at memory bandwidth, but its ``nonzero`` looks at every byte of the mask, and where few are set that costs three
times as much as the comparison. So the mask is read as 64-bit words first, and these once more, and only groups with
something in them are opened. In a group of eight at most some 13 % of the entries are set when 1 % of the elements changed;
above 10 % ``nonzero`` takes its branchless path, which is why two levels are faster than one, and one than none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .raw import Positions

Mask = npt.NDArray[np.bool_]

_RAMP = np.arange(0, 1 << 23, 8)
_PLAIN_FROM = 0.57
"""Share of changed 8-element words from which more than a tenth of the elements have changed: no level pays."""
_ONE_LEVEL_FROM = 0.2


def changed_words(mask: Mask) -> Mask:
    """Which groups of eight entries of `mask` (length a multiple of 8) hold one that is set."""
    words: Mask = mask.view(np.uint64) != 0
    return words


def positions_in(mask: Mask, words: Mask | None = None) -> Positions:
    """Indices of the set entries of `mask`, ascending.

    Args:
        mask: Its length is a multiple of 64 and at most 2**22.
        words: `changed_words` of it, if it is already there.
    """
    words = changed_words(mask) if words is None else words
    share = np.count_nonzero(words) / max(words.size, 1)
    if share == 0:
        return np.empty(0, np.int64)
    if share > _PLAIN_FROM:
        return mask.nonzero()[0]
    if share > _ONE_LEVEL_FROM:
        at = words.nonzero()[0]
    else:
        pairs = words.view(np.uint64)
        at = _open(pairs, (pairs != 0).nonzero()[0])
    return _open(mask.view(np.uint64), at)


def _open(groups: npt.NDArray[np.uint64], at: Positions) -> Positions:
    """Indices of the set bytes in the groups `at`, each of eight bytes; overwrites `at`."""
    inside = groups.take(at).view(np.bool_).nonzero()[0]
    at <<= 3
    at -= _ramp(at.size)  # group k of those opened begins at byte 8 k of `inside`
    inside += at.take(inside >> 3)
    return inside


def _ramp(size: int) -> Positions:
    return _RAMP[:size]
