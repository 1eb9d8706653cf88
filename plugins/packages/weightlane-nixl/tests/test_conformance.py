"""The conformance suite over UCX's choice between two processes of one host, which is shared memory, and over TCP."""

from __future__ import annotations

from typing import Any

import pytest

from weightlane.ckpt_engines.conformance import EngineConformance


class TestOverSharedMemory(EngineConformance):
    @pytest.fixture
    def engine_name(self) -> str:
        return "nixl"


class TestOverTcp(TestOverSharedMemory):
    @pytest.fixture
    def engine_options(self) -> dict[str, Any]:
        return {"transports": "tcp"}
