"""The conformance suite over UCX's choice between two processes of one host, which is shared memory, and over TCP."""

from __future__ import annotations

from typing import Any

import pytest

from weightlane.ckpt_engines.conformance import EngineConformance


class TestOverSharedMemory(EngineConformance):
    # However busy the machine is: what waits for its deadline, or for ever, fails all the same.
    deadline_s = prompt_s = grace_s = 240.0
    slack_s = 25.0

    @pytest.fixture
    def engine_name(self) -> str:
        return "nixl"


@pytest.mark.exhaustive
class TestOverTcp(TestOverSharedMemory):
    @pytest.fixture
    def engine_options(self) -> dict[str, Any]:
        return {"transports": "tcp"}
