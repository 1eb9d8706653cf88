"""The configuration of ``weightlane worker``: the sections of a run that say what is trained, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from weightlane.trainer.algorithms.composition import rank_groups
from weightlane.trainer.config import Section, TrainerConfig
from weightlane.trainer.objectives.config import AlgorithmConfig, CriticConfig, ReferenceConfig

from .run_config import ModelSection, ObserversSection, RaySection, check_observers
from .validation import read_config


class WorkerSection(Section):
    """Settings of the worker itself."""

    seed: int = Field(0, ge=0, description="Seed of every rank's random generators.")


class WorkerConfig(Section):
    """The configuration of ``weightlane worker``."""

    worker: WorkerSection
    model: ModelSection
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    ray: RaySection = RaySection()
    observers: ObserversSection = ObserversSection()

    @property
    def rank_groups(self) -> dict[str, TrainerConfig]:
        """The groups of trainer ranks by name, with their engine settings. The policy's is the first one."""
        return rank_groups(self.algorithm, self.trainer, self.critic, self.reference)


def load_worker_config(path: Path, overrides: Sequence[str] = ()) -> WorkerConfig:
    """Read a TOML file, apply ``a.b=c`` overrides, and validate them. Raises `ConfigError` as `load_sft_config`."""
    config = read_config(path, overrides, WorkerConfig)
    check_observers(config.observers)
    return config
