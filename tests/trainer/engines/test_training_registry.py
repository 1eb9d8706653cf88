"""Training engines by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from installed import install

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.config import LoraConfig, TrainerConfig
from weightlane.trainer.engines.contract import TrainingEngine, with_adapters
from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine
from weightlane.trainer.engines.registry import training_engine_class


def test_a_built_in_engine_is_found_by_its_entry_point_and_names_its_extra_where_it_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert training_engine_class("fsdp2") is Fsdp2Engine
    monkeypatch.setitem(sys.modules, "weightlane.trainer.engines.megatron.engine", None)
    with pytest.raises(ConfigError, match="'megatron' could not be imported") as refused:
        training_engine_class("megatron")
    assert "pip install 'weightlane[megatron]'" in refused.value.hint


def test_an_engine_that_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points = (
        "absent = no_such_package_here.engine:Engine\n"
        "wrong = pathlib:Path\n"
        "partial = weightlane.trainer.engines.contract:TrainingEngine\n"
        "fsdp2 = other_engines:Fsdp2Engine"
    )
    install(tmp_path, "other_engines", "", entry_points, "weightlane.training_engines")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, problem in (
        ("fsdp", r"'fsdp'\. Did you mean 'fsdp2'\? Installed: .*fsdp2"),
        ("absent", "could not be imported from no_such_package_here.engine:Engine: ModuleNotFoundError"),
        ("wrong", r"\(pathlib:Path\) is not a TrainingEngine class"),
        ("partial", "does not implement close, export_hf, forward, forward_backward"),
        ("fsdp2", "is registered twice, as other_engines other_engines:Fsdp2Engine and weightlane"),
    ):
        with pytest.raises(ConfigError, match=problem) as refused:
            training_engine_class(name)
        if name == "absent":
            assert refused.value.hint == "Install what it needs, or reinstall other_engines."


def test_what_an_engine_need_not_implement_is_refused_in_its_name() -> None:
    plain = type("Plain", (TrainingEngine,), dict.fromkeys(TrainingEngine.__abstractmethods__))
    with pytest.raises(ConfigError, match=r"Plain has no adapters, for which trainer\.lora asks"):
        plain(TrainerConfig(lora=LoraConfig()), 0, 1, ("", 0))
    engine = plain(TrainerConfig(), 0, 1, ("", 0))
    with pytest.raises(ConfigError, match="'fsdp2' cannot say what its ranks hold without running"):
        engine.outline(Path())
    with pytest.raises(ConfigError, match="Plain has no adapters, for which a asks"):
        with_adapters(engine, "a")
