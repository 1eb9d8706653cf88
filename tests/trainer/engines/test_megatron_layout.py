"""The megatron engine refuses bad layouts before it starts, and locates its parameters in a checkpoint; arithmetic only."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

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


@pytest.mark.parametrize(
    ("model", "ranks", "layout", "problem", "hint"),
    [
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
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_what_to_do(
    model: CheckpointShape, ranks: int, layout: dict[str, Any], problem: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        check_layout(TrainerConfig(ranks=ranks, megatron=layout), model, ranks)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "is a gpt2 model"),
        ({"hidden_act": "gelu"}, "has the activation gelu"),
        ({"attention_bias": True}, "has biases"),
        ({"layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention"]}, "sliding"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "scales its rotary embedding"),
    ],
)
def test_a_model_that_would_be_computed_differently_is_refused(
    models: dict[str, Path], tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    config = json.loads((models["qwen3-tied"] / "config.json").read_text())
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


def index_of(piece: Any) -> tuple[slice, ...]:
    """Where a piece lies in its checkpoint tensor."""
    return tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.box.shape, strict=True))


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
        at = Coordinates(tensor_rank, tensor, expert_rank, expert or 1)
        for name, shape in _local_shapes(model, tensor, expert or 1).items():
            used = torch.zeros(shape, dtype=torch.int32)
            for piece in pieces_of(name, shape, model, at):
                used[piece.box.index] += 1
                index = index_of(piece)
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


_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}


@pytest.mark.exhaustive
@pytest.mark.megatron
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.filterwarnings("ignore::UserWarning:m(egatron|bridge).*")
@pytest.mark.parametrize(("bridge_class", "model"), [("Qwen3Bridge", DENSE), ("Qwen3MoEBridge", EXPERTS)])
def test_names_and_layouts_are_those_of_mbridge(bridge_class: str, model: CheckpointShape, tensor: int) -> None:
    """Parameters are filled by our pieces, merged and renamed by mbridge, and must be the checkpoint again."""
    bridges: Any = pytest.importorskip("mbridge.models", exc_type=ImportError)

    class Bridge(getattr(bridges, bridge_class)):  # type: ignore[misc]
        """It knows the names of TransformerEngine's layers; norms are layers of their own here."""

        _OTHER_MAPPING: ClassVar = {name: [f"model.layers.{{layer_number}}.{hf}.weight"] for name, hf in _NORMS.items()}

        def _weight_name_mapping_mlp(self, name: str) -> Any:
            known = self._weight_name_mapping_other if "pre_mlp_layernorm" in name else super()._weight_name_mapping_mlp
            return known(name)

    bridge: Any = object.__new__(Bridge)  # its configuration is not asked for, only its conversions
    bridge.hf_config = SimpleNamespace(
        num_key_value_heads=model.groups,
        num_attention_heads=model.heads,
        hidden_size=model.hidden,
        head_dim=model.head_dim,
        moe_intermediate_size=model.expert_intermediate,
    )
    bridge.mpu = SimpleNamespace(tp_size=tensor, etp_size=1)
    bridge.config = SimpleNamespace(gated_linear_unit=True)
    bridge.make_vocab_size_divisible_by, bridge.vocab_size = tensor, model.vocab
    bridge.padded_vocab_size = -(-model.vocab // tensor) * tensor
    checkpoint = {name: torch.randn(shape) for name, shape in checkpoint_shapes(model).items()}
    found: dict[str, torch.Tensor] = {}
    for name, shape in _local_shapes(model, tensor, 1).items():
        parts = []
        for rank in range(tensor):
            local = torch.zeros(shape)
            for piece in pieces_of(name, shape, model, Coordinates(rank, tensor)):
                local[piece.box.index] = checkpoint[piece.name][index_of(piece)]
            parts.append(local)
        theirs = re.sub(r"local_experts\.(\d+)\.(linear_fc\d)\.weight", r"\2.weight\1", name)
        whole = "norm" in name or "router" in name or "local_experts" in name
        by_columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        marked = SimpleNamespace(tensor_model_parallel=True, partition_dim=int(by_columns))
        merged = parts[0] if whole else bridge._weight_merge_across_tp(theirs, parts, marked)
        found.update(zip(*bridge._weight_to_hf_format(theirs, merged), strict=True))
    assert found.keys() == checkpoint.keys()
    assert [name for name in found if not torch.equal(found[name], checkpoint[name])] == []
