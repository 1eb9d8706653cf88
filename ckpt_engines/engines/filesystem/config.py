"""Options of the ``filesystem`` engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.core import split_protocol
from pydantic import Field, field_validator

from ...contract.engine import EngineConfig

LOCAL = frozenset({"file", "local"})
"""fsspec's protocols of the operating system's own file system."""


class FilesystemConfig(EngineConfig):
    """Options of ``filesystem``."""

    path: str = Field(
        min_length=1,
        description="Directory by its absolute path, or fsspec URL such as 's3://bucket/prefix', that sender and receivers see."
        " One run at a time may write to it, and removes what a run on another host or in another container has not committed.",
    )
    keep_versions: int = Field(
        2, ge=1, description="How many of the newest committed versions stay, also when the run has ended."
    )
    poll_s: float | None = Field(
        None,
        gt=0,
        le=5,
        description="Seconds between two looks for a new file, growing tenfold while waiting;"
        " 0.005 for local paths and 0.1 for URLs unless set.",
    )
    fsync: bool = Field(False, description="Flush every file to the disk before receivers see it (local paths only).")
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="What fsspec hands to the file system, e.g. {endpoint_url = 'http://host:9000'} for S3. No secrets:"
        " options are written to logs and run directories. Credentials belong in the environment (AWS_ACCESS_KEY_ID, ...) or in"
        " the store's own configuration files, on every host.",
    )

    @field_validator("path")
    @classmethod
    def _is_the_same_everywhere(cls, path: str) -> str:
        protocol, local = split_protocol(path.rpartition("::")[2])
        is_local = protocol in LOCAL or (protocol is None and "::" not in path)
        if is_local and not Path(local).is_absolute():
            raise ValueError(
                "is relative, and every process has a directory of its own: give an absolute path, or a URL"
            )
        return path
