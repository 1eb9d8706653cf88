"""Checksums over a bucket's bytes, computed on the bucket's device. They detect accidents, not attacks.

The checksum in host memory is XXH3 (https://github.com/Cyan4973/xxHash), which runs at memory bandwidth. The checksum on a device
consists of integer sums, which every torch device computes exactly (int64 arithmetic wraps around). The bytes are read as a
matrix of 64-bit words. Its row sums and its column sums, each weighted by position with odd numbers, give two 64-bit words. A
change of one word changes the first, and a moved word changes at least one of them.
"""

from __future__ import annotations

import torch
import xxhash

_ROW_WORDS = 4096
"""Words of a row; any number gives a valid checksum, but all participants must use the same."""
_MASK = (1 << 64) - 1


def xxh3(data: torch.Tensor) -> str:
    """Return the 64-bit XXH3 of `data`, contiguous 1-D uint8 in host memory, as 16 hexadecimal digits."""
    hashed = xxhash.xxh3_64()
    hashed.update(data.numpy().data)  # update() lets other threads run meanwhile; xxh3_64_hexdigest() does not
    return hashed.hexdigest()


def sums(data: torch.Tensor) -> str:
    """Return the weighted sums of `data`, contiguous 1-D uint8 on any device, as 32 hexadecimal digits.

    The storage offset of `data` is a multiple of 8.
    """
    nbytes = data.numel()
    body_words = nbytes // 8 // _ROW_WORDS * _ROW_WORDS
    body = data[: body_words * 8].view(torch.int64).view(-1, _ROW_WORDS)
    tail = torch.zeros(_ROW_WORDS * 8, dtype=torch.uint8, device=data.device)
    tail[: nbytes - body_words * 8] = data[body_words * 8 :]
    tail_words = tail.view(torch.int64)

    rows = torch.cat((body.sum(1), tail_words.sum().view(1)))
    columns = body.sum(0) + tail_words
    first, second = torch.stack((_weighted(rows), _weighted(columns))).tolist()
    return f"{(first + nbytes) & _MASK:016x}{second & _MASK:016x}"


def _weighted(sums_of: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, 2 * sums_of.numel(), 2, dtype=torch.int64, device=sums_of.device)
    return (sums_of * weights).sum()
