"""Fast operations on the bytes of tensors: copies by libc, single elements by numpy, and checksums, which detect accidents.

The checksum in host memory is XXH3 (https://github.com/Cyan4973/xxHash), which runs at memory bandwidth. The checksum on a device
is a sum that every torch device computes exactly (int64 arithmetic wraps around): each 64-bit word, with its position added, is
mixed as the finalisers of MurmurHash3 and SplitMix64 do, and the results are added up. A plain or weighted sum would not do: the
signs of two numbers that are both flipped change the highest bits of two words, and these cancel in any sum with odd weights.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

_CHUNK = 1 << 15
"""Elements written at once, few enough for their offsets and values to stay in the cache."""
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
"""SplitMix64's distance between positions: odd, and about 2**64 divided by the golden ratio."""
_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
"""SplitMix64's first factor."""
_WORDS = {"cpu": 1 << 15}
"""Number of words that are mixed at once, by device type: on a CPU, few enough to stay in its cache."""
_DEVICE_WORDS = 1 << 22


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
