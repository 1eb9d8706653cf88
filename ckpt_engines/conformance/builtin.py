"""The suites that ``weightlane conformance`` runs for built-in engines that need options or limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..contract.capabilities import Capabilities
from ..runtime.devices import device_count
from .checks import EngineConformance
from .checks.base import ConnectionMaker


class FilesystemConformance(EngineConformance):
    """The suite for `filesystem`, with a new store for each check."""

    @pytest.fixture
    def engine_options(self, tmp_path: Path) -> dict[str, Any]:
        """Options with the path of a store."""
        return {"path": str(tmp_path / "store")}


class NcclConformance(EngineConformance):
    """The suite for `nccl`, which refuses two ranks on one device of a machine."""

    most_halves: ClassVar[int | None] = device_count("cuda")
    expected_failures: ClassVar[Mapping[str, str]] = {
        "test_strangers_neither_break_nor_delay_connect": (
            "NCCL waits for whoever connects to the port of its bootstrap: strangers there make `connect` end at its deadline"
        )
    }

    @pytest.mark.parametrize("side", ["sender"])
    def test_the_death_of_a_peer_is_noticed_long_before_the_deadline(
        self, connected: ConnectionMaker, capabilities: Capabilities, side: str
    ) -> None:
        """Only the sender is killed. It may miss a receiver's death: its broadcast ends when NCCL's next rank has the bucket."""
        super().test_the_death_of_a_peer_is_noticed_long_before_the_deadline(connected, capabilities, side)


class HcclConformance(EngineConformance):
    """The suite for `hccl`, which refuses two ranks on one device."""

    most_halves: ClassVar[int | None] = device_count("npu")
