"""The conformance suite of weightlane is this engine's test-suite."""

from __future__ import annotations

from typing import Any

import pytest

from weightlane.ckpt_engines.conformance import EngineConformance


class TestTemplate(EngineConformance):
    """Every check of the suite, on this engine, however busy the machine is."""

    deadline_s = prompt_s = grace_s = 240.0
    slack_s = 25.0

    @pytest.fixture
    def engine_name(self) -> str:
        return "template"

    @pytest.fixture
    def engine_options(self) -> dict[str, Any]:
        return {"host": "127.0.0.1"}
