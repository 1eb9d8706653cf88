"""The lossless delta codec: the elements whose bits changed since a base that sender and receiver both have.

>>> import torch
>>> from weightlane.sync.codecs.delta.format import decode, encode
>>> base = torch.zeros(100_000, dtype=torch.bfloat16)
>>> new = base.clone()
>>> new[::100] = 1.5
>>> delta = encode(base, new)
>>> delta.changed, f"{delta.nbytes / new.nbytes:.4f}"
(1000, '0.0152')
>>> patch = decode(delta.to_bytes(), elements=100_000, itemsize=2)
>>> received = base.clone()
>>> patch.flip_(received)
>>> torch.equal(received, new)
True
>>> patch.flip_(received)  # rolls back
>>> torch.equal(received, base)
True
"""

from .encoder import Encoded, TooDense, encode
from .patch import Patch, decode

__all__ = [
    "Encoded",
    "Patch",
    "TooDense",
    "decode",
    "encode",
]
