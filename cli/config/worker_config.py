"""The configuration of ``weightlane worker``: the sections of a run that say what is trained, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.sync import CheckpointEngineConfig, SyncConfig
from weightlane.sync.plan.links import check_relay
from weightlane.trainer.algorithms.composition import rank_groups
from weightlane.trainer.config import Section, TrainerConfig
from weightlane.trainer.objectives.config import AlgorithmConfig, CriticConfig, ReferenceConfig
from weightlane.trainer.runner.job_queue.ledger import LEASE_S

from .colocation import refuse_colocation
from .run_config import ModelSection, ObserversSection, RaySection, check_observers
from .validation import read_config

_PART = "configuration"


class WorkerSection(Section):
    """Settings of the worker itself."""

    seed: int = Field(0, ge=0, description="Seed of every rank's random generators.")
    attempts: int = Field(
        3,
        ge=1,
        description="How many workers may end while they execute a job; it is set aside then, and others go on.",
    )
    dir: Path | None = Field(
        None,
        description="Directory of the worker's logs and observers; by default workers/ in the directory of the jobs.",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict, description="For jobs in an object store: arguments of s3fs, such as endpoint_url."
    )
    lease_s: float = Field(
        LEASE_S,
        ge=1,
        description="For jobs in an object store: seconds without a sign of life after which another worker takes over.",
    )


class RolloutsSection(Section):
    """Servers that the worker publishes to: vLLM servers with weightlane's plugin, which somebody else starts."""

    servers: tuple[str, ...] = Field((), description="Their addresses, e.g. http://127.0.0.1:8000.")
    tensor_parallel: int = Field(1, ge=1, description="Ranks of each server, its --tensor-parallel-size.")
    take_over: bool = Field(
        False, description="Take servers from another publisher that is alive, such as a worker that was stopped."
    )


class WorkerConfig(Section):
    """The configuration of ``weightlane worker``."""

    worker: WorkerSection
    model: ModelSection
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    checkpoint_engine: CheckpointEngineConfig | None = Field(
        None, description="The engine of Publish jobs; without it they fail."
    )
    sync: SyncConfig = SyncConfig()
    rollouts: RolloutsSection = RolloutsSection()
    ray: RaySection = RaySection()
    observers: ObserversSection = ObserversSection()

    @property
    def rank_groups(self) -> dict[str, TrainerConfig]:
        """The groups of trainer ranks by name, with their engine settings. The policy's is the first one."""
        return rank_groups(self.algorithm, self.trainer, self.critic, self.reference)


def load_worker_config(path: Path, overrides: Sequence[str] = ()) -> WorkerConfig:
    """Read a TOML file, apply ``a.b=c`` overrides, and validate them. Raises `ConfigError` as `load_sft_config`."""
    config = read_config(path, overrides, WorkerConfig)
    trainer = config.trainer.model_copy(update={"router_replay": config.algorithm.router_replay})
    config = config.model_copy(update={"trainer": trainer})
    refuse_colocation(config.trainer, "worker")
    check_observers(config.observers)
    _check_publishing(config)
    return config


def _check_publishing(config: WorkerConfig) -> None:
    """Raise `ConfigError` for an engine with wrong options, or with nobody to publish to."""
    engine, servers = config.checkpoint_engine, config.rollouts.servers
    if engine is None:
        if servers:
            raise ConfigError(
                "rollouts.servers are given, and no engine to publish to them with.",
                part=_PART,
                hint='Add a section [checkpoint_engine], for example with backend = "shm".',
            )
        return
    registry = CheckpointEngineRegistry()
    capabilities = registry.engine_class(engine.backend).capabilities
    check_relay(config.sync.relay, engine.backend, capabilities)
    registry.validate_options(engine.backend, engine.options)
    if not servers and not capabilities.persistent:
        raise ConfigError(
            f"checkpoint_engine {engine.backend!r} keeps no versions, and there are no rollouts to send them to.",
            part=_PART,
            hint="List servers in rollouts.servers, or choose an engine that keeps versions: filesystem.",
        )
    if capabilities.persistent and config.sync.codec != "dense":
        raise ConfigError(
            f"sync.codec = {config.sync.codec} sends versions that {engine.backend} does not keep.",
            part=_PART,
            hint="Leave out sync.codec.",
        )
    if servers and config.trainer.lora is not None and config.trainer.lora.publish == "adapter":
        raise ConfigError(
            "rollouts.servers take weights, and trainer.lora.publish is adapter.",
            part=_PART,
            hint='Set trainer.lora.publish to "merged".',
        )
