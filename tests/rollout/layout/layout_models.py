"""Tensors of random bits, and single elements of them in live parameters."""

from __future__ import annotations

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    """Any bits at all; among the first are -0.0, a denormal and a NaN with a payload."""
    integer = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(limits.min, limits.max, shape, dtype=integer, generator=generator)
    special = torch.tensor([0x8001, 0x0001, 0x7FA1, 0x8000], dtype=torch.int64) << (8 * (dtype.itemsize - 2))
    flat = numbers.view(-1)
    count = min(len(special), flat.numel())
    flat[:count] = special[:count].to(integer)
    return numbers.view(dtype)
