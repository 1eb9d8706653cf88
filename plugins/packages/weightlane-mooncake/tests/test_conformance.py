"""The conformance suite over Mooncake's TCP transport."""

from __future__ import annotations

import pytest
from weightlane_mooncake.conformance import MooncakeConformance


class TestOverTcp(MooncakeConformance):
    # However busy the machine is: what waits for its deadline, or for ever, fails all the same.
    deadline_s = prompt_s = grace_s = 240.0
    slack_s = 25.0

    @pytest.fixture
    def engine_name(self) -> str:
        return "mooncake"
