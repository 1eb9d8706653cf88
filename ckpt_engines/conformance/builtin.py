"""The suites that ``weightlane conformance`` runs for built-in engines that need options or limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..runtime.devices import device_count
from .suite import EngineConformance


class FilesystemConformance(EngineConformance):
    """The suite for `filesystem`, with a new store for each check."""

    @pytest.fixture
    def engine_options(self, tmp_path: Path) -> dict[str, Any]:
        """Options with the path of a store."""
        return {"path": str(tmp_path / "store")}


class NcclConformance(EngineConformance):
    """The suite for `nccl`, which refuses two ranks on one device."""

    most_halves: ClassVar[int | None] = device_count("cuda")


class HcclConformance(EngineConformance):
    """The suite for `hccl`, which refuses two ranks on one device."""

    most_halves: ClassVar[int | None] = device_count("npu")
