"""The megatron engine refuses layouts and models that cannot work before it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.engines.megatron.model_facts import CheckpointShape, DeltaShape, read_model
from weightlane.trainer.engines.megatron.process.layout_check import check_layout

DENSE = CheckpointShape(
    layers=8, hidden=16, intermediate=24, heads=8, groups=4, head_dim=8, vocab=61, tied=False, qk_norm=True
)
EXPERTS = replace(DENSE, layers=4, intermediate=0, experts=6, expert_intermediate=12)
LINEAR = replace(
    EXPERTS, delta=DeltaShape(frozenset({0}), key_heads=3, value_heads=6, key_dim=4, value_dim=4, kernel=4)
)


def test_a_layout_that_cannot_work_is_refused_with_what_to_do() -> None:
    cases: list[tuple[CheckpointShape, int, dict[str, Any], str, str]] = [
        (DENSE, 6, {"tensor_parallel": 4}, "6 trainer ranks", "multiple of 4"),
        (DENSE, 4, {"tensor_parallel": 2, "pipeline_parallel": 4}, "4 trainer ranks", "multiple of 8"),
        (DENSE, 6, {"tensor_parallel": 2, "context_parallel": 2}, "2 of which share tokens", "multiple of 4"),
        (DENSE, 3, {"tensor_parallel": 3}, "does not divide the model's 8 attention heads", "1, 2"),
        (DENSE, 8, {"tensor_parallel": 8}, "does not divide the model's 4 key and value heads", "1, 2, 4"),
        (DENSE, 3, {"pipeline_parallel": 3}, "8 decoder layers", "divides the number of layers"),
        (DENSE, 4, {"pipeline_parallel": 4, "virtual_pipeline": 3}, "4 x 3 stages", "divides the number of layers"),
        (DENSE, 2, {"virtual_pipeline": 2}, "needs a pipeline", "pipeline_parallel to at least 2"),
        (DENSE, 2, {"sequence_parallel": True}, "needs tensor parallelism", "tensor_parallel to at least 2"),
        (DENSE, 2, {"expert_parallel": 2}, "the model has no experts", "expert_parallel to 1"),
        (DENSE, 1, {"grouped_gemm": True}, "the model has no experts", "grouped_gemm to false"),
        (EXPERTS, 1, {"grouped_gemm": True}, "16 and 12 columns", "grouped_gemm to false"),
        (DENSE, 2, {"overlap_param_gather": True, "overlap_grad_reduce": True}, "needs distributed_optimizer", "both"),
        (
            DENSE,
            2,
            {"transformer_engine": True, "context_parallel": 2},
            "attends within a rank",
            "context_parallel to 1",
        ),
        (EXPERTS, 4, {"expert_parallel": 4}, "does not divide the model's 6 experts", "1, 2, 3"),
        (EXPERTS, 2, {"expert_parallel": 3}, "does not divide the 2 ranks", "pipeline_parallel x expert_parallel"),
        (EXPERTS, 2, {"tensor_parallel": 2, "expert_parallel": 2}, "needs sequence_parallel", "sequence_parallel=true"),
        (EXPERTS, 2, {"tensor_parallel": 2, "sequence_parallel": True}, "an expert_parallel that", "multiple of 2"),
        (LINEAR, 2, {"context_parallel": 2}, "has linear attention", "context_parallel to 1"),
        (LINEAR, 2, {"tensor_parallel": 2}, "does not divide the model's 3 key heads of linear attention", "1."),
    ]
    for model, ranks, layout, problem, hint in cases:
        with pytest.raises(ConfigError, match=problem) as refused:
            check_layout(TrainerConfig(ranks=ranks, megatron=layout), model, ranks)
        assert hint in refused.value.hint


def test_a_model_that_would_be_computed_differently_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    configs = {name: json.loads((models[name] / "config.json").read_text()) for name in ("qwen3-tied", "gpt-oss")}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "is a gpt2 model"),
        ({"hidden_act": "gelu"}, "has the activation gelu"),
        ({"attention_bias": True}, "has biases"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, "scales its rotary embedding"),
        ({"swiglu_alpha": 1.5}, "has swiglu_alpha=1.5"),
        ({"swiglu_limit": 1.0, "attention_bias": False}, "has no biases in its attention"),
    ]
    for change, problem in cases:
        config = configs["gpt-oss" if "swiglu" in str(change) else "qwen3-tied"]
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError, match=problem) as refused:
            read_model(tmp_path)
        assert "fsdp2" in refused.value.hint
