"""What ``weightlane conformance`` runs for built-in engines that need more than a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ..devices import is_available
from .suite import EngineConformance


class FilesystemConformance(EngineConformance):
    """On a directory of its own for each check."""

    @pytest.fixture
    def engine_options(self, tmp_path: Path) -> dict[str, Any]:
        """A place to keep versions in."""
        return {"path": str(tmp_path / "store")}


def _devices(kind: str) -> int:
    return int(torch.get_device_module(kind).device_count()) if is_available(kind) else 0


class NcclConformance(EngineConformance):
    """NCCL refuses two ranks on one device."""

    most_halves: ClassVar[int | None] = _devices("cuda")


class HcclConformance(EngineConformance):
    """HCCL refuses two ranks on one device."""

    most_halves: ClassVar[int | None] = _devices("npu")
