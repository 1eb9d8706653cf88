"""Tensors as runs of unsigned integers: the delta codec compares, moves and counts bits, never numbers."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightlane.ckpt_engines import ConfigError

from ....version.tensor_spec import INTEGERS

PART = "delta codec"

Words = npt.NDArray[Any]
"""A 1-D array of uint8, uint16, uint32 or uint64 with one entry for each element of a tensor."""
Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

_UNSIGNED: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("the delta codec's wire format is little-endian, and so must be the machine.")


def unsigned(itemsize: int) -> npt.DTypeLike:
    """The numpy dtype for elements of `itemsize` bytes."""
    return _UNSIGNED[itemsize]


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of `tensor` as integers of its element size, on its device.

    Raises:
        ConfigError: The tensor is not contiguous, or its elements have more than 8 bytes.
    """
    if not tensor.is_contiguous():
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous.",
            part=PART,
            hint="Pass tensor.contiguous(), or the flat storage that the tensor is a view of.",
        )
    if tensor.itemsize not in INTEGERS:
        raise ConfigError(
            f"{tensor.dtype} has elements of {tensor.itemsize} bytes.", part=PART, hint="Pass a view as real numbers."
        )
    return tensor.detach().reshape(-1).view(INTEGERS[tensor.itemsize])


def words_of(tensor: torch.Tensor) -> Words:
    """A flat array of unsigned integers that shares the memory of a CPU tensor; raises as `integer_view`."""
    words: Words = integer_view(tensor).numpy().view(_UNSIGNED[tensor.itemsize])
    return words


def tensor_of(words: Words) -> torch.Tensor:
    """A tensor of signed integers that shares the memory of `words`."""
    return torch.from_numpy(words.view(np.uint8)).view(INTEGERS[words.itemsize])
