"""The built-in training engines keep every promise of the contract: the suite that is shipped for everybody's, on ours."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from waiting import HANG_S

from weightlane.trainer.conformance import TrainingEngineConformance
from weightlane.trainer.conformance.builtin import Fsdp2Conformance, MegatronConformance


class Patient(TrainingEngineConformance):
    """However busy the machine is: an engine that waits for its timeout, or for ever, fails all the same."""

    deadline_s = prompt_s = grace_s = HANG_S
    slack_s = 25.0


class TestFsdp2(Patient, Fsdp2Conformance):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "two ranks": {"ranks": 2},
        "tensor parallel": {"ranks": 2, "fsdp2": {"tensor_parallel": 2}},
    }


@pytest.mark.exhaustive
class TestFsdp2InMoreLayouts(Patient, Fsdp2Conformance):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "one rank": {"ranks": 1},
        "four ranks, two by two": {"ranks": 4, "fsdp2": {"tensor_parallel": 2}},
        "padded": {"ranks": 2, "fsdp2": {"packing": "off"}, "reshard_after_forward": False},
    }


@pytest.mark.megatron
class TestMegatron(Patient, MegatronConformance):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "distributed optimizer": {"ranks": 2, "megatron": {"distributed_optimizer": True}},
        "tensors and stages": {"ranks": 4, "megatron": {"tensor_parallel": 2, "pipeline_parallel": 2}},
    }


@pytest.mark.megatron
@pytest.mark.exhaustive
class TestMegatronInMoreLayouts(Patient, MegatronConformance):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "one rank": {"ranks": 1},
        "sequence parallel": {"ranks": 2, "megatron": {"tensor_parallel": 2, "sequence_parallel": True}},
    }
