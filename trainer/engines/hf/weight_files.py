"""Plan of the safetensors files of a model that several ranks write: who writes which tensor, and from whose slices.

Every rank makes the same plan, from descriptions of what all ranks hold. A file is written from its start to its end in buckets:
contiguous bytes, each put together from the slices of one or several ranks.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import ManifestError
from weightlane.sync.version.box import Box, boxes_of_run
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import SAFETENSORS_DTYPES, TensorSpec

from .partial_dir import PART
from .stored_slices import sources_of

FILE_BYTES = 5 * 10**9
"""Most bytes of a file, as Hugging Face's libraries split by default; a single tensor may be larger."""
_ALIGNMENT_BYTES = 8
"""The start of the tensors is a multiple of this, as the format asks for (https://huggingface.co/docs/safetensors)."""
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file, and the rank that writes it."""

    name: str
    writer: int
    tensors: tuple[TensorSpec, ...]
    """In the order of their bytes. Those of wider dtypes come first, so that every element is aligned to its size."""

    @property
    def header(self) -> bytes:
        """The bytes before the first tensor."""
        content: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it, transformers refuses a file
        start = 0
        for spec in self.tensors:
            about = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape)}
            content[spec.name] = {**about, "data_offsets": [start, start + spec.nbytes]}
            start += spec.nbytes
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT_BYTES)
        return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a bucket that one rank supplies."""

    rank: int
    held: Box
    """The slice that has them, among those of `rank`."""
    spec: TensorSpec
    box: Box
    """The elements."""
    at: int
    """First byte, in the bucket, of the elements `outer`, which are contiguous there."""
    outer: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.box.numel * self.spec.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """The next bytes of a file."""

    file: WeightFile
    nbytes: int
    parts: tuple[Part, ...]
    first: bool
    """Whether these are the file's first bytes."""


def plan_files(held: Sequence[Placement], most_bytes: int) -> list[WeightFile]:
    """Divide all tensors among files, and these among the ranks.

    A tensor is written by a rank that holds some of it, so that few bytes move; among these by the one that has the fewest bytes
    to write so far. `held` are the slices of each rank. Raises `ManifestError` if two ranks describe a tensor differently.
    """
    specs: dict[str, TensorSpec] = {}
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, placement in enumerate(held):
        for spec, boxes in zip(placement.specs, placement.boxes, strict=True):
            if specs.setdefault(spec.name, spec) != spec:
                raise ManifestError(f"rank {rank} describes {spec.name} as others do not.", part=PART)
            holders[spec.name] += [rank] * bool(boxes)
    loads = [0] * len(held)
    groups: list[list[list[TensorSpec]]] = [[] for _ in held]
    for name, spec in specs.items():
        writer = min(holders[name] or [0], key=lambda rank: (loads[rank], rank))
        loads[writer] += spec.nbytes
        files = groups[writer]
        if not files or sum(each.nbytes for each in files[-1]) + spec.nbytes > most_bytes:
            files.append([])
        files[-1].append(spec)
    owned = [(writer, tensors) for writer, files in enumerate(groups) for tensors in files]
    names = [f"model-{number:05d}-of-{len(owned):05d}.safetensors" for number in range(1, len(owned) + 1)]
    return [
        WeightFile(name, writer, tuple(sorted(tensors, key=lambda spec: -spec.dtype.itemsize)))
        for name, (writer, tensors) in zip(["model.safetensors"] if len(owned) == 1 else names, owned, strict=True)
    ]


def buckets_of(
    files: Sequence[WeightFile], held: Sequence[Placement], writer: int, most_bytes: int
) -> Iterator[Bucket]:
    """Yield the buckets of all files of rank `writer`, in their order, each of at most `most_bytes` bytes.

    Raises `ManifestError` if no rank holds some element.
    """
    slices: dict[str, list[tuple[tuple[int, Box], Box]]] = defaultdict(list)
    for rank in sorted(range(len(held)), key=lambda rank: rank != writer):  # what the writer holds need not be sent
        for spec, box in held[rank].slices:
            slices[spec.name].append(((rank, box), box))
    for file in (each for each in files if each.writer == writer):
        parts: list[Part] = []
        size, first = 0, True
        for spec in file.tensors:
            start = 0
            while start < spec.numel:
                count = min(spec.numel - start, (most_bytes - size) // spec.dtype.itemsize)
                if not count:
                    yield Bucket(file, size, tuple(parts), first)
                    parts, size, first = [], 0, False
                for outer in boxes_of_run(spec.shape, start, count):
                    found, missing = sources_of(outer, slices[spec.name])
                    if missing:
                        raise ManifestError(f"no rank holds all of {spec.name}.", part=PART)
                    parts += [Part(rank, its, spec, box, size, outer) for (rank, its), box in found]
                    size += outer.numel * spec.dtype.itemsize
                start += count
        yield Bucket(file, size, tuple(parts), first)
