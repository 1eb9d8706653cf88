"""Ranks of a quantised model ask for the slices of elements and scales that they read, and load a version out of these alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from json_program import Program
from tiny_models import load_tensors, make_blocky_qwen3, quantised_copy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WORLD = 2


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_out_of_the_slices_that_it_asks_for_a_quantised_rank_is_what_vllm_loads_from_the_whole(
    scheme: Literal["fp8", "int8"], process: Program, tmp_path: Path
) -> None:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's fp8 and int8 layers need AMX on a CPU")
    plain = [make_blocky_qwen3(tmp_path / f"model{seed}", seed=seed, ranks=WORLD) for seed in range(2)]
    first, second = (quantised_copy(model, tmp_path / f"{model.name}-{scheme}", scheme) for model in plain)
    stored = load_tensors(first)
    ranks = process.call("quantised_slices", str(first), str(second), WORLD)
    for place, rank in enumerate(ranks):
        assert rank["way"] == "reload", "the CPU's kernels take packed weights"
        assert rank["touched"] == rank["differing"] == []
        assert rank["blind"], "a rank that was wrong about what is read asks for slices"
        assert rank["changed"] > 0
        assert "only" in rank["refused"] or "not known" in rank["refused"]
        for kind, along in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
            suffix = {"fp8": "_scale_inv", "int8": "_scale"}[scheme]
            for ending in (".weight", f".weight{suffix}"):
                name = f"model.layers.1.{kind}{ending}"
                shape, starts = list(stored[name].shape), [0, 0]
                if shape[along] > 1:  # a row has one scale, whichever columns are read
                    shape[along] //= WORLD
                    starts[along] = place * shape[along]
                assert rank["boxes"][name] == [[starts, shape]]
        assert rank["boxes"]["model.norm.weight"] == [[[0], [128]]]
