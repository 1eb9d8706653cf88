"""zstd on top of a delta, for slow links: what is left to gain is the exponents of the values, some 10 to 20 %.

It runs at a few hundred MB/s on one core, so it pays below about 1 Gbit/s per core that has nothing better to do. Needs the
package ``zstandard`` (extra ``zstd``).
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch

from weightlane.ckpt_engines import ConfigError, ProtocolError

from .raw import PART, words_of

LEVEL = 1
"""Higher levels take more than they save: positions and mantissas are close to random."""


def unavailable_reason() -> str | None:
    """Why deltas cannot be compressed here, or None if they can."""
    if importlib.util.find_spec("zstandard") is None:
        return "the package zstandard is not installed; install weightlane[zstd]"
    return None


def compress(wire: torch.Tensor) -> torch.Tensor:
    """A delta's bytes (1-D uint8, on CPU) as one zstd frame that tells its content's size and checksum.

    Raises:
        ConfigError: zstandard is not installed.
    """
    _check_available()
    import zstandard  # noqa: PLC0415 - optional

    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    return torch.from_numpy(np.frombuffer(bytearray(compressor.compress(words_of(wire).data)), np.uint8))


def decompress(data: torch.Tensor, *, nbytes: int) -> torch.Tensor:
    """The delta's bytes again.

    Args:
        data: What `compress` made: 1-D uint8, on CPU.
        nbytes: Length of the delta, as the sender announced it; no more memory than that is allocated.

    Raises:
        ProtocolError: It is not a zstd frame of so many bytes.
        ConfigError: zstandard is not installed.
    """
    _check_available()
    import zstandard  # noqa: PLC0415 - optional

    raw = words_of(data).tobytes()
    try:
        told = zstandard.frame_content_size(raw)
        if told != nbytes:
            raise ProtocolError(f"a compressed delta of {told} bytes where {nbytes} were announced.", part=PART)
        found = zstandard.ZstdDecompressor().decompress(raw, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"the compressed delta is damaged: {error}.", part=PART) from None
    return torch.from_numpy(np.frombuffer(bytearray(found), np.uint8)) if found else torch.empty(0, dtype=torch.uint8)


def _check_available() -> None:
    reason = unavailable_reason()
    if reason:
        raise ConfigError(f"deltas cannot be compressed: {reason}.", part=PART, hint="Or turn the compression off.")
