"""The manifest: what one weight version consists of, known to every receiver before the first byte.

The tensors of a version form one *stream*: each tensor's row-major bytes at an aligned offset, in the order of the manifest.
A bucket is a window on that stream, cut in one of two ways:

- *Fixed* windows: every bucket but the last has the same size. Large tensors span buckets, small ones share them.
- *Whole tensors*, for engines whose files other tools shall read: a bucket holds as many whole tensors as fit, and a larger
  tensor several buckets, which make one file. Inside a file tensors lie back to back, because the safetensors format allows no
  gaps; each is aligned to its element size nevertheless, since the stream begins with the tensors of the widest elements.

Empty and scalar tensors need no rule of their own. Offsets follow from names, shapes and dtypes, so they are not transmitted.

A stream that goes to different receivers from different senders consists of *sections*, one after the other, and no bucket
spans two of them. Its "tensors" are then slices of tensors, and which ones is not transmitted either: everybody has worked out
the same transfer plan, and the manifest has its digest.

What crosses the wire is the stream itself (codec *dense*) or its difference from a version that the receivers have (*delta*):
*segments* back to back, each the delta of a slice of one tensor, cut into fixed windows.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from weightlane.ckpt_engines import FilePart, ProtocolError

from .box import Box, overlap
from .tensor_spec import TensorSlice, TensorSpec, dtype_of

ALIGNMENT_BYTES = 64
"""Every tensor, or with whole tensors every file, starts at a multiple of this: enough for any dtype view."""

CODEC_DENSE = "dense"
CODEC_DELTA = "delta"
_PART = "manifest"
_LIMIT = 2**63
"""Versions, sizes and offsets are signed 64-bit numbers in torch."""


_Count = Annotated[int, Field(ge=0, lt=_LIMIT), Strict()]
_Counts = Annotated[list[_Count], Field(max_length=64)]
PlainSegment = Annotated[tuple[_Count, _Counts, _Counts, _Count], Strict(strict=False)]
"""What `DeltaSegment.to_plain` gives."""


class _ManifestOnWire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Annotated[int, Field(ge=0, lt=_LIMIT)]
    codec: Literal["dense", "delta"]
    base_version: Annotated[int, Field(ge=0, lt=_LIMIT)] | None
    identity: Annotated[str, Field(max_length=200)] = ""
    base_identity: Annotated[str, Field(max_length=200)] = ""
    segments: list[PlainSegment] = []
    bucket_bytes: Annotated[int, Field(gt=0, lt=_LIMIT)]
    whole_tensors: bool = False
    checksummed: bool = True
    lasting: bool = False
    quantised: Annotated[str, Field(max_length=200)] = ""
    plan: Annotated[str, Field(max_length=200)] = ""
    # JSON has lists only, which strict mode would not take for tuples.
    tensors: list[
        Annotated[
            tuple[str, Annotated[list[Annotated[int, Field(ge=0, lt=_LIMIT)]], Field(max_length=64)], str],
            Strict(strict=False),
        ]
    ]

    @property
    def is_in_full(self) -> bool:
        return self.codec == CODEC_DENSE and not self.segments and self.base_version is None and not self.base_identity

    def is_cut_as(self, other: Manifest) -> bool:
        mine = (self.bucket_bytes, self.whole_tensors, self.checksummed, self.lasting, self.quantised)
        return mine == (other.bucket_bytes, other.whole_tensors, other.checksummed, other.lasting, other.quantised)


@dataclass(frozen=True, slots=True)
class DeltaSegment:
    """The delta of a slice of one tensor, and how long it is."""

    tensor: int
    """Which tensor: its place in the manifest's `specs`."""
    box: Box
    """Which slice; its elements are counted in row-major order."""
    nbytes: int
    """Length of the delta on the wire; see `weightlane.sync.codecs.delta.format`."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.box.numel

    def to_plain(self) -> list[Any]:
        """As JSON."""
        return [self.tensor, *self.box.to_plain(), self.nbytes]

    @classmethod
    def from_plain(cls, plain: tuple[int, list[int], list[int], int]) -> DeltaSegment:
        """The inverse, of what was validated as `PlainSegment`."""
        tensor, starts, shape, nbytes = plain
        return cls(tensor, Box(tuple(starts), tuple(shape)), nbytes)


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """A tensor and the place of its bytes in the stream."""

    spec: TensorSpec
    offset: int
    """First byte in the stream."""

    @property
    def end(self) -> int:
        """One past the last byte in the stream."""
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class Slicing:
    """What the tensors of a stream are that goes by a transfer plan."""

    plan: str
    """The plan's digest."""
    specs: tuple[TensorSpec, ...]
    """Every tensor of the checkpoint."""
    regions: tuple[TensorSlice, ...]
    """Which slice of which of them each tensor of the stream is."""


@dataclass(frozen=True)
class Manifest:
    """Names, shapes, dtypes, codec and bucket size of one version."""

    version: int
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    """Payload bytes of every bucket but the last, with `whole_tensors` at most; a multiple of `ALIGNMENT_BYTES`."""
    codec: str = CODEC_DENSE
    base_version: int | None = None
    """The version a delta applies to; None for the dense codec."""
    whole_tensors: bool = False
    """Whether no tensor is in two files."""
    checksummed: bool = True
    """Whether every bucket has a checksum, which receivers verify."""
    lasting: bool = False
    """Whether receivers may look at the buckets where they lie until they say that they are done."""
    identity: str = ""
    """Which publication this is, of all by all publishers; empty when no delta will be based on it."""
    base_identity: str = ""
    """The `identity` of the version that a delta applies to."""
    segments: tuple[DeltaSegment, ...] = ()
    """What a delta consists of, in the order of the wire; empty for the dense codec."""
    quantised: str = ""
    """As what linear weights are quantised, ``"fp8"`` or ``"int8"``; empty when none are.

    See `weightlane.sync.codecs.quantised.quantisation`.
    """
    slicing: Slicing | None = None
    """Which slices `specs` are; None when they are whole tensors."""
    sections: tuple[int, ...] = ()
    """How many of `specs` each section has; empty for a stream of one."""

    def __post_init__(self) -> None:
        if self.bucket_bytes <= 0 or self.bucket_bytes % ALIGNMENT_BYTES:
            raise ProtocolError(
                f"bucket_bytes is {self.bucket_bytes}.",
                part=_PART,
                hint=f"Use a positive multiple of {ALIGNMENT_BYTES}.",
            )
        names = [spec.name for spec in self.specs]
        if len(set(names)) != len(names):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            raise ProtocolError(f"tensors listed twice: {', '.join(twice[:5])}.", part=_PART)
        if self.sections and (self.whole_tensors or sum(self.sections) != len(self.specs)):
            raise ProtocolError("its sections are not what it consists of.", part=_PART)
        if self.total_bytes >= _LIMIT:
            raise ProtocolError("its tensors have more bytes than can be counted.", part=_PART)
        if self.codec == CODEC_DELTA:
            self._check_delta()
        elif self.segments or self.base_version is not None or self.base_identity:
            raise ProtocolError(f"codec {self.codec} has no base and no segments.", part=_PART)

    def _check_delta(self) -> None:
        if self.base_version is None or not self.base_identity or self.base_version >= self.version:
            raise ProtocolError(f"a delta of version {self.version} without an older base.", part=_PART)
        boxes: dict[int, list[Box]] = defaultdict(list)
        for segment in self.segments:
            known = segment.tensor < len(self.specs) and len(segment.box.starts) == len(segment.box.shape)
            if not known or not segment.nbytes or not segment.box.fits(self.specs[segment.tensor].shape):
                raise ProtocolError(f"segment {segment.to_plain()} is of no tensor.", part=_PART)
            boxes[segment.tensor].append(segment.box)
        for number, spec in enumerate(self.specs):
            numel = sum(box.numel for box in boxes[number])
            if numel != spec.numel or overlap(boxes[number]):
                raise ProtocolError(f"the segments of {spec.name} are not each of its elements once.", part=_PART)
        if self.wire_bytes >= _LIMIT:
            raise ProtocolError("its segments have more bytes than can be counted.", part=_PART)

    def as_version(self, version: int, identity: str) -> Manifest:
        """Another version that is sent in full in the same way; what was worked out about this one holds for it, too."""
        assert not self.is_delta
        if not self.plan:
            _ = self._plain_specs  # worked out here, it is shared by every version
        other = copy(self)
        other.__dict__.update(version=version, identity=identity)
        return other

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the checkpoint that it is a version of."""
        return self.specs if self.slicing is None else self.slicing.specs

    @property
    def plan(self) -> str:
        """Digest of the transfer plan; empty without one."""
        return "" if self.slicing is None else self.slicing.plan

    @cached_property
    def regions(self) -> tuple[TensorSlice, ...]:
        """What each tensor of the stream is."""
        if self.slicing is not None:
            return self.slicing.regions
        return tuple(TensorSlice(spec, Box.whole(spec.shape)) for spec in self.specs)

    @property
    def is_delta(self) -> bool:
        """Whether it applies to a base."""
        return self.codec == CODEC_DELTA

    @cached_property
    def wire_bytes(self) -> int:
        """What crosses the wire: the stream, or a delta's segments."""
        return sum(segment.nbytes for segment in self.segments) if self.is_delta else self.total_bytes

    @property
    def _cut_between_tensors(self) -> bool:
        return self.whole_tensors and not self.is_delta

    @cached_property
    def entries(self) -> tuple[StreamEntry, ...]:
        """Every tensor with its place in the stream, in the stream's order."""
        if self.whole_tensors:
            return tuple(chain.from_iterable(self._files))
        entries, offset = [], 0
        for spec in self.specs:
            entries.append(StreamEntry(spec, offset))
            offset += _aligned(spec.nbytes)
        return tuple(entries)

    @cached_property
    def _files(self) -> tuple[tuple[StreamEntry, ...], ...]:
        """The tensors of each file; with `whole_tensors` only."""
        files: list[tuple[StreamEntry, ...]] = []
        current: list[StreamEntry] = []
        start = offset = 0
        for spec in sorted(self.specs, key=lambda spec: -spec.dtype.itemsize):
            if offset > start and spec.nbytes and offset - start + spec.nbytes > self.bucket_bytes:
                files.append(tuple(current))
                current = []
                start = offset = _aligned(offset)
            current.append(StreamEntry(spec, offset))
            offset += spec.nbytes
        return (*files, tuple(current)) if current else ()

    @cached_property
    def total_bytes(self) -> int:
        """Length of the stream, alignment gaps included."""
        return max((entry.end for entry in self.entries), default=0)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each of `specs` in the stream."""
        where = {entry.spec.name: entry.offset for entry in self.entries}
        return tuple(where[spec.name] for spec in self.specs)

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        """First byte and one past the last byte on the wire of each section."""
        if not self.sections:
            return [(0, self.wire_bytes)]
        firsts = [0, *accumulate(self.sections)]
        if not self.is_delta:
            return [
                (self.entries[first].offset, self.entries[last - 1].end) if first < last else (0, 0)
                for first, last in pairwise(firsts)
            ]
        sizes = [0] * len(self.sections)
        for segment in self.segments:
            sizes[bisect_right(firsts, segment.tensor) - 1] += segment.nbytes
        return list(pairwise([0, *accumulate(sizes)]))

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """As `_bounds`, of what is cut into buckets by itself: sections, or with `whole_tensors` files."""
        if self._cut_between_tensors:
            return [(tensors[0].offset, tensors[-1].end) for tensors in self._files]
        return self._bounds

    @cached_property
    def _firsts(self) -> list[int]:
        """The first bucket of each run, and one past the last of all."""
        least = int(self._cut_between_tensors)  # a file of empty tensors has a bucket, too
        return [0, *accumulate(max(least, -(-(stop - start) // self.bucket_bytes)) for start, stop in self._runs)]

    @property
    def bucket_count(self) -> int:
        """How many buckets there are; 0 when there is no tensor, or with fixed windows no byte."""
        return self._firsts[-1]

    def window(self, index: int) -> tuple[int, int]:
        """First byte and one past the last byte of bucket `index` in the stream, or in a delta's segments."""
        run = self._run_of(index)
        first, stop = self._runs[run]
        start = first + (index - self._firsts[run]) * self.bucket_bytes
        return start, min(start + self.bucket_bytes, stop)

    def part(self, index: int) -> FilePart | None:
        """Which part of a file bucket `index` is; None if it has one of its own, or none."""
        run = self._run_of(index)
        first, last = self._firsts[run], self._firsts[run + 1]
        if not self._cut_between_tensors or last - first == 1:
            return None
        start, stop = self._runs[run]
        return FilePart(first, self.window(index)[0] - start, stop - start)

    def _run_of(self, index: int) -> int:
        return min(bisect_right(self._firsts, index), len(self._runs)) - 1

    @property
    def section_count(self) -> int:
        """How many sections there are."""
        return len(self._bounds)

    def bounds_of(self, section: int) -> tuple[int, int]:
        """First byte and one past the last byte of a section in the stream, or in a delta's segments."""
        return self._bounds[section]

    def buckets_of(self, section: int) -> range:
        """The buckets of a section, in order."""
        if self._cut_between_tensors:
            return range(self.bucket_count)
        return range(self._firsts[section], self._firsts[section + 1])

    def only(self, sections: Sequence[int]) -> Manifest:
        """Of those sections alone, which keep their order."""
        firsts = [0, *accumulate(self.sections)]
        chosen = [number for section in sections for number in range(firsts[section], firsts[section + 1])]
        moved = {number: place for place, number in enumerate(chosen)}
        slicing = self.slicing
        if slicing is not None:
            slicing = replace(slicing, regions=tuple(slicing.regions[number] for number in chosen))
        return replace(
            self,
            slicing=slicing,
            specs=tuple(self.specs[number] for number in chosen),
            sections=tuple(self.sections[section] for section in sections),
            segments=tuple(
                replace(segment, tensor=moved[segment.tensor]) for segment in self.segments if segment.tensor in moved
            ),
        )

    def pieces(self, start: int, stop: int) -> Iterator[tuple[StreamEntry, int, int]]:
        """Which bytes of which tensors lie in the window [`start`, `stop`) of the stream: first byte and one past the last."""
        for entry in self.entries[max(0, bisect_right(self._ends, start)) :]:
            if entry.offset >= stop:
                return
            low, high = max(entry.offset, start), min(entry.end, stop)
            if low < high:
                yield entry, low, high

    @cached_property
    def _ends(self) -> list[int]:
        return [entry.end for entry in self.entries]

    @cached_property
    def largest_bucket_bytes(self) -> int:
        """Payload bytes of the largest bucket."""
        return min(self.bucket_bytes, max((stop - start for start, stop in self._runs), default=0))

    @property
    def files(self) -> dict[int, tuple[StreamEntry, ...]]:
        """The tensors of each file, back to back, by its first bucket; `ProtocolError` for buckets of fixed size."""
        if not self._cut_between_tensors:
            raise ProtocolError("buckets of fixed size are not kept as files of whole tensors.", part=_PART)
        return dict(zip(self._firsts, self._files, strict=False))

    @cached_property
    def layout_digest(self) -> str:
        """Names, shapes, dtypes and the cut in 16 hexadecimal digits: equal for two versions that pack alike."""
        cut = [self.bucket_bytes, self.whole_tensors, self.sections]
        plain = [*cut, self.codec, self.plan, [spec.to_plain() for spec in self.specs]]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]

    def to_plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": self.version,
            "codec": self.codec,
            "base_version": self.base_version,
            "bucket_bytes": self.bucket_bytes,
            "whole_tensors": self.whole_tensors,
            "checksummed": self.checksummed,
            "lasting": self.lasting,
            "quantised": self.quantised,
            "identity": self.identity,
            "base_identity": self.base_identity,
            "segments": [segment.to_plain() for segment in self.segments],
            "plan": self.plan,
            "tensors": [] if self.plan else self._plain_specs,
        }

    def views(self, stream: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor by name, as a view of the version's stream (1-D uint8, `total_bytes` long)."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        views: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            dtype = entry.spec.dtype
            if (flat := typed.get(dtype)) is None:
                whole = stream.numel() // dtype.itemsize * dtype.itemsize
                flat = typed[dtype] = stream[:whole].view(dtype)
            shape, first = entry.spec.shape, flat.storage_offset() + entry.offset // dtype.itemsize
            views[entry.spec.name] = flat.as_strided(shape, entry.spec.strides, first)
        return views

    @cached_property
    def _plain_specs(self) -> list[list[Any]]:
        return [spec.to_plain() for spec in self.specs]

    @classmethod
    def from_plain(cls, plain: Any, like: Manifest | None = None) -> Manifest:
        """Parse what a peer sent; `ProtocolError` for anything that is not a manifest.

        It is quicker if its tensors are those of another manifest, `like`. If it is of a transfer plan, `like` has to be, too.
        """
        planned = str(plain.get("plan", "")) if isinstance(plain, dict) else ""
        if planned and (like is None or planned != like.plan):
            raise ProtocolError(
                f"the version is sent by transfer plan {planned[:40]!r}, here it is {like.plan if like else 'none'!r}.",
                part=_PART,
                hint="Run one release of weightlane on all ranks.",
            )
        known = bool(planned)
        if like is not None and not planned and not like.plan and isinstance(plain, dict):
            known = plain.get("tensors") == like._plain_specs
        try:
            wire = _ManifestOnWire.model_validate(plain | {"tensors": []} if known else plain)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ProtocolError(f"not a valid manifest: {where}: {first['msg']}.", part=_PART) from None
        if known and like is not None and not like.is_delta and wire.is_in_full and wire.is_cut_as(like):
            return like.as_version(wire.version, wire.identity)
        specs: tuple[TensorSpec, ...]
        if known and like is not None:
            specs = like.specs
        else:
            specs = tuple(TensorSpec(name, tuple(shape), dtype_of(dtype)) for name, shape, dtype in wire.tensors)
        made = cls(
            wire.version,
            specs,
            wire.bucket_bytes,
            wire.codec,
            wire.base_version,
            wire.whole_tensors,
            wire.checksummed,
            wire.lasting,
            wire.identity,
            wire.base_identity,
            tuple(map(DeltaSegment.from_plain, wire.segments)),
            wire.quantised,
            like.slicing if planned and like is not None else None,
            like.sections if planned and like is not None else (),
        )
        if not planned:
            made.__dict__["_plain_specs"] = plain["tensors"]  # the next version's are most often the same objects
        return made


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
