"""With ``trainer.lora.publish`` = adapter, an engine publishes A and B alone, and exports what it would export otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import FSDP2_TP2, Teams, assert_same, checkpoint, exhaustive, gathered, megatron
from safetensors.torch import load_file

from weightlane.trainer.engines.registry import training_engine_class

MODEL = "qwen3-tied"
LORA = {"rank": 3, "alpha": 4, "targets": ("q_proj", "o_proj", "up_proj", "down_proj"), "learning_rate": 0.02}
ADAPTER = {**LORA, "publish": "adapter"}
LAYOUTS = [
    pytest.param({}, id="fsdp2-2"),
    exhaustive(FSDP2_TP2, id="fsdp2-tp2"),
    pytest.param(
        megatron({"tensor_parallel": 2, "sequence_parallel": True}),
        id="megatron-sp2",
        marks=(pytest.mark.megatron, pytest.mark.exhaustive),
    ),
]
"""Settings of two ranks."""


@pytest.mark.parametrize("settings", LAYOUTS)
def test_versions_are_pefts_tensors_and_exports_are_bit_for_bit_those_of_a_run_that_publishes_merged_weights(
    teams: Teams, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Also those of a saved state; a state of either kind continues as the other."""
    ranks, found = teams.of(2), {}
    for lora in (ADAPTER, LORA):
        ranks.setup(MODEL, lora=lora, **settings)
        folder = tmp_path / str(lora.get("publish"))
        ranks.all("train", first=0, count=3)
        ranks.all("export", directory=folder / "model")
        ranks.all("export_adapter", directory=folder / "adapter", name="default")
        ranks.all("save", directory=folder / "state")
        found[str(lora.get("publish"))] = gathered(ranks)
    adapter, merged = tmp_path / "adapter", tmp_path / "None"
    assert_same(found["adapter"], load_file(adapter / "adapter" / "adapter_model.safetensors"))
    assert_same(found["None"], checkpoint(merged / "model"))
    assert_same(checkpoint(adapter / "model"), checkpoint(merged / "model"))
    assert not torch.equal(
        found["None"]["model.layers.0.mlp.up_proj.weight"],
        checkpoint(teams.models[MODEL])["model.layers.0.mlp.up_proj.weight"],
    )
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in found.values()]
    assert sizes[0] < sizes[1]
    engine = training_engine_class(str(settings.get("engine", "fsdp2")))
    for each in (adapter, merged):
        engine.export_saved(each / "state", teams.models[MODEL], each / "from state", torch.float32)
    assert_same(checkpoint(adapter / "from state"), checkpoint(merged / "from state"))
    ranks.setup(MODEL, lora=ADAPTER, **settings)
    assert ranks.all("load", directory=merged / "state") == [3, 3]
    assert_same(gathered(ranks), found["adapter"])


@pytest.mark.parametrize("settings", LAYOUTS)
def test_the_fence_names_a_and_b_of_all_ranks(teams: Teams, settings: dict[str, Any]) -> None:
    ranks = teams.of(2)
    ranks.setup(MODEL, lora=ADAPTER, **settings)
    ranks.all("train", first=0, count=1)
    names = list(gathered(ranks))
    for report in ranks.all("fence"):
        assert [name for call in report["calls"] for name in call["named"]] == names
        assert report["calls"][0]["changed"] == []
        # Every tensor but A has a gradient in the first step, where B is 0; all have one in the second.
        assert set(report["changed"]) == set(report["published"]) != set()
