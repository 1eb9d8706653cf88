"""The built-in training engines keep every promise of the contract: the suite that is shipped for everybody's, on ours."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch
from waiting import HANG_S

from weightlane.trainer.conformance.builtin import Fsdp2Conformance, MegatronConformance
from weightlane.trainer.conformance.checks.base import TrainingConformanceBase
from weightlane.trainer.conformance.checks.ends import EndChecks
from weightlane.trainer.conformance.checks.gradients import GradientChecks
from weightlane.trainer.conformance.checks.outputs import OutputChecks
from weightlane.trainer.conformance.checks.shards import ShardChecks
from weightlane.trainer.conformance.checks.states import StateChecks
from weightlane.trainer.conformance.checks.steps import StepChecks


class Patient(TrainingConformanceBase):
    """However busy the machine is: an engine that waits for its timeout, or for ever, fails all the same."""

    deadline_s = prompt_s = grace_s = HANG_S
    slack_s = 25.0


class InFurtherLayouts(Patient):
    """The checks whose work a layout divides in a way of its own. The others are held by the classes that have each check."""

    test_outputs_are_those_of_transformers = OutputChecks.test_outputs_are_those_of_transformers
    test_the_gradient_of_a_mini_batch_is_that_of_one_process = (
        GradientChecks.test_the_gradient_of_a_mini_batch_is_that_of_one_process
    )
    test_the_gradient_does_not_depend_on_the_split_into_calls_and_micro_batches = (
        GradientChecks.test_the_gradient_does_not_depend_on_the_split_into_calls_and_micro_batches
    )
    test_a_rank_without_a_sequence_takes_part = GradientChecks.test_a_rank_without_a_sequence_takes_part
    test_shards_are_the_checkpoint_bit_for_bit = ShardChecks.test_shards_are_the_checkpoint_bit_for_bit
    test_placements_are_known_before_ranks_run = ShardChecks.test_placements_are_known_before_ranks_run


class Fsdp2(Patient):
    engine = Fsdp2Conformance.engine
    preload = Fsdp2Conformance.preload
    layouts: ClassVar[dict[str, dict[str, Any]]] = {"two ranks": {"ranks": 2}}


class TestFsdp2(Fsdp2, Fsdp2Conformance):
    """Each check once in `make test`."""

    models = ("qwen3",)


@pytest.mark.exhaustive
class TestFsdp2OnExperts(Fsdp2, InFurtherLayouts, StateChecks):
    """DeepSeek-V3 has experts, a head of its own and a tensor that stays float32."""

    test_half_precision_is_for_computing_only = GradientChecks.test_half_precision_is_for_computing_only

    models = ("deepseek_v3",)


@pytest.mark.exhaustive
class TestFsdp2OverTensorParallelism(Fsdp2, InFurtherLayouts, StepChecks):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "tensor parallel": {"ranks": 2, "fsdp2": {"tensor_parallel": 2, "packing": "off"}}
    }


@pytest.mark.exhaustive
class TestFsdp2OverContextParallelism(Fsdp2, Fsdp2Conformance):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {"context parallel": {"ranks": 2, "fsdp2": {"context_parallel": 2}}}
    models = ("qwen3",)


@pytest.mark.exhaustive
class TestFsdp2OnRanksThatShareTokens(Fsdp2, InFurtherLayouts):
    """All of them, as copies of each other, and with halves of matrices."""

    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "of four": {"ranks": 4, "fsdp2": {"context_parallel": 4}},
        "twice": {"ranks": 4, "fsdp2": {"context_parallel": 2}},
        "of halves": {"ranks": 4, "fsdp2": {"context_parallel": 2, "tensor_parallel": 2}},
    }
    models = ("qwen3_moe",)


class Megatron(Patient):
    engine = MegatronConformance.engine
    preload = MegatronConformance.preload


@pytest.mark.megatron
@pytest.mark.exhaustive
class TestMegatron(Patient, MegatronConformance):
    """Each check."""

    layouts: ClassVar[dict[str, Any]] = {"overlapped": MegatronConformance.layouts["overlapped"]}
    models = ("qwen3",)


@pytest.mark.megatron
@pytest.mark.exhaustive
class TestMegatronOfGroupedExperts(Megatron, OutputChecks, GradientChecks):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "all of them": {"ranks": 2, "megatron": {"grouped_gemm": True}},
        "halves": {"ranks": 2, "megatron": {"grouped_gemm": True, "expert_parallel": 2}},
    }
    models = ("qwen3_moe", "deepseek_v3")
    test_a_closed_engine_leaves_nothing_behind = EndChecks.test_a_closed_engine_leaves_nothing_behind


@pytest.mark.megatron
@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and find_spec("transformer_engine")), reason="TransformerEngine on CUDA"
)
class TestMegatronOfTransformerEngine(Megatron, TrainingConformanceBase):
    """It computes in bfloat16 only."""

    test_half_precision_is_for_computing_only = GradientChecks.test_half_precision_is_for_computing_only

    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "one rank": {
            "device": "cuda",
            "compute_dtype": "bfloat16",
            "megatron": {"transformer_engine": True},
        },
    }
    models = ("qwen3", "deepseek_v3")


@pytest.mark.megatron
@pytest.mark.exhaustive
class TestMegatronOverContextParallelism(Megatron, InFurtherLayouts):
    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "context parallel": {"ranks": 2, "megatron": {"context_parallel": 2, "distributed_optimizer": True}},
        "and stages": {"ranks": 4, "megatron": {"context_parallel": 2, "pipeline_parallel": 2}},
        "and halves": {
            "ranks": 4,
            "megatron": {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
        },
    }
    models = ("qwen3_moe", "deepseek_v3")


@pytest.mark.megatron
@pytest.mark.exhaustive
class TestMegatronOfTensorsAndStages(Megatron, InFurtherLayouts):
    """Each rank has a part of the vocabulary: log-probabilities, entropies and the most probable tokens are of all parts.

    `make test` compares megatron with FSDP2, transformers and PEFT, in test_megatron and others, a head over ranks in test_head.
    """

    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "tensors and stages": {"ranks": 4, "megatron": {"tensor_parallel": 2, "pipeline_parallel": 2}}
    }


@pytest.mark.megatron
@pytest.mark.exhaustive
class TestMegatronOnFurtherModels(Megatron, TrainingConformanceBase):
    test_outputs_are_those_of_transformers = OutputChecks.test_outputs_are_those_of_transformers
    test_gradients = GradientChecks.test_the_gradient_does_not_depend_on_the_split_into_calls_and_micro_batches
    test_half_precision_is_for_computing_only = GradientChecks.test_half_precision_is_for_computing_only
    test_shards_are_the_checkpoint_bit_for_bit = ShardChecks.test_shards_are_the_checkpoint_bit_for_bit

    layouts: ClassVar[dict[str, dict[str, Any]]] = {
        "context parallel": {"ranks": 2, "megatron": {"context_parallel": 2, "distributed_optimizer": True}},
        "stages": {"ranks": 2, "megatron": {"pipeline_parallel": 2}},
        "halves": {
            "ranks": 2,
            "megatron": {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
        },
    }
    models = ("gpt_oss", "glm4", "qwen3_next")
