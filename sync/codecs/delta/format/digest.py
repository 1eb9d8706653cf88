"""Which version a base is: a digest of its bytes, and of the way it came about.

A delta only fits the bits it was made against, so a receiver proves its base before it applies one. Two ways:

- `digest_of` reads the tensors (XXH3, 128 bits, https://github.com/Cyan4973/xxHash): proves the bytes themselves.
- `digest_after` follows a chain: the digest of the base, then of each delta that was applied. It costs the delta's bytes
  only, and serves where a base's tensors no longer lie in one piece, as in an inference engine's fused parameters.

Neither withstands somebody who forges on purpose: both find accidents and mix-ups.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xxhash

from .raw import words_of


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """32 hexadecimal digits over the bytes of `tensors` (contiguous, on CPU), their sizes and their order."""
    total = xxhash.xxh3_128()
    for tensor in tensors:
        raw = words_of(tensor).view(np.uint8)
        total.update(raw.size.to_bytes(8, "little"))
        total.update(xxhash.xxh3_128_digest(raw.data))
    return total.hexdigest()


def digest_after(base_digest: str, deltas: Iterable[torch.Tensor]) -> str:
    """The digest of what `deltas` (their wire bytes, in order) make of the base with `base_digest`."""
    return xxhash.xxh3_128_hexdigest(f"{base_digest} {digest_of(deltas)}".encode())
