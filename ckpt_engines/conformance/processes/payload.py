"""Payloads of the suite: bytes that both sides generate from a seed, and a description of how received bytes differ from them.

Only the seed is sent over the socket between a check and its processes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...contract.bucket import FilePart
from ...contract.storing import VersionFiles

UNTOUCHED = 0x55
"""Every byte of a receiving buffer before the bucket is received."""
OVERWRITTEN = 0xAA
"""Every byte of a sending buffer after its bucket was sent."""
_BLOCK_BYTES = 1_000_003  # prime, so that a shifted or swapped page never looks right


class Parcel(NamedTuple):
    """One bucket of a check: its version and index (`number`), its size in bytes, and the seed of its bytes."""

    version: int
    number: int
    nbytes: int
    seed: int
    file: int = -1
    """Index of the first bucket of the file that this bucket is a part of; -1 for a bucket with a file of its own."""
    offset: int = 0
    """Bytes of that file's buckets before this one."""
    total: int = 0
    """Bytes of all buckets of that file."""

    @property
    def part(self) -> FilePart | None:
        """The bucket's place in its file, in the engine contract's terms; None for a bucket with a file of its own."""
        return FilePart(self.file, self.offset, self.total) if self.file >= 0 else None


def payload(nbytes: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Generate the `nbytes` bytes of `seed`: uint8 of shape [nbytes] on `device`."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, 256, (min(nbytes, _BLOCK_BYTES),), dtype=torch.uint8, generator=generator).to(device)
    return block.repeat(-(-nbytes // _BLOCK_BYTES))[:nbytes].contiguous() if nbytes > _BLOCK_BYTES else block


def complaint(received: torch.Tensor, parcel: Parcel, plan: Iterable[Parcel] = ()) -> str:
    """Describe how `received` differs from the payload of `parcel`; empty when it does not differ.

    `plan` lists the sent buckets, to recognise one that arrived instead of this one.
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
        return f"{name} holds what the sender wrote over its buffer after the bucket was reported as sent, from byte {first} on"
    return f"{name} is wrong, first in byte {first}: 0x{got:02x} instead of 0x{wanted:02x}"


def _first_difference(received: torch.Tensor, expected: torch.Tensor) -> int:
    """Return the index of the first byte that differs. Compares block by block, because a mask of a large bucket is slow."""
    for start in range(0, expected.numel(), _BLOCK_BYTES):
        got, wanted = received[start : start + _BLOCK_BYTES], expected[start : start + _BLOCK_BYTES]
        if not torch.equal(got, wanted):
            return start + int((got != wanted).to(torch.uint8).argmax())
    raise AssertionError("there is no difference")


def version_files(version: int, plan: Iterable[Parcel]) -> VersionFiles:
    """Return the files of a version for a persistent engine. Each file is a safetensors file of one tensor."""
    parcels = [parcel for parcel in plan if parcel.version == version]
    sizes = {parcel.number: parcel.total if parcel.part else parcel.nbytes for parcel in parcels}
    continuing = {parcel.number for parcel in parcels if parcel.offset}
    prefixes: list[bytes] = []
    for index in range(max(sizes) + 1):
        if index in continuing:
            prefixes.append(b"")
            continue
        nbytes = sizes.get(index, 0)
        entry = {f"bytes.{index}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
        header = json.dumps(entry).encode()
        header += b" " * (-len(header) % 8)
        prefixes.append(struct.pack("<Q", len(header)) + header)
    return VersionFiles(version, prefixes, {"manifest.json": json.dumps({"version": version})})
