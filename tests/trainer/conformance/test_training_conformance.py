"""The built-in training engines keep every promise of the contract: the suite that is shipped for everybody's, on ours."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from waiting import HANG_S

from weightlane.trainer.conformance.builtin import Fsdp2Conformance, MegatronConformance
from weightlane.trainer.conformance.checks.base import TrainingConformanceBase
from weightlane.trainer.conformance.checks.outputs import OutputChecks


class Patient(TrainingConformanceBase):
    """However busy the machine is: an engine that waits for its timeout, or for ever, fails all the same."""

    deadline_s = prompt_s = grace_s = HANG_S
    slack_s = 25.0


class TestFsdp2(Patient, Fsdp2Conformance):
    """Each check once in `make test`."""

    layouts: ClassVar[dict[str, dict[str, Any]]] = {"two ranks": {"ranks": 2}}
    models = ("qwen3",)


@pytest.mark.exhaustive
class TestFsdp2OnExperts(TestFsdp2):
    """DeepSeek-V3 has experts, a head of its own and a tensor that stays float32."""

    models = ("deepseek_v3",)


@pytest.mark.exhaustive
class TestFsdp2OverTensorParallelism(Patient, Fsdp2Conformance):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "tensor parallel": {"ranks": 2, "fsdp2": {"tensor_parallel": 2, "packing": "off"}},
    }


@pytest.mark.megatron
class TestOutputsOfMegatron(Patient, OutputChecks):
    """Each rank has a part of the vocabulary: log-probabilities, entropies and the most probable tokens are of all parts.

    `make test` compares the rest of megatron with FSDP2, transformers and PEFT, in test_megatron and others.
    """

    engine = MegatronConformance.engine
    preload = MegatronConformance.preload
    layouts: ClassVar[dict[str, dict[str, Any]]] = {"tensor parallel": {"ranks": 2, "megatron": {"tensor_parallel": 2}}}
    models = ("qwen3",)


@pytest.mark.megatron
@pytest.mark.exhaustive
class TestMegatron(Patient, MegatronConformance):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "distributed optimizer": {"ranks": 2, "megatron": {"distributed_optimizer": True}},
        "tensors and stages": {"ranks": 4, "megatron": {"tensor_parallel": 2, "pipeline_parallel": 2}},
    }
