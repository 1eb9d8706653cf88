"""A stored version as files that other tools can load: safetensors files, their index, and the manifest.

The formats are those of https://github.com/huggingface/safetensors (eight bytes with the header's length, a header of JSON,
then the tensors without gaps) and of transformers' sharded checkpoints (``model.safetensors.index.json``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from weightlane.ckpt_engines import ManifestError, ProtocolError, VersionFiles, bucket_file_name

from .manifest import ALIGNMENT_BYTES, Manifest
from .tensor_spec import SAFETENSORS_DTYPES, StreamEntry

MANIFEST_FILE = "manifest.json"
INDEX_FILE = "model.safetensors.index.json"
_PART = "version files"
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class _ManifestFile(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    layout_digest: str
    manifest: dict[str, JsonValue]


def version_files(manifest: Manifest) -> VersionFiles:
    """The file headers and documents that turn the buckets of `manifest` into a directory of safetensors files.

    Raises `ManifestError` for a tensor name that safetensors reserves, `ProtocolError` unless files hold whole tensors.
    """
    if any(spec.name == _METADATA for spec in manifest.specs):
        raise ManifestError(f"a tensor cannot be called {_METADATA}: safetensors reserves that name.", part=_PART)
    files = manifest.files
    weight_map = {entry.spec.name: bucket_file_name(first) for first, tensors in files.items() for entry in tensors}
    total = sum(spec.nbytes for spec in manifest.specs)
    documents = {
        MANIFEST_FILE: {"layout_digest": manifest.layout_digest, "manifest": manifest.to_plain()},
        INDEX_FILE: {"metadata": {"total_size": total}, "weight_map": weight_map},
    }
    return VersionFiles(
        manifest.version,
        [_header(manifest.version, files.get(index, ())) for index in range(manifest.bucket_count)],
        {name: json.dumps(content, indent=1) + "\n" for name, content in documents.items()},
    )


def manifest_of_document(text: str) -> Manifest:
    """The manifest in a `MANIFEST_FILE`. Raises `ProtocolError` for anything that `version_files` did not write."""
    try:
        found = _ManifestFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ProtocolError(f"{MANIFEST_FILE} is not valid: {where}: {first['msg']}.", part=_PART) from None
    manifest = Manifest.from_plain(found.manifest)
    if manifest.layout_digest != found.layout_digest:
        raise ProtocolError(f"{MANIFEST_FILE} was changed: its digest does not match.", part=_PART)
    return manifest


def _header(version: int, tensors: Sequence[StreamEntry]) -> bytes:
    """The header of the file that holds `tensors`; empty without tensors."""
    if not tensors:
        return b""
    # transformers refuses a file without the format (the framework) in its metadata.
    content: dict[str, Any] = {_METADATA: {"format": "pt", "weightlane_version": str(version)}}
    start = tensors[0].offset
    for entry in tensors:
        content[entry.spec.name] = {
            "dtype": _DTYPE_NAMES[entry.spec.dtype],
            "shape": list(entry.spec.shape),
            "data_offsets": [entry.offset - start, entry.end - start],
        }
    header = json.dumps(content, separators=(",", ":")).encode()
    # The format asks for a multiple of 8. A multiple of 64 aligns tensors in a mapped file as well as in the stream.
    header += b" " * (-(_LENGTH.size + len(header)) % ALIGNMENT_BYTES)
    return _LENGTH.pack(len(header)) + header
