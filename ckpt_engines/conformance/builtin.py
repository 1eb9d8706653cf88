"""What ``weightlane conformance`` runs for built-in engines that need more than a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..runtime.devices import device_count
from .suite import EngineConformance


class FilesystemConformance(EngineConformance):
    """On a directory of its own for each check."""

    @pytest.fixture
    def engine_options(self, tmp_path: Path) -> dict[str, Any]:
        """A place to keep versions in."""
        return {"path": str(tmp_path / "store")}


class NcclConformance(EngineConformance):
    """NCCL refuses two ranks on one device."""

    most_halves: ClassVar[int | None] = device_count("cuda")


class HcclConformance(EngineConformance):
    """HCCL refuses two ranks on one device."""

    most_halves: ClassVar[int | None] = device_count("npu")
