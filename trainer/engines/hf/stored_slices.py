"""Read slices of tensors from safetensors files, and only the elements that are requested."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from weightlane.ckpt_engines import StorageError
from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import dtype_name

from .partial_dir import PART, storage_error

_MAPPED_BYTES = 64 * 2**20
"""Bytes read after which files are closed and mapped again, so that pages already read do not stay in memory."""


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice of a tensor in a file."""

    box: Box
    file: Path
    key: str
    """Key of the tensor in the file."""


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

    def read(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Copy the elements `box` of tensor `name` into `into`, as far as files hold them."""
        missing = [box]
        for stored in self._stored.get(name, ()):
            left: list[Box] = []
            for part in missing:
                common = part.intersect(stored.box)
                if common is None:
                    left.append(part)
                    continue
                tensor = self._open(stored.file).get_slice(stored.key)[common.within(stored.box).index]
                copy_exactly(tensor, into[common.within(box).index], name)
                self._mapped += tensor.nbytes
                left += part.minus(common)
            missing = left

    def holds(self, name: str, box: Box) -> bool:
        """Return whether files hold all elements `box` of tensor `name`."""
        missing = [box]
        for stored in self._stored.get(name, ()):
            missing = [left for part in missing for left in part.minus(stored.box)]
        return not missing

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional

        if self._mapped > _MAPPED_BYTES:
            self._stack.close()
            self._opened, self._mapped = {}, 0
        if file not in self._opened:
            try:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as cause:
                raise storage_error("read", file, cause) from cause
        return self._opened[file]


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
    index = model_dir / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return {
        key: StoredSlice(Box.whole(shape), model_dir / file, key)
        for file in files
        for key, shape in shapes_in(model_dir / file)
    }


def shapes_in(file: Path) -> list[tuple[str, tuple[int, ...]]]:
    """List key and shape of every tensor in a safetensors file. Raises `StorageError` if it cannot be read."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - optional

    try:
        with safe_open(file, framework="pt") as opened:
            return [(key, tuple(opened.get_slice(key).get_shape())) for key in opened.keys()]  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as cause:
        raise storage_error("read", file, cause) from cause
