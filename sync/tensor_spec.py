"""What a tensor is called, how large it is, and which part of it a trainer rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weightlane.ckpt_engines import ProtocolError

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
"""Every dtype that can be carried, by its name in the safetensors format (https://huggingface.co/docs/safetensors)."""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(dtype): dtype for dtype in SAFETENSORS_DTYPES.values()}


def dtype_of(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; `ProtocolError` for a name that is not a known tensor dtype."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ProtocolError(
            f"unknown tensor dtype {name!r}.", part="manifest", hint=f"Known: {', '.join(_DTYPES)}."
        ) from None


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

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, in row-major order, by dimension."""
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= max(size, 1)
        return tuple(reversed(strides))

    def to_plain(self) -> list[Any]:
        """As JSON: ``[name, [sizes], dtype]``."""
        return [self.name, list(self.shape), dtype_name(self.dtype)]


class Held(Protocol):
    """The run of `numel` elements from element `start` of a row-major flattened tensor of the stream, on one trainer rank."""

    @property
    def spec(self) -> TensorSpec:
        """The tensor."""

    @property
    def start(self) -> int:
        """First element."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A `Held` that is made when a snapshot is taken."""

    spec: TensorSpec
    start: int
    numel: int
    differing: Callable[[torch.Tensor], float] | None = None
    """About which share of its elements, given as they were, 1-D, would be others now; None where neighbours tell enough."""

    @property
    def nbytes(self) -> int:
        """See `Held`."""
        return self.numel * self.spec.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The part of one checkpoint tensor that a trainer rank holds.

    The shard is the run of `numel` elements that starts at element `start` of the row-major flattened full tensor, which is
    what FSDP2's ``Shard(0)`` gives, uneven or empty rows included. `data` is the live local tensor in the trainer's dtype;
    it is read between ``publish`` and the fence and may change its values, but not its storage, afterwards.
    """

    spec: TensorSpec
    start: int
    data: torch.Tensor

    @property
    def numel(self) -> int:
        """Number of elements this rank holds."""
        return self.data.numel()

    @property
    def nbytes(self) -> int:
        """Size of the shard on the wire in bytes."""
        return self.numel * self.spec.dtype.itemsize
