"""The conformance suite over UCX's choice between two processes of one host, which is shared memory, and over TCP."""

from __future__ import annotations

from typing import Any

import pytest

from weightlane.ckpt_engines.conformance import EngineConformance


class TestOverSharedMemory(EngineConformance):
    slack_s = 4.0  # other suites run beside this one

    @pytest.fixture
    def engine_name(self) -> str:
        return "nixl"


class TestOverTcp(TestOverSharedMemory):
    @pytest.fixture
    def engine_options(self) -> dict[str, Any]:
        return {"transports": "tcp"}
