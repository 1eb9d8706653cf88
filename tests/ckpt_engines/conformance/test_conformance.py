"""The built-in engines keep every promise of the contract: the suite that is shipped for everybody's engines, on ours.

`make test` runs on each engine the checks that `conftest.py` chooses: nearly all of them on `shm`. The tests of `nccl`, `hccl`
and `cuda_ipc` run the suite on machines that have their devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines.conformance import ConformanceBase, EngineConformance


class Patient(ConformanceBase):
    """Limits for a busy machine: an engine that waits for its deadline, or for ever, fails all the same."""

    deadline_s = prompt_s = grace_s = HANG_S
    slack_s = 25.0  # less than a library's own idea of a timeout, which must not take the deadline's place: mostly 30 s
    expiring_s = 0.3
    rounds = 12


class TestGloo(Patient, EngineConformance):
    @pytest.fixture
    def engine_name(self) -> str:
        return "gloo"


class TestShm(Patient, EngineConformance):
    @pytest.fixture
    def engine_name(self) -> str:
        return "shm"


class TestFilesystem(Patient, EngineConformance):
    @pytest.fixture
    def engine_name(self) -> str:
        return "filesystem"

    @pytest.fixture
    def engine_options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "store")}
