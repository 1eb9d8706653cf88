"""The built-in engines keep every promise of the contract: the suite that is shipped for everybody's engines, on ours.

`nccl`, `hccl` and `cuda_ipc` are with their other tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightlane.ckpt_engines.conformance import EngineConformance


class TestGloo(EngineConformance):
    @pytest.fixture
    def engine_name(self) -> str:
        return "gloo"


class TestShm(EngineConformance):
    @pytest.fixture
    def engine_name(self) -> str:
        return "shm"


class TestFilesystem(EngineConformance):
    @pytest.fixture
    def engine_name(self) -> str:
        return "filesystem"

    @pytest.fixture
    def engine_options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "store")}


class TestFilesystemOnS3(EngineConformance):
    """A real S3 API, served on loopback."""

    preload = ("s3fs",)
    rounds = 6  # each connection is dozens of requests to a server written in Python; local paths do all fifty

    @pytest.fixture
    def engine_name(self) -> str:
        return "filesystem"

    @pytest.fixture
    def engine_options(self, s3_url: str, s3_options: dict[str, str]) -> dict[str, Any]:
        return {"path": s3_url, "storage_options": s3_options}
