"""Tests are the same on every CPU: AMX is hidden from their processes, and all paths of vLLM take the tiny models."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cpu_demands import misfits
from cpu_paths import WITH_AMX, WITHOUT_AMX, amx_is_hidden, cpu_path
from json_program import Program
from tiny_models import (
    load_tensors,
    make_architecture,
    make_blocky_qwen3,
    make_mla_moe,
    make_qwen3_moe,
    quantised_copy,
)
from zoo_kind import Kind
from zoo_models import KINDS


def shaped(kind: Kind) -> tuple[Any, dict[str, torch.Tensor]]:
    """Config and tensors without data; of convolutions only, since other shapes are in the config."""
    config = kind.transformers_config()
    if kind.group not in {"state space", "hybrid"}:
        return config, {}
    with torch.device("meta"):
        return config, kind.model_class(config).state_dict()


def test_every_path_takes_the_dimensions_of_the_zoo_and_of_tiny_models(tmp_path: Path) -> None:
    assert {kind.name: found for kind in KINDS.values() if (found := misfits(*shaped(kind)))} == {}
    models = [
        make_mla_moe(tmp_path / "mla", seed=0),
        make_qwen3_moe(tmp_path / "moe", seed=0),
        *(make_architecture(kind, tmp_path / kind) for kind in ("mamba2", "mixtral")),
        quantised_copy(make_blocky_qwen3(tmp_path / "plain", seed=0, ranks=2), tmp_path / "fp8"),
    ]
    for model in models:
        assert misfits(transformers.AutoConfig.from_pretrained(model), load_tensors(model)) == [], model.name
    config = types.SimpleNamespace(kv_lora_rank=32, qk_nope_head_dim=16, v_head_dim=16, num_experts=4, hidden_size=48)
    tensors = {"conv1d.weight": torch.empty(40, 1, 4), "up.weight": torch.empty(64, 16, dtype=torch.int8)}
    named = ["qk_nope_head_dim", "hidden_size", "conv1d.weight", "up.weight,"]
    assert [text.split()[0] for text in misfits(config, tensors)] == named


@pytest.mark.vllm
@pytest.mark.slow
def test_amx_is_hidden_from_this_process_and_those_that_it_forks_and_starts(process: Program) -> None:
    assert process.call("cpu_path") == cpu_path()
    assert cpu_path()["asked"] == "sitecustomize"
    assert cpu_path()["environment"] == (WITHOUT_AMX if amx_is_hidden() else WITH_AMX)
    assert not (amx_is_hidden() and cpu_path()["amx"])
