"""verl's NIXL engine as a checkpoint engine of weightlane, by the conformance suite."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from weightlane.ckpt_engines.conformance import EngineConformance


class TestNixlOfVerl(EngineConformance):
    # However busy the machine is: what waits for its deadline, or for ever, fails all the same.
    deadline_s = prompt_s = grace_s = 120.0
    slack_s = 25.0
    expected_failures: ClassVar[dict[str, str]] = {
        "test_nothing_is_unpickled": "verl's nixl sends its messages pickled",
        "test_strangers_neither_break_nor_delay_connect[garbage]": "verl's nixl unpickles what anybody sends to its port",
    }

    @pytest.fixture
    def engine_name(self) -> str:
        return "verl"

    @pytest.fixture
    def engine_options(self) -> dict[str, Any]:
        engine, arguments = "nixl_on_cpu", {"device": "cpu"}
        return {"backend": engine, "custom_backend_module": engine, "bucket_mib": 4, "engine_kwargs": arguments}
