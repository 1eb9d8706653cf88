"""Reads names, shapes and dtypes of the tensors in a directory of safetensors files, but not their values.

A safetensors file starts with the length of its header in eight bytes, then the header as JSON:
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.tensor_spec import SAFETENSORS_DTYPES, TensorSpec

_PART = "benchmark model"
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit. A longer header means a damaged file."""
_METADATA = "__metadata__"
_DTYPES = {name: dtype for name, dtype in SAFETENSORS_DTYPES.items() if dtype is not torch.bool}
"""All dtypes but bool, which has only two values: the benchmark changes an element by counting up."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_headers(directory: Path) -> list[TensorSpec]:
    """Return the tensors of every ``*.safetensors`` file in `directory`, in the order of files and headers.

    Raises `ConfigError` when there is no such file, a file is damaged, two hold the same tensor, or a dtype cannot be sent.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} holds no *.safetensors files.", part=_PART, hint="Give a model's directory.")
    specs: dict[str, TensorSpec] = {}
    for path in files:
        for name, entry in _header(path).items():
            if name == _METADATA:
                continue
            if name in specs:
                raise ConfigError(f"{name} is in {path.name} and in an earlier file.", part=_PART)
            specs[name] = _spec(path, name, entry)
    if not any(spec.numel for spec in specs.values()):
        raise ConfigError(f"the files of {directory} hold no values.", part=_PART)
    return list(specs.values())


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            head = file.read(_LENGTH.size)
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else _LONGEST_HEADER_BYTES + 1
            text = file.read(length) if length <= _LONGEST_HEADER_BYTES else b""
        header = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not an object")
    return header


def _spec(path: Path, name: str, plain: Any) -> TensorSpec:
    try:
        entry = _Entry.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(path, f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if (dtype := _DTYPES.get(entry.dtype)) is None:
        raise ConfigError(
            f"{name} in {path.name} is {entry.dtype}, which the benchmark cannot change and send.",
            part=_PART,
            hint=f"Possible dtypes: {', '.join(_DTYPES)}.",
        )
    if any(size < 0 for size in entry.shape):
        raise _damaged(path, f"{name} has shape {entry.shape}")
    spec = TensorSpec(name, tuple(entry.shape), dtype)
    if entry.data_offsets[1] - entry.data_offsets[0] != spec.nbytes:
        raise _damaged(
            path,
            f"{name} has {spec.nbytes} bytes by its shape, but {entry.data_offsets[1] - entry.data_offsets[0]} by its offsets",
        )
    return spec


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {why}.", part=_PART, hint="Copy the file again.")
