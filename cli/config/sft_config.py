"""The configuration of ``weightlane sft``: a TOML file with typed keys, most of them those of ``weightlane train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weightlane.trainer.config import Section, TrainerConfig
from weightlane.trainer.runner.sft_config import SftConfig, SftDataConfig

from .colocation import refuse_colocation
from .run_config import ModelSection, ObserversSection, RaySection, RunSection, check_observers
from .validation import read_config


class SftRunConfig(Section):
    """The configuration of ``weightlane sft``."""

    run: RunSection
    model: ModelSection
    data: SftDataConfig
    sft: SftConfig
    trainer: TrainerConfig = TrainerConfig()
    ray: RaySection = RaySection()
    observers: ObserversSection = ObserversSection()


def load_sft_config(path: Path, overrides: Sequence[str] = ()) -> SftRunConfig:
    """Read a TOML file, apply ``a.b=c`` overrides, and validate them.

    Raises `ConfigError`, which names the file and line of a syntax error, or a wrong key and the nearest valid one.
    """
    config = read_config(path, overrides, SftRunConfig)
    refuse_colocation(config.trainer, "sft")
    check_observers(config.observers)
    return config
