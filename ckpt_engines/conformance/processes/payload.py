"""What the suite sends: bytes that a seed stands for, so that no payload goes over a pipe, and what is wrong with others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...contract.engine import FilePart

UNTOUCHED = 0x55
"""What a receiving buffer holds before."""
OVERWRITTEN = 0xAA
"""What a sending buffer holds as soon as its bucket is done."""
_BLOCK_BYTES = 1_000_003  # prime, so that a shifted or swapped page never looks right


class Parcel(NamedTuple):
    """One bucket of a check: its version and index (`number`), how large it is, and which bytes are in it."""

    version: int
    number: int
    nbytes: int
    seed: int
    file: int = -1
    """Index of the first bucket of the file that it is a part of; -1 for a bucket with a file of its own."""
    offset: int = 0
    """Bytes of that file's buckets before this one."""
    total: int = 0
    """Bytes of all of them."""

    @property
    def part(self) -> FilePart | None:
        """As the engine is told."""
        return FilePart(self.file, self.offset, self.total) if self.file >= 0 else None


def payload(nbytes: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The `nbytes` bytes that `seed` stands for: uint8 of shape [nbytes] on `device`."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, 256, (min(nbytes, _BLOCK_BYTES),), dtype=torch.uint8, generator=generator).to(device)
    return block.repeat(-(-nbytes // _BLOCK_BYTES))[:nbytes].contiguous() if nbytes > _BLOCK_BYTES else block


def complaint(received: torch.Tensor, parcel: Parcel, plan: Iterable[Parcel] = ()) -> str:
    """Empty when `received` is the payload of `parcel`, else a sentence that says how it differs.

    `plan` holds what else is sent, to recognise a bucket that came in place of another one.
    """
    expected = payload(parcel.nbytes, parcel.seed, received.device)
    if torch.equal(received, expected):
        return ""
    name = f"bucket {parcel.number} of version {parcel.version} ({parcel.nbytes} bytes)"
    for other in plan:
        if (
            other.nbytes == parcel.nbytes
            and other != parcel
            and torch.equal(received, payload(other.nbytes, other.seed).to(received))
        ):
            return f"{name} holds the bytes of bucket {other.number} of version {other.version}"
    first = _first_difference(received, expected)
    if bool((received[first:] == UNTOUCHED).all()):
        return f"{name} was not written from byte {first} on"
    got, wanted = int(received[first]), int(expected[first])
    if got == OVERWRITTEN:
        return f"{name} holds what the sender wrote over its buffer after it was said to be done, from byte {first} on"
    return f"{name} is wrong, first in byte {first}: 0x{got:02x} instead of 0x{wanted:02x}"


def _first_difference(received: torch.Tensor, expected: torch.Tensor) -> int:
    """Index of the first byte that differs; block by block, since masks of a large bucket would take long."""
    for start in range(0, expected.numel(), _BLOCK_BYTES):
        got, wanted = received[start : start + _BLOCK_BYTES], expected[start : start + _BLOCK_BYTES]
        if not torch.equal(got, wanted):
            return start + int((got != wanted).to(torch.uint8).argmax())
    raise AssertionError("there is no difference")
