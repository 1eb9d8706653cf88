"""Checksums over a bucket's bytes, on the device they are on. They find accidents, not attackers.

In the host's memory it is XXH3 (https://github.com/Cyan4973/xxHash), which runs at memory bandwidth. On a device it is made of
plain integer sums, which every torch device computes exactly (int64 arithmetic wraps around): the bytes are read as a matrix
of 64-bit words, and the sums of its rows and of its columns, each weighted by position with odd numbers, give two 64-bit
words. Any single changed word changes the first, and moved words change one or the other.
"""

from __future__ import annotations

import torch
import xxhash

_ROW_WORDS = 4096
_MASK = (1 << 64) - 1


def xxh3(data: torch.Tensor) -> str:
    """XXH3 with 64 bits of `data`, contiguous 1-D uint8 in host memory, as 16 hexadecimal digits."""
    hashed = xxhash.xxh3_64()
    hashed.update(
        data.numpy().data
    )  # lets other threads run meanwhile, which the function that does all at once does not
    return hashed.hexdigest()


def sums(data: torch.Tensor) -> str:
    """The weighted sums of `data`, contiguous 1-D uint8 on any device with a storage offset of a multiple of 8, in 32 digits."""
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
