"""Tensors and shards: name, shape and dtype of a tensor, and the slices of it that a trainer rank holds."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightlane.ckpt_engines import ManifestError, ProtocolError

from .box import Box

_PART = "publisher"

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Every dtype that can be sent, by its name in the safetensors format (https://huggingface.co/docs/safetensors)."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: ``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(dtype): dtype for dtype in SAFETENSORS_DTYPES.values()}


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name: ``"bfloat16"`` -> ``torch.bfloat16``. Raises `ProtocolError` for an unknown name."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ProtocolError(
            f"unknown tensor dtype {name!r}.", part="manifest", hint=f"Known: {', '.join(_DTYPES)}."
        ) from None


_ALWAYS_FLOAT32 = (".e_score_correction_bias",)
"""Name endings of tensors that transformers and vLLM keep in float32 in a model of any dtype: a narrower dtype would change
which experts are chosen."""


def kept_in_float32(stored: Mapping[str, torch.dtype]) -> frozenset[str]:
    """Names of the tensors that stay float32 when the model is sent, or written, in a narrower dtype.

    If at most half of a checkpoint's floating-point tensors are float32, all of these. Otherwise only those with the name endings
    of `_ALWAYS_FLOAT32`.

    Args:
        stored: The dtype of every tensor on disk.
    """
    wide = {name for name, dtype in stored.items() if dtype == torch.float32}
    if 2 * len(wide) > sum(dtype.is_floating_point for dtype in stored.values()):
        wide = {name for name in wide if name.endswith(_ALWAYS_FLOAT32)}
    return frozenset(wide)


_COMPUTED = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Name endings of tensors that are computed from a model's config. vLLM's `AutoWeightsLoader` skips the same ones."""


def is_computed(name: str) -> bool:
    """Whether `name` is a buffer of rotary position embeddings. It is no weight, but old checkpoints and some trainers have it.

    A receiver's model computes such a buffer itself, so a version needs none.
    """
    return name.endswith(_COMPUTED)


INTEGERS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""torch's integer dtypes by size in bytes. They are signed because torch compares and moves those on every device."""


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, 1-D.

    torch reports a single element as contiguous with any stride, but views it as bytes only if the stride is 1.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def renamed(sent: Collection[str], expected: Collection[str]) -> dict[str, str]:
    """The expected name of each tensor that is `sent` under another name, if the names differ by one prefix.

    The files of a base model (GPT-2's ``wte.weight``) lack the prefix that its tensors have within the full model
    (``transformer.wte.weight``).

    >>> renamed(["transformer.wte.weight", "lm_head.weight"], ["wte.weight", "lm_head.weight"])
    {'transformer.wte.weight': 'wte.weight'}
    """
    given, known = set(sent), set(expected)
    strangers = [name for name in sent if name not in known]
    missing = [name for name in expected if name not in given]
    fewer = _without_prefix(strangers, missing)
    more = {name: own for own, name in _without_prefix(missing, strangers).items()}
    return max(fewer, more, key=len)


def _without_prefix(names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """The names that equal one of `others` after the most frequent prefix, each with that other name."""
    wanted = set(others)
    cuts: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        for dot in re.finditer(r"\.", name):
            if (rest := name[dot.end() :]) in wanted:
                cuts[name[: dot.end()]][name] = rest
    return max(cuts.values(), key=len, default={})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One checkpoint tensor: its Hugging Face name, its full shape, and its dtype on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""
        return self.numel * self.dtype.itemsize

    def stands_for(self, other: TensorSpec) -> bool:
        """Whether `other` has the same name and shape, and the same dtype or another floating-point dtype."""
        return (self.name, self.shape) == (other.name, other.shape) and (
            self.dtype == other.dtype or (self.dtype.is_floating_point and other.dtype.is_floating_point)
        )

    def to_plain(self) -> list[Any]:
        """The spec as JSON: ``[name, [sizes], dtype]``."""
        return [self.name, list(self.shape), dtype_name(self.dtype)]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A slice of a tensor."""

    spec: TensorSpec
    """The tensor."""
    box: Box
    """The slice."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.box.numel

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""
        return self.numel * self.spec.dtype.itemsize

    @property
    def as_tensor(self) -> TensorSpec:
        """The slice as a tensor of a stream, named ``tensor[first:last,...]``; a full tensor keeps its name."""
        if self.box == Box.whole(self.spec.shape):
            return self.spec
        where = ",".join(f"{start}:{stop}" for start, stop in zip(self.box.starts, self.box.stops, strict=True))
        return TensorSpec(f"{self.spec.name}[{where}]", self.box.shape, self.spec.dtype)


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """A tensor and its offset in the stream."""

    spec: TensorSpec
    offset: int
    """First byte in the stream."""

    @property
    def end(self) -> int:
        """One past the last byte in the stream."""
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class LiveTensor:
    """A trainer's parameter or buffer, with the memory that its shards are views of."""

    name: str
    """Name of the parameter or buffer, for errors."""
    memory: torch.Tensor
    """This rank's part of the tensor when the shards were made."""
    now: Callable[[], torch.Tensor | None]
    """Returns this rank's current part of the tensor; None if the trainer has no such tensor any more."""

    def check(self) -> None:
        """Raise `ManifestError` if the trainer's tensor is now in other memory, or its memory is offloaded."""
        current = self.now()
        if current is None or place_of(current) != place_of(self.memory):
            raise ManifestError(
                f"{self.name} is in other memory than when its shards were made, which still hold its old values.",
                part=_PART,
                hint="Something replaced it: merging adapters, model.to(), loading, or an assignment to .data. Make the shards"
                " and the publisher again, or copy in place: parameter.data.copy_(values).",
            )
        if current.numel() and not current.untyped_storage().nbytes():
            raise ManifestError(
                f"{self.name} has no memory: it is offloaded.", part=_PART, hint="Bring the parameters back first."
            )


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A slice of one checkpoint tensor that a trainer rank holds.

    `data` is the live local tensor in the trainer's dtype, with the slice's shape and any strides: rows or columns of a linear
    layer, the query heads of a fused parameter, or no elements. It is read between ``publish`` and the fence; afterwards its
    values may change, but not its storage. A rank may hold several slices of a tensor that do not overlap. Several ranks may hold
    the same elements, which must then be equal.

    Raises `ManifestError` if `data` is no slice of the tensor, or if only one of the two has a floating-point dtype.
    """

    spec: TensorSpec
    starts: tuple[int, ...]
    """First index of the slice, by dimension of the tensor."""
    data: torch.Tensor
    live: tuple[LiveTensor, ...] = field(default=(), repr=False, compare=False)
    """The trainer's tensors behind `data`, if known. Every `publish` checks that `data` is still the trained memory."""

    def __post_init__(self) -> None:
        """Check shape and dtype."""
        shape, name = tuple(self.data.shape), self.spec.name
        if len(shape) != len(self.starts) or not self.box.fits(self.spec.shape):
            at = f" at {self.starts}" if any(self.starts) else ""
            raise ManifestError(
                f"a tensor of shape {shape}{at} is no slice of {name}, whose shape is {self.spec.shape}.",
                part=_PART,
                hint="A slice has the tensor's own dimensions, in its order.",
            )
        if self.data.is_floating_point() != self.spec.dtype.is_floating_point:
            raise ManifestError(
                f"{name} was declared {dtype_name(self.spec.dtype)}, and its data is {dtype_name(self.data.dtype)}.",
                part=_PART,
                hint="Only floating-point types are converted into one another.",
            )

    @classmethod
    def whole(cls, spec: TensorSpec, data: torch.Tensor) -> LocalShard:
        """A shard that is a full tensor. Raises `ManifestError` unless `data` has the tensor's shape."""
        if tuple(data.shape) != spec.shape:
            raise ManifestError(
                f"{spec.name} has shape {spec.shape}, and its data {tuple(data.shape)}.",
                part=_PART,
                hint="Give the tensor as the checkpoint has it; a transposed or flattened one would arrive scrambled.",
            )
        return cls(spec, (0,) * len(spec.shape), data)

    @classmethod
    def nothing(cls, spec: TensorSpec, data: torch.Tensor) -> LocalShard:
        """A shard without elements on the device of `data`. It declares the tensor, which must not be a scalar."""
        return cls(spec, (0,) * len(spec.shape), data.new_empty((0,) * len(spec.shape)))

    @property
    def box(self) -> Box:
        """The slice."""
        return Box(self.starts, tuple(self.data.shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.data.numel()

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""
        return self.numel * self.spec.dtype.itemsize


def parts_in(
    slices: Iterable[TensorSlice], shards: Sequence[LocalShard]
) -> Iterator[tuple[TensorSlice, list[LocalShard]]]:
    """Each of `slices`, with the parts of a rank's `shards` that are in it."""
    by_name: dict[str, list[LocalShard]] = defaultdict(list)
    for shard in shards:
        by_name[shard.spec.name].append(shard)
    for each in slices:
        parts = [
            LocalShard(each.spec, common.starts, shard.data[common.within(shard.box).index])
            for shard in by_name[each.spec.name]
            if (common := each.box.intersect(shard.box)) is not None
        ]
        yield each, parts


Shard = LocalShard | TensorSlice
"""A slice of a tensor that one trainer rank sends; the elements of a `TensorSlice` are computed when a snapshot is taken."""


def place_of(data: torch.Tensor) -> tuple[object, ...]:
    """The memory of a tensor and how it is read, equal for two tensors whose values are always the same."""
    return data.untyped_storage()._cdata, data.storage_offset(), data.shape, data.stride(), data.dtype
