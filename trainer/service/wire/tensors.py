"""Tensors of a request: conversion of bytes, dense or as compressed sparse rows, to NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightlane.ckpt_engines import ProtocolError

from .messages import DTYPE_BFLOAT16, DTYPE_FLOAT32, DTYPE_INT32, DTYPE_INT64

Array = npt.NDArray[Any]

_DTYPES = {DTYPE_FLOAT32: "<f4", DTYPE_INT64: "<i8", DTYPE_INT32: "<i4", DTYPE_BFLOAT16: "<u2"}
_MATRIX = 2
MOST_LABELS = 1024
"""Most targets of one position."""
MOST_CELLS = 2**24
"""Most entries of all tensors of a request, in dense form and padded to the same number of labels."""


def tensor(message: Any, *, part: str) -> Array:
    """The values of a ``Tensor`` message: float32 or int64 [N] or [N, K], a copy. bfloat16 becomes float32, int32 becomes int64.

    A dense one without a shape has one dimension. Compressed sparse rows (values, row pointers and column numbers, as torch has
    them) have the shape of the dense tensor, whose other entries are 0.

    Raises `ProtocolError`, with `part`, if type, shape, bytes or indices are not those of a tensor, or it is too large.
    """
    encoding = message.WhichOneof("encoding")
    shape = list(message.shape[: _MATRIX + 1])
    if encoding is None:
        raise ProtocolError("the tensor has no data.", part=part)
    if len(shape) > _MATRIX or any(size < 0 for size in shape):
        raise ProtocolError(f"the tensor has shape {shape}.", part=part, hint="One or two dimensions are read.")
    if len(shape) == _MATRIX and not 1 <= shape[1] <= MOST_LABELS:
        raise ProtocolError(
            f"the tensor has shape {shape}.", part=part, hint=f"A position has from 1 to {MOST_LABELS} labels."
        )
    if encoding == "sparse_csr":
        return _dense(message.sparse_csr, message.dtype, shape, part=part)
    values = _values(message.dense, message.dtype, part=part)
    if not shape:
        shape = [len(values)]
    count = shape[0] * (shape[1] if len(shape) == _MATRIX else 1)
    if len(values) != count:
        raise ProtocolError(f"the tensor of shape {shape} has {len(values)} values.", part=part)
    return values.reshape(shape)


def integers(data: bytes, dtype: str, *, part: str) -> Array:
    """int64 [N]: the little-endian integers of `dtype` in `data`; `ProtocolError` if an incomplete one is left."""
    if len(data) % np.dtype(dtype).itemsize:
        raise ProtocolError(f"{len(data)} bytes are no whole number of integers.", part=part)
    return np.frombuffer(data, dtype).astype(np.int64)


def _values(data: bytes, dtype: int, *, part: str) -> Array:
    """float32 or int64 [N]: the values in `data`."""
    if dtype not in _DTYPES:
        raise ProtocolError(f"the tensor has dtype {dtype}.", part=part, hint="Send float32, bfloat16, int32 or int64.")
    if dtype in (DTYPE_INT32, DTYPE_INT64):
        return integers(data, _DTYPES[dtype], part=part)
    kind = np.dtype(_DTYPES[dtype])
    if len(data) % kind.itemsize:
        raise ProtocolError(f"{len(data)} bytes are no whole number of values.", part=part)
    found = np.frombuffer(data, kind)
    if dtype == DTYPE_BFLOAT16:  # the upper half of a float32
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32)


def _dense(message: Any, dtype: int, shape: list[int], *, part: str) -> Array:
    """Convert compressed sparse rows to a dense [N, K]. Row pointers are checked before anything of that size is allocated."""
    if len(shape) != _MATRIX:
        raise ProtocolError(f"a sparse tensor has shape {shape}.", part=part, hint="It has two dimensions.")
    rows, columns = shape
    values = _values(message.values, dtype, part=part)
    pointers = integers(message.crow_indices, "<i8", part=part)
    places = integers(message.col_indices, "<i8", part=part)
    if len(pointers) != rows + 1 or len(places) != len(values):
        raise ProtocolError(
            f"a sparse tensor of shape {shape} has {len(pointers)} row pointers, {len(places)} column numbers and"
            f" {len(values)} values.",
            part=part,
        )
    lengths = np.diff(pointers)
    if pointers[0] != 0 or pointers[-1] != len(values) or (lengths < 0).any() or (lengths > columns).any():
        raise ProtocolError("row pointers of a sparse tensor do not lead from 0 to its values.", part=part)
    row = np.repeat(np.arange(rows), lengths)
    within = (places >= 0) & (places < columns)
    if not within.all() or (np.diff(row * columns + places) <= 0).any():
        raise ProtocolError(
            f"column numbers of a sparse tensor do not go up within each row, from 0 to {columns - 1}.", part=part
        )
    found = np.zeros(shape, values.dtype)
    found[row, places] = values
    return found
