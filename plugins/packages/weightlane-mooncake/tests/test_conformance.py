"""The conformance suite over Mooncake's TCP transport."""

from __future__ import annotations

import pytest

from weightlane.ckpt_engines.conformance import EngineConformance


class TestOverTcp(EngineConformance):
    slack_s = 4.0  # other suites run beside this one

    @pytest.fixture
    def engine_name(self) -> str:
        return "mooncake"
