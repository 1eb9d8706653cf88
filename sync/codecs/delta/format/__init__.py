"""The lossless delta codec: only the elements whose bits changed, against a base that both sides hold.

>>> import torch
>>> from weightlane.sync.codecs.delta.format import decode, digest_of, encode
>>> base = torch.zeros(100_000, dtype=torch.bfloat16)
>>> new = base.clone()
>>> new[::100] = 1.5
>>> delta = encode(base, new)
>>> delta.changed, f"{delta.nbytes / new.nbytes:.4f}"
(1000, '0.0156')
>>> patch = decode(delta.to_bytes(), elements=100_000, itemsize=2)
>>> held = base.clone()
>>> patch.swap_(held)
>>> digest_of([held]) == digest_of([new])
True
>>> patch.swap_(held)  # takes it back
>>> torch.equal(held, base)
True
"""

from .decoder import Header, decode, read_header
from .digest import digest_after, digest_of
from .encoder import Encoded, TooDense, encode
from .patch import ContiguousValues, Patch, ScatteredValues, update_base_

__all__ = [
    "ContiguousValues",
    "Encoded",
    "Header",
    "Patch",
    "ScatteredValues",
    "TooDense",
    "decode",
    "digest_after",
    "digest_of",
    "encode",
    "read_header",
    "update_base_",
]
