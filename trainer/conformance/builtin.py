"""The suites that ``weightlane conformance`` runs for the built-in training engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .checks import TrainingEngineConformance


class Fsdp2Conformance(TrainingEngineConformance):
    """The suite for `fsdp2`, with and without tensor and context parallelism."""

    engine: ClassVar[str] = "fsdp2"
    preload: ClassVar[Sequence[str]] = ("weightlane.trainer.engines.fsdp2.engine",)
    layouts: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "one rank": {"ranks": 1},
        "two ranks": {"ranks": 2},
        "tensor parallel": {"ranks": 2, "fsdp2": {"tensor_parallel": 2}},
        "context parallel": {"ranks": 2, "fsdp2": {"context_parallel": 2}},
    }


class MegatronConformance(TrainingEngineConformance):
    """The suite for `megatron`, in some of its layouts."""

    engine: ClassVar[str] = "megatron"
    preload: ClassVar[Sequence[str]] = ("weightlane.trainer.engines.megatron.engine",)
    layouts: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "one rank": {"ranks": 1},
        "distributed optimizer": {"ranks": 2, "megatron": {"distributed_optimizer": True}},
        "overlapped": {
            "ranks": 2,
            "megatron": {
                "distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "bucket_parameters": 500,
            },
        },
        "context parallel": {"ranks": 2, "megatron": {"context_parallel": 2}},
        "tensors and stages": {"ranks": 4, "megatron": {"tensor_parallel": 2, "pipeline_parallel": 2}},
    }
