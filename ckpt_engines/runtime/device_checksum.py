"""Checksums over a bucket's bytes, computed on the bucket's device. They detect accidents, not attacks.

The checksum in host memory is XXH3 (https://github.com/Cyan4973/xxHash), which runs at memory bandwidth. The checksum on a device
is a sum that every torch device computes exactly (int64 arithmetic wraps around): each 64-bit word, with its position added, is
mixed as the finalisers of MurmurHash3 and SplitMix64 do, and the results are added up. A plain or weighted sum would not do: the
signs of two numbers that are both flipped change the highest bits of two words, and these cancel in any sum with odd weights.
"""

from __future__ import annotations

import torch
import xxhash

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""SplitMix64's distance between positions: odd, and about 2**64 divided by the golden ratio."""
_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
"""SplitMix64's first factor."""
_WORDS = {"cpu": 1 << 15}
"""Number of words that are mixed at once, by device type: on a CPU, few enough to stay in its cache."""
_DEVICE_WORDS = 1 << 22


def xxh3(data: torch.Tensor) -> str:
    """Return the 64-bit XXH3 of `data`, contiguous 1-D uint8 in host memory, as 16 hexadecimal digits."""
    hashed = xxhash.xxh3_64()
    hashed.update(data.numpy().data)  # update() lets other threads run meanwhile; xxh3_64_hexdigest() does not
    return hashed.hexdigest()


def mixed_sum(data: torch.Tensor) -> str:
    """Return the sum of the mixed words of `data`, contiguous 1-D uint8 on any device, as 16 hexadecimal digits."""
    step = _WORDS.get(data.device.type, _DEVICE_WORDS) * 8
    sums = []
    for start in range(0, data.numel(), step):
        part = data[start : start + step]
        if spare := -part.numel() % 8:
            part = torch.nn.functional.pad(part, (0, spare))
        elif part.data_ptr() % 8 or part.storage_offset() % 8:  # a slice that does not begin at a word of its memory
            part = part.clone()
        words = part.view(torch.int64)
        mixed = torch.arange(start // 8, start // 8 + words.numel(), dtype=torch.int64, device=data.device)
        mixed.mul_(_STEP).add_(words)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_((1 << 32) - 1)).mul_(_FACTOR)
        mixed.bitwise_xor_((mixed >> 29).bitwise_and_((1 << 35) - 1))
        sums.append(mixed.sum())
    total = int(torch.stack(sums).sum()) if sums else 0
    return f"{(total + data.numel()) & _MASK:016x}"
