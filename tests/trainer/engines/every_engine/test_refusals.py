"""Every training engine refuses a model that it cannot train, in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from engine_ranks import Teams


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("megatron", marks=pytest.mark.megatron)])
def test_weights_that_do_not_fit_their_config_are_refused(
    teams: Teams, models: dict[str, Path], tmp_path: Path, engine: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models["qwen3-tied"], broken)
    config = json.loads((broken / "config.json").read_text())
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (broken / "config.json").write_text(json.dumps({**config, **layers}))
    says = "missing keys model.layers.4."
    teams.of(1).all_fail("ConfigError", says, "setup", model=broken, trainer={"engine": engine})
