"""The megatron engine refuses bad layouts before it starts, and locates its parameters in a checkpoint; arithmetic only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.engines.megatron.checkpoint_names import (
    CheckpointShape,
    Coordinates,
    checkpoint_shapes,
    pieces_of,
)
from weightlane.trainer.engines.megatron.model_facts import check_layout, read_model

DENSE = CheckpointShape(
    layers=8, hidden=16, intermediate=24, heads=8, groups=4, head_dim=8, vocab=61, tied=False, qk_norm=True
)
EXPERTS = replace(DENSE, layers=4, intermediate=0, experts=6, expert_intermediate=12)


def test_a_layout_that_cannot_work_is_refused_with_what_to_do() -> None:
    cases: list[tuple[CheckpointShape, int, dict[str, Any], str, str]] = [
        (DENSE, 6, {"tensor_parallel": 4}, "6 trainer ranks", "multiple of 4"),
        (DENSE, 4, {"tensor_parallel": 2, "pipeline_parallel": 4}, "4 trainer ranks", "multiple of 8"),
        (DENSE, 3, {"tensor_parallel": 3}, "does not divide the model's 8 attention heads", "1, 2"),
        (DENSE, 8, {"tensor_parallel": 8}, "does not divide the model's 4 key and value heads", "1, 2, 4"),
        (DENSE, 3, {"pipeline_parallel": 3}, "8 decoder layers", "divides the number of layers"),
        (DENSE, 4, {"pipeline_parallel": 4, "virtual_pipeline": 3}, "4 x 3 stages", "divides the number of layers"),
        (DENSE, 2, {"virtual_pipeline": 2}, "needs a pipeline", "pipeline_parallel to at least 2"),
        (DENSE, 2, {"sequence_parallel": True}, "needs tensor parallelism", "tensor_parallel to at least 2"),
        (DENSE, 2, {"expert_parallel": 2}, "the model has no experts", "expert_parallel to 1"),
        (EXPERTS, 4, {"expert_parallel": 4}, "does not divide the model's 6 experts", "1, 2, 3"),
        (EXPERTS, 2, {"expert_parallel": 3}, "does not divide the 2 ranks", "pipeline_parallel x expert_parallel"),
        (EXPERTS, 2, {"tensor_parallel": 2, "expert_parallel": 2}, "needs sequence_parallel", "sequence_parallel=true"),
        (EXPERTS, 2, {"tensor_parallel": 2, "sequence_parallel": True}, "an expert_parallel that", "multiple of 2"),
    ]
    for model, ranks, layout, problem, hint in cases:
        with pytest.raises(ConfigError, match=problem) as refused:
            check_layout(TrainerConfig(ranks=ranks, megatron=layout), model, ranks)
        assert hint in refused.value.hint


def test_a_model_that_would_be_computed_differently_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((models["qwen3-tied"] / "config.json").read_text())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "is a gpt2 model"),
        ({"hidden_act": "gelu"}, "has the activation gelu"),
        ({"attention_bias": True}, "has biases"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "scales its rotary embedding"),
    ]
    for change, problem in cases:
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError, match=problem) as refused:
            read_model(tmp_path)
        assert "fsdp2" in refused.value.hint


def _local_shapes(model: CheckpointShape, tensor: int, expert: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a rank that has all layers, by name, with the shapes that megatron-core gives them."""
    rows = -(-model.vocab // tensor)
    qkv = (model.heads + 2 * model.groups) * model.head_dim // tensor
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (rows, model.hidden),
        "decoder.final_layernorm.weight": (model.hidden,),
    }
    if not model.tied:
        shapes["output_layer.weight"] = (rows, model.hidden)
    for layer in (f"decoder.layers.{index}" for index in range(model.layers)):
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.pre_mlp_layernorm.weight"] = (model.hidden,)
        shapes[f"{layer}.self_attention.linear_qkv.weight"] = (qkv, model.hidden)
        shapes[f"{layer}.self_attention.linear_proj.weight"] = (model.hidden, model.heads * model.head_dim // tensor)
        if model.qk_norm:
            for kind in "qk":
                shapes[f"{layer}.self_attention.{kind}_layernorm.weight"] = (model.head_dim,)
        blocks = {f"{layer}.mlp": model.intermediate // tensor}
        if model.experts:
            shapes[f"{layer}.mlp.router.weight"] = (model.experts, model.hidden)
            blocks = {
                f"{layer}.mlp.experts.local_experts.{index}": model.expert_intermediate
                for index in range(model.experts // expert)
            }
        for block, width in blocks.items():
            shapes[f"{block}.linear_fc1.weight"] = (2 * width, model.hidden)
            shapes[f"{block}.linear_fc2.weight"] = (model.hidden, width)
    return shapes


@given(
    tensor=st.sampled_from([1, 2, 4]),
    groups_each=st.integers(1, 2),
    heads_each=st.integers(1, 3),
    vocab=st.integers(4, 13),
    tied=st.booleans(),
    expert=st.sampled_from([0, 1, 3]),
)
def test_pieces_of_all_ranks_are_every_element_and_no_padding(
    tensor: int, groups_each: int, heads_each: int, vocab: int, tied: bool, expert: int
) -> None:
    """Sharded tensors once; those that every tensor parallel rank holds whole, once per rank."""
    groups = tensor * groups_each
    sizes = {"layers": 1, "hidden": 3, "heads": groups * heads_each, "groups": groups, "head_dim": 2, "vocab": vocab}
    blocks = {"intermediate": 0, "experts": 3, "expert_intermediate": 2} if expert else {"intermediate": 2 * tensor}
    model = replace(DENSE, **sizes, **blocks, tied=tied)
    times = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in checkpoint_shapes(model).items()}
    ranks = [(t, e) for t in range(tensor) for e in range(expert or 1)]
    for tensor_rank, expert_rank in ranks:
        here = Coordinates(tensor_rank, expert_rank, expert or 1)
        for name, shape in _local_shapes(model, tensor, expert or 1).items():
            used = torch.zeros(shape, dtype=torch.int32)
            for piece in pieces_of(name, shape, model, here):
                used[piece.box.index] += 1
                index = tuple(slice(at, at + size) for at, size in zip(piece.starts, piece.box.shape, strict=True))
                assert times[piece.name][index].shape == piece.box.shape
                times[piece.name][index] += 1
            assert used.max() <= 1
            assert bool((used == 1).all()) or "embeddings" in name or "output_layer" in name
    for name, count in times.items():
        copies = expert or 1
        if "norm" in name or name.endswith("mlp.gate.weight"):
            copies *= tensor
        elif ".experts." in name:
            copies = tensor
        assert bool((count == copies).all()), name
