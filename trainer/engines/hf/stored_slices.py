"""Slices of tensors: those that a rank trains, and those in safetensors files, of which only requested elements are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from weightlane.ckpt_engines import StorageError
from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import dtype_name

from .model_dir import weight_headers
from .partial_dir import PART, storage_errors

Source = TypeVar("Source")
_SHOWN = 5
_MAPPED_BYTES = 64 * 2**20
"""Bytes read after which files are closed and mapped again, so that pages already read do not stay in memory."""


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice of a tensor in a file."""

    box: Box
    file: Path
    key: str
    """Key of the tensor in the file."""


@dataclass(frozen=True, slots=True)
class TrainedSlice:
    """A rectangle of a checkpoint tensor, and where its elements are on this rank."""

    name: str
    box: Box
    weight: torch.Tensor
    """View of the master weight, float32 if it is trained, with the rectangle's shape and any strides."""
    moments: Mapping[str, torch.Tensor]
    """Likewise views of the optimizer's moments, by the optimizer's names; none for weights that are not trained. The number of
    steps as `STEP`, float32 [], if the optimizer counts them."""


class SliceReader:
    """Reads slices of tensors, given by name. A context manager that keeps open the files it read from."""

    def __init__(self, stored: Mapping[str, Sequence[StoredSlice]]) -> None:
        self._stored = stored
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._mapped = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, box: Box, into: torch.Tensor, *, rounds: bool = False) -> None:
        """Copy elements `box` of tensor `name` into `into`, as far as files hold them; unless it `rounds`, by `copy_exactly`."""
        for stored, part in sources_of(box, ((each, each.box) for each in self._stored.get(name, ())))[0]:
            tensor = self._open(stored.file).get_slice(stored.key)[part.within(stored.box).index]
            there = into[part.within(box).index]
            if rounds:
                there.copy_(tensor)
            else:
                copy_exactly(tensor, there, name)
            self._mapped += tensor.nbytes

    def _open(self, file: Path) -> Any:
        from safetensors import safe_open  # noqa: PLC0415 - optional

        if self._mapped > _MAPPED_BYTES:
            self._stack.close()
            self._opened, self._mapped = {}, 0
        if file not in self._opened:
            with storage_errors("read", file):
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._opened[file]


def sources_of(box: Box, held: Iterable[tuple[Source, Box]]) -> tuple[list[tuple[Source, Box]], list[Box]]:
    """Find the first of the sources `held`, each with its box, that has each element of `box`.

    Returns:
        Parts of `box`, each with its source; and the parts that no source has.
    """
    found, missing = [], [box]
    for source, its in held:
        found += [(source, common) for part in missing if (common := part.intersect(its)) is not None]
        missing = [left for part in missing for left in part.minus(its)]
    return found, missing


def copy_exactly(values: torch.Tensor, into: torch.Tensor, name: str) -> None:
    """Copy `values` of weight `name`.

    Raises `StorageError` if `into`, held in half precision since it is not trained, would round them: they are of another model.
    """
    into.copy_(values)
    in_half = into.itemsize < torch.float32.itemsize and into.dtype != values.dtype
    if in_half and not torch.equal(into.to(values.device, values.dtype), values):
        raise StorageError(
            f"{name} has values that {dtype_name(into.dtype)} would round, in which this model, not trained, is held.",
            part=PART,
            hint="Load weights of the model that the engine was set up with, or set it up with these.",
        )


def hf_tensors(model_dir: Path) -> dict[str, StoredSlice]:
    """Return every tensor of a directory that `check_model_dir` accepts, by name."""
    return {
        key: StoredSlice(Box.whole(item["shape"]), model_dir / file, key)
        for file, tensors in weight_headers(model_dir).items()
        for key, item in tensors.items()
    }


def some_of(names: Collection[str]) -> str:
    """Join names for an error: enough to recognise a pattern."""
    return f"{', '.join(sorted(names)[:_SHOWN])}{' and more' if len(names) > _SHOWN else ''}"
