"""The built-in rollout engines keep every promise of the contract: the suite that is shipped for everybody's, on ours."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from waiting import HANG_S

from weightlane.rollout.conformance import RolloutConformanceBase, RolloutEngineConformance
from weightlane.rollout.conformance.builtin import VllmConformance
from weightlane.rollout.conformance.checks.base import ServingMaker, Versions


class Patient(RolloutConformanceBase):
    """However busy the machine is: an engine that waits for ever fails all the same."""

    deadline_s = HANG_S
    slack_s = 60.0


class TestTransformers(Patient, RolloutEngineConformance):
    """Each check."""

    engine = "transformers"


# vLLM leaves its ZMQ context to the finalizer, which first warns and then closes it: as an error, the warning would keep it.
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
@pytest.mark.vllm
@pytest.mark.exhaustive
class TestVllm(Patient, VllmConformance):
    """Each check; `make test` compares vLLM with other oracles, in `rollout/commit` and others."""

    def test_a_frozen_engine_is_killed_and_no_zombie_is_left(self, make: ServingMaker, versions: Versions) -> None:
        serving = make(versions.path(self.models[0]))
        serving.start()
        (core,) = vars(serving.replica)["_engine"]._processes
        os.kill(core.pid, signal.SIGSTOP)
        serving.close()
        assert not Path(f"/proc/{core.pid}").exists()
