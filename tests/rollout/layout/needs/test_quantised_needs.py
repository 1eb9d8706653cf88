"""Ranks whose versions go through vLLM's own loading ask for the slices that it reads, and load a version out of these alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_paths import WITH_AMX
from json_program import Program
from tiny_models import load_tensors, make_blocky_qwen3, quantised_copy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WORLD = 2
PROGRAM = Path(__file__).parents[1] / "layout_process.py"


@pytest.fixture
def amx_process(amx: None) -> Iterator[Program]:
    """`layout_process.py` with AMX, without which vLLM's fp8 layers do not compute on a CPU."""
    program = Program(PROGRAM, env={"VLLM_LOGGING_LEVEL": "ERROR"} | WITH_AMX)
    yield program
    program.kill()


def test_out_of_the_slices_that_it_asks_for_a_rank_loads_what_vllm_loads_from_the_whole(
    process: Program, tmp_path: Path
) -> None:
    check(process, *(make_blocky_qwen3(tmp_path / f"model{seed}", seed=seed, ranks=WORLD) for seed in range(2)))


def test_so_does_a_quantised_rank(amx_process: Program, tmp_path: Path) -> None:
    plain = [make_blocky_qwen3(tmp_path / f"model{seed}", seed=seed, ranks=WORLD) for seed in range(2)]
    check(amx_process, *(quantised_copy(model, tmp_path / f"{model.name}-fp8") for model in plain))


def check(process: Program, first: Path, second: Path) -> None:
    stored = load_tensors(first)
    ranks = process.call("slices_of_reloads", str(first), str(second), WORLD)
    for place, rank in enumerate(ranks):
        assert rank["way"] == "reload"
        assert rank["touched"] == rank["differing"] == []
        assert rank["blind"], "a rank that was wrong about what is read asks for slices"
        assert rank["changed"] > 0
        assert "only a part of what this rank needs of it has arrived" in rank["refused"]
        assert rank["unchanged"]
        for kind, along in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("mlp.down_proj", 1)):
            name = f"model.layers.1.{kind}.weight"
            for part in (name, f"{name}_scale_inv"):
                if part in stored:
                    shape, starts = list(stored[part].shape), [0, 0]
                    shape[along] //= WORLD
                    starts[along] = place * shape[along]
                    assert rank["boxes"][part] == [[starts, shape]]
        assert rank["boxes"]["model.norm.weight"] == [[[0], [128]]]
