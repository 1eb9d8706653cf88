"""The manifest: what one weight version consists of, known to every receiver before the first byte.

The tensors of a version form one *stream*: each tensor's row-major bytes at an aligned offset, in the order of the manifest.
A bucket is a window on that stream, cut in one of two ways:

- *Fixed* windows: every bucket but the last has the same size. Large tensors span buckets, small ones share them.
- *Whole tensors*, for engines whose buckets other tools shall read: a bucket holds as many whole tensors as fit, and a larger
  tensor is a bucket of its own. Inside a bucket tensors lie back to back, because the safetensors format allows no gaps; each
  is aligned to its element size nevertheless, since the stream begins with the tensors of the widest elements.

Empty and scalar tensors need no rule of their own. Offsets follow from names, shapes and dtypes, so they are not transmitted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from weightlane.ckpt_engines import ProtocolError

from .tensor_spec import TensorSpec, dtype_of

ALIGNMENT_BYTES = 64
"""Every tensor, or with whole tensors every bucket, starts at a multiple of this: enough for any dtype view."""

CODEC_DENSE = "dense"
_PART = "manifest"
_LIMIT = 2**63
"""Versions, sizes and offsets are signed 64-bit numbers in torch."""


class _ManifestOnWire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Annotated[int, Field(ge=0, lt=_LIMIT)]
    codec: Literal["dense"]
    base_version: None
    bucket_bytes: Annotated[int, Field(gt=0, lt=_LIMIT)]
    whole_tensors: bool = False
    sealed: bool = True
    lasting: bool = False
    # JSON has lists only, which strict mode would not take for tuples.
    tensors: list[
        Annotated[
            tuple[str, Annotated[list[Annotated[int, Field(ge=0, lt=_LIMIT)]], Field(max_length=64)], str],
            Strict(strict=False),
        ]
    ]


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


@dataclass(frozen=True)
class Manifest:
    """Names, shapes, dtypes, codec and bucket size of one version."""

    version: int
    specs: tuple[TensorSpec, ...]
    bucket_bytes: int
    """Payload bytes of every bucket but the last, a multiple of `ALIGNMENT_BYTES`; with `whole_tensors` what a bucket may
    have unless one tensor alone has more."""
    codec: str = CODEC_DENSE
    base_version: int | None = None
    """The version a delta applies to; None for the dense codec."""
    whole_tensors: bool = False
    """Whether buckets are cut between tensors."""
    sealed: bool = True
    """Whether every bucket has a seal, which receivers verify."""
    lasting: bool = False
    """Whether receivers may look at the buckets where they lie until they say that they are done."""

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
        if self.total_bytes >= _LIMIT:
            raise ProtocolError("its tensors have more bytes than can be counted.", part=_PART)

    @cached_property
    def entries(self) -> tuple[StreamEntry, ...]:
        """Every tensor with its place in the stream, in the stream's order."""
        if self.whole_tensors:
            return tuple(chain.from_iterable(self._buckets))
        entries, offset = [], 0
        for spec in self.specs:
            entries.append(StreamEntry(spec, offset))
            offset += _aligned(spec.nbytes)
        return tuple(entries)

    @cached_property
    def _buckets(self) -> tuple[tuple[StreamEntry, ...], ...]:
        """The tensors of each bucket; with `whole_tensors` only."""
        buckets: list[tuple[StreamEntry, ...]] = []
        current: list[StreamEntry] = []
        start = offset = 0
        for spec in sorted(self.specs, key=lambda spec: -spec.dtype.itemsize):
            if offset > start and spec.nbytes and offset - start + spec.nbytes > self.bucket_bytes:
                buckets.append(tuple(current))
                current = []
                start = offset = _aligned(offset)
            current.append(StreamEntry(spec, offset))
            offset += spec.nbytes
        return (*buckets, tuple(current)) if current else ()

    @cached_property
    def total_bytes(self) -> int:
        """Length of the stream, alignment gaps included."""
        return max((entry.end for entry in self.entries), default=0)

    @property
    def bucket_count(self) -> int:
        """How many buckets carry the stream; 0 when there is no tensor, or with fixed windows no byte."""
        return len(self._buckets) if self.whole_tensors else -(-self.total_bytes // self.bucket_bytes)

    def window(self, index: int) -> tuple[int, int]:
        """First byte and one past the last byte of bucket `index` in the stream."""
        if self.whole_tensors:
            tensors = self._buckets[index]
            return tensors[0].offset, tensors[-1].end
        start = index * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)

    @cached_property
    def largest_bucket_bytes(self) -> int:
        """Payload bytes of the largest bucket."""
        if self.whole_tensors:
            return max((tensors[-1].end - tensors[0].offset for tensors in self._buckets), default=0)
        return min(self.bucket_bytes, self.total_bytes)

    def tensors_of(self, index: int) -> tuple[StreamEntry, ...]:
        """The tensors of bucket `index`, back to back; `ProtocolError` unless buckets hold whole tensors."""
        if not self.whole_tensors:
            raise ProtocolError("buckets of fixed size do not hold whole tensors.", part=_PART)
        return self._buckets[index]

    @cached_property
    def layout_digest(self) -> str:
        """Names, shapes, dtypes and the cut in 16 hexadecimal digits: equal for two versions that pack alike."""
        plain = [self.bucket_bytes, self.whole_tensors, self.codec, [spec.to_plain() for spec in self.specs]]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]

    def to_plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": self.version,
            "codec": self.codec,
            "base_version": self.base_version,
            "bucket_bytes": self.bucket_bytes,
            "whole_tensors": self.whole_tensors,
            "sealed": self.sealed,
            "lasting": self.lasting,
            "tensors": [spec.to_plain() for spec in self.specs],
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Manifest:
        """Parse what a peer sent; `ProtocolError` for anything that is not a manifest."""
        try:
            wire = _ManifestOnWire.model_validate(plain)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ProtocolError(f"not a valid manifest: {where}: {first['msg']}.", part=_PART) from None
        specs: Sequence[TensorSpec] = [
            TensorSpec(name, tuple(shape), dtype_of(dtype)) for name, shape, dtype in wire.tensors
        ]
        return cls(
            wire.version,
            tuple(specs),
            wire.bucket_bytes,
            wire.codec,
            wire.base_version,
            wire.whole_tensors,
            wire.sealed,
            wire.lasting,
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
