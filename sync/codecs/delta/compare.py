"""Where two runs of words differ, on CPU.

numpy compares at memory bandwidth, but its ``nonzero`` looks at every byte of the mask, and where few are set that costs three
times as much as the comparison. So runs are compared as 64-bit words, whatever the elements, and only words that differ are
compared by element (`changed_positions`). The mask of the words, too, is read as 64-bit words first, and these once more, and
only groups with something in them are opened (`positions_in`). In a group of eight at most some 13 % of the entries are set when
1 % of them are; above 10 % ``nonzero`` takes its branchless path, which is why two levels are faster than one, and one than none.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .raw import Positions, Words

Mask = npt.NDArray[np.bool_]

_RAMP = np.arange(1 << 20)
_PLAIN_FROM = 0.57
"""Share of changed 8-element words from which more than a tenth of the elements have changed: no level pays."""
_ONE_LEVEL_FROM = 0.2
_MANY = 0.25
"""Share of changed 64-bit words from which comparing by element is faster."""
_CHUNK_BYTES = 1 << 20
"""What is compared before words that differ are opened: both runs are still in the cache then."""
_WORD_BYTES = 8


def changed_positions(old: Words, new: Words, scratch: Mask) -> Positions | None:
    """Where two runs, of one size below 2**22, differ, ascending; None where comparing them by element is faster.

    Args:
        old: A run.
        new: The other one, of the same type.
        scratch: Written over; as long as a chunk has words at least.
    """
    per_word = _WORD_BYTES // new.itemsize
    whole = new.size // per_word * per_word
    found: list[Positions] = []
    for start in range(0, whole, _CHUNK_BYTES // new.itemsize):
        stop = min(whole, start + _CHUNK_BYTES // new.itemsize)
        before, after = old[start:stop].view(np.uint64), new[start:stop].view(np.uint64)
        mask = scratch[: -(-after.size // 64) * 64]
        np.not_equal(before, after, out=mask[: after.size])
        mask[after.size :] = False
        at = positions_in(mask)
        if at.size > _MANY * after.size:
            return None
        if per_word > 1:
            differ = before.take(at)
            differ ^= after.take(at)
            inside = (differ.view(new.dtype) != 0).nonzero()[0]
            at -= _RAMP[: at.size]  # as in `_open`
            at *= per_word
            inside += at.take(inside >> (per_word.bit_length() - 1))
            at = inside
        at += start
        found.append(at)
    if whole < new.size:
        found.append((old[whole:] != new[whole:]).nonzero()[0] + whole)
    return np.concatenate(found) if len(found) != 1 else found[0]


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
    at -= _RAMP[: at.size]  # group k of those opened begins at byte 8 k of `inside`
    at <<= 3
    inside += at.take(inside >> 3)
    return inside
