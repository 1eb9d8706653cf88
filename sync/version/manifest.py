"""The manifest: the description of one weight version that every receiver checks before the first byte.

The tensors of a version form one *stream*: the row-major bytes of every tensor at an aligned offset, in the manifest's order.
A bucket is a window of the stream. There are two layouts:

- *Fixed windows*: every bucket but the last has the same size. Large tensors span buckets, and small tensors share one.
- *Whole tensors*, for engines whose files other tools read: a file holds as many complete tensors as fit into one bucket. A
  larger tensor has a file of several buckets. The safetensors format allows no gaps, so tensors lie back to back inside a file.
  They are still aligned to their element size, because the tensors of a version are sorted by element size, largest first.

Offsets are computed from names, shapes and dtypes, so they are not sent.

A stream from several senders to different receivers consists of *sections*, one for each lane; no bucket spans two sections.
The "tensors" of such a stream are slices. Every participant computes the same transfer plan, so an offered version has the plan's
digest in the place of its tensors.

The codec *dense* sends the stream itself. The codec *delta* sends the difference from a version that the receivers have:
*segments* back to back, each the delta of a slice of one tensor, cut into fixed windows.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from weightlane.ckpt_engines import FilePart, ProtocolError

from .box import Box, overlap, row_major_strides
from .manifest_message import LIMIT, DeltaSegment, ManifestMessage
from .sliced_tensors import SlicedTensors, Slicing
from .tensor_spec import StreamEntry, TensorSlice, TensorSpec

ALIGNMENT_BYTES = 64
"""Every tensor (with `whole_tensors`: every file) starts at a multiple of this, which is enough for a view of any dtype."""

CODEC_DENSE = "dense"
CODEC_DELTA = "delta"
_PART = "manifest"
_SENT_FIELDS = (
    *("version", "codec", "base_version", "bucket_bytes", "whole_tensors"),
    *("checksummed", "lasting", "quantised", "identity", "base_identity"),
)
"""Fields that are sent unchanged."""


@dataclass(frozen=True)
class Manifest:
    """Names, shapes, dtypes, codec and bucket size of one version."""

    version: int
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    """Payload bytes of every bucket but the last (with `whole_tensors`: the upper limit); a multiple of `ALIGNMENT_BYTES`."""
    codec: str = CODEC_DENSE
    base_version: int | None = None
    """The version that a delta applies to; None for the dense codec."""
    whole_tensors: bool = False
    """Whether the version is laid out in files of complete tensors."""
    checksummed: bool = True
    """Whether every bucket has a checksum, which receivers verify."""
    lasting: bool = False
    """Whether buckets stay in the sender's memory until receivers release them, so that receivers may read them there."""
    identity: str = ""
    """Name of this publication, unique over all publishers; empty if no delta will be based on it."""
    base_identity: str = ""
    """The `identity` of the version that a delta applies to."""
    segments: tuple[DeltaSegment, ...] = ()
    """The parts of a delta in the order of the wire; empty for the dense codec."""
    quantised: str = ""
    """Format of linear weights, ``"fp8"``; empty if none are quantised.

    See `weightlane.sync.codecs.quantised.quantisation`.
    """
    slicing: Slicing | None = None
    """The slices that `specs` stand for; None if `specs` are complete tensors."""
    sections: tuple[int, ...] = ()
    """Number of `specs` in each section; empty for a stream of one section."""

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
            raise ProtocolError(f"{len(self.specs)} tensors are not what its sections hold.", part=_PART)
        if self.codec == CODEC_DELTA:
            self._check_delta()
        elif self.segments or self.base_version is not None or self.base_identity:
            raise ProtocolError(f"codec {self.codec} has no base and no segments.", part=_PART)
        if max(self.total_bytes, self.wire_bytes) >= LIMIT:
            raise ProtocolError(
                f"the version has {max(self.total_bytes, self.wire_bytes)} bytes, not below {LIMIT}.", part=_PART
            )

    def _check_delta(self) -> None:
        if self.base_version is None or not self.base_identity or self.base_version >= self.version:
            raise ProtocolError(f"a delta of version {self.version} without an older base.", part=_PART)
        boxes: dict[int, list[Box]] = defaultdict(list)
        for segment in self.segments:
            known = segment.tensor < len(self.specs) and len(segment.box.starts) == len(segment.box.shape)
            if not known or not segment.nbytes or not segment.box.fits(self.specs[segment.tensor].shape):
                raise ProtocolError(f"segment {segment.to_plain()} is no slice of a tensor.", part=_PART)
            boxes[segment.tensor].append(segment.box)
        for number, spec in enumerate(self.specs):
            numel = sum(box.numel for box in boxes[number])
            if numel != spec.numel or overlap(boxes[number]):
                raise ProtocolError(f"the segments of {spec.name} do not hold every element once.", part=_PART)

    def as_version(self, version: int, identity: str) -> Manifest:
        """The manifest of another dense version with the same layout. It shares the cached properties of this one."""
        assert not self.is_delta
        _ = self._first_buckets, self._places, self.whole_order  # every version needs them: computed once, for all
        other = copy(self)
        other.__dict__.update(version=version, identity=identity)
        return other

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the checkpoint."""
        return self.specs if self.slicing is None else self.slicing.specs

    @property
    def plan(self) -> str:
        """Digest of the transfer plan; empty without a plan."""
        return "" if self.slicing is None else self.slicing.plan

    @cached_property
    def regions(self) -> tuple[TensorSlice, ...]:
        """For each tensor of the stream, the slice of a checkpoint tensor that it is."""
        if self.slicing is not None:
            return self.slicing.regions
        return tuple(TensorSlice(spec, Box.whole(spec.shape)) for spec in self.specs)

    @property
    def is_delta(self) -> bool:
        """Whether the version is sent as a delta."""
        return self.codec == CODEC_DELTA

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes on the wire: the length of the stream, or of a delta's segments."""
        return sum(segment.nbytes for segment in self.segments) if self.is_delta else self.total_bytes

    @property
    def _has_files(self) -> bool:
        return self.whole_tensors and not self.is_delta

    @cached_property
    def entries(self) -> tuple[StreamEntry, ...]:
        """Every tensor with its offset, in the stream's order."""
        if self.whole_tensors:
            return tuple(chain.from_iterable(self._files))
        entries, offset = [], 0
        for spec in self.specs:
            entries.append(StreamEntry(spec, offset))
            offset += aligned(spec.nbytes)
        return tuple(entries)

    @cached_property
    def _files(self) -> tuple[tuple[StreamEntry, ...], ...]:
        """The tensors of each file, for `whole_tensors` only."""
        files: list[tuple[StreamEntry, ...]] = []
        current: list[StreamEntry] = []
        start = offset = 0
        for spec in sorted(self.specs, key=lambda spec: -spec.dtype.itemsize):
            if offset > start and spec.nbytes and offset - start + spec.nbytes > self.bucket_bytes:
                files.append(tuple(current))
                current = []
                start = offset = aligned(offset)
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
    def bounds(self) -> list[tuple[int, int]]:
        """First byte and one past the last byte of each section in the stream, or in a delta's segments."""
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
    def _spans(self) -> list[tuple[int, int]]:
        """First byte and one past the last byte of each span that is cut into buckets: a section or a file."""
        if self._has_files:
            return [(tensors[0].offset, tensors[-1].end) for tensors in self._files]
        return self.bounds

    @cached_property
    def _first_buckets(self) -> list[int]:
        """The first bucket of each span, and one past the last bucket of all."""
        least = int(self._has_files)  # a file of empty tensors has a bucket, too
        return [0, *accumulate(max(least, -(-(stop - start) // self.bucket_bytes)) for start, stop in self._spans)]

    @property
    def bucket_count(self) -> int:
        """Number of buckets; 0 without tensors, or in fixed windows without a byte."""
        return self._first_buckets[-1]

    def window(self, index: int) -> tuple[int, int]:
        """First byte and one past the last byte of bucket `index` in the stream, or in a delta's segments."""
        span = self._span_of(index)
        first, stop = self._spans[span]
        start = first + (index - self._first_buckets[span]) * self.bucket_bytes
        return start, min(start + self.bucket_bytes, stop)

    def part(self, index: int) -> FilePart | None:
        """The part of a file that bucket `index` is; None if the bucket is a complete file, or belongs to none."""
        span = self._span_of(index)
        first, last = self._first_buckets[span], self._first_buckets[span + 1]
        if not self._has_files or last - first == 1:
            return None
        start, stop = self._spans[span]
        return FilePart(first, self.window(index)[0] - start, stop - start)

    def _span_of(self, index: int) -> int:
        return min(bisect_right(self._first_buckets, index), len(self._spans)) - 1

    def buckets_of(self, section: int) -> range:
        """The buckets of a section, in order."""
        if self._has_files:
            return range(self.bucket_count)
        return range(self._first_buckets[section], self._first_buckets[section + 1])

    def only(self, sections: Sequence[int]) -> Manifest:
        """The manifest of only these sections, in the order of `sections`."""
        if not self.sections:
            return self
        firsts = [0, *accumulate(self.sections)]
        chosen = [old for section in sections for old in range(firsts[section], firsts[section + 1])]
        renumbered = {old: new for new, old in enumerate(chosen)}
        slicing = self.slicing
        if slicing is not None:
            slicing = replace(slicing, regions=tuple(slicing.regions[old] for old in chosen))
        segments = (
            replace(segment, tensor=renumbered[segment.tensor])
            for segment in self.segments
            if segment.tensor in renumbered
        )
        return replace(
            self,
            slicing=slicing,
            specs=tuple(self.specs[old] for old in chosen),
            sections=tuple(self.sections[section] for section in sections),
            segments=tuple(segments),
        )

    def tensors_within(self, start: int, stop: int) -> Iterator[tuple[StreamEntry, int, int]]:
        """Yield the tensors in the stream window [`start`, `stop`), each with its first byte there and one past its last."""
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
        return min(self.bucket_bytes, max((stop - start for start, stop in self._spans), default=0))

    @property
    def files(self) -> dict[int, tuple[StreamEntry, ...]]:
        """The tensors of each file, by the file's first bucket. Raises `ProtocolError` if buckets are fixed windows."""
        if not self._has_files:
            raise ProtocolError("buckets of fixed size are not kept as files of whole tensors.", part=_PART)
        return dict(zip(self._first_buckets, self._files, strict=False))

    @cached_property
    def layout_digest(self) -> str:
        """16 hexadecimal digits, equal for two versions whose tensors lie in the same buckets at the same offsets."""
        buckets = [self.bucket_bytes, self.whole_tensors, self.sections]
        # The empty string was a plan's digest, which stored versions never had: theirs are still the same.
        plain = [*buckets, self.codec, "", [spec.to_plain() for spec in self.specs]]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]

    def to_plain(self) -> dict[str, Any]:
        """The manifest as JSON, with every tensor of the stream."""
        return self._sent_fields | {"tensors": [spec.to_plain() for spec in self.specs]}

    def to_offer(self) -> dict[str, Any]:
        """The manifest as JSON for a receiver that has computed the same plan, and so knows the tensors."""
        return self._sent_fields | {"plan": self.plan}

    @property
    def _sent_fields(self) -> dict[str, Any]:
        return _sent_fields_of(self) | {"segments": [segment.to_plain() for segment in self.segments]}

    def views(self, stream: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of every tensor, by name, into the version's `stream` (1-D uint8, `total_bytes` long)."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        views: dict[str, torch.Tensor] = {}
        for name, dtype, shape, strides, first in self._places:
            if (flat := typed.get(dtype)) is None:
                whole = stream.numel() // dtype.itemsize * dtype.itemsize
                flat = typed[dtype] = stream[:whole].view(dtype)
            views[name] = flat.as_strided(shape, strides, flat.storage_offset() + first)
        return views

    @cached_property
    def _places(self) -> list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """Name, dtype, shape and strides of every tensor of the stream, and its first element there, in its own dtype."""
        return [
            (spec.name, spec.dtype, spec.shape, row_major_strides(spec.shape), offset // spec.dtype.itemsize)
            for spec, offset in zip(self.specs, self.offsets, strict=True)
        ]

    @cached_property
    def whole_order(self) -> list[str]:
        """The tensors of the checkpoint in its order, if the version is sent in slices that are whole tensors; else empty."""
        order = [spec.name for spec in self.tensors]
        return order if self.slicing is not None and {spec.name for spec in self.specs} == set(order) else []

    def loaded(self, staged: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of the checkpoint, from those of the stream. They are assembled on access if they arrived in slices."""
        if self.slicing is None:
            return staged
        if self.whole_order:
            return {name: staged[name] for name in self.whole_order}
        return SlicedTensors(self.slicing, staged)

    @classmethod
    def from_plain(cls, plain: Any) -> Manifest:
        """The inverse of `to_plain`; raises `ProtocolError` for anything that is not a manifest."""
        message = ManifestMessage.parse(plain)
        return cls(specs=message.specs, segments=message.delta_segments, **_sent_fields_of(message))

    def offered(self, plain: Any) -> Manifest:
        """The manifest of a version in this layout, from a peer's `to_offer`.

        Raises `ProtocolError` for anything else, also for a version of another plan or layout.
        """
        message = ManifestMessage.parse(plain)
        fields = _sent_fields_of(message)
        if message.plan != self.plan:
            raise ProtocolError(
                f"the version is sent by transfer plan {message.plan[:40]!r}, here it is {self.plan!r}.",
                part=_PART,
                hint="Run one release of weightlane on all ranks.",
            )
        if message.codec == CODEC_DELTA:
            return replace(self, segments=message.delta_segments, **fields)
        version = self.as_version(message.version, message.identity)
        if message.segments or _sent_fields_of(version) != fields:
            raise ProtocolError("the version has another layout than its transfer plan.", part=_PART)
        return version


def _sent_fields_of(manifest: Manifest | ManifestMessage) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in _SENT_FIELDS}


def aligned(nbytes: int, to: int = ALIGNMENT_BYTES) -> int:
    """`nbytes`, rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to
