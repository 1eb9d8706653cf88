"""The configuration of a run: a TOML file with typed keys."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError, Deadline, Delivery, WeightlaneError
from weightlane.plugins.profiler import ProfileSettings
from weightlane.plugins.prometheus import LOOPBACK, PROMETHEUS_TOKEN_ENV, is_loopback
from weightlane.plugins.trackers import TRACKERS
from weightlane.rollout.config import AdapterConfig, RolloutConfig
from weightlane.sync import CheckpointEngineConfig, SyncConfig
from weightlane.sync.plan.links import check_relay
from weightlane.trainer.algorithms.composition import rank_groups
from weightlane.trainer.config import DataConfig, EnvironmentConfig, RewardConfig, Section, TrainerConfig
from weightlane.trainer.dispatch.role_spec import POLICY_GROUP
from weightlane.trainer.loop.config import LoopConfig
from weightlane.trainer.objectives.config import AlgorithmConfig, CriticConfig, ReferenceConfig

from ..extras import how_to_install
from .colocation import check_colocation
from .validation import read_config

VERSIONS_DIR = "versions"
"""Directory inside the run directory for an engine that needs one and has none configured."""

_PART = "configuration"
_CHECK_S = 20.0
"""Seconds in which an engine has to find out whether it works here. Some load libraries or contact a store for that."""


class ModelSection(Section):
    """The model that is trained."""

    path: str = Field(
        min_length=1,
        description="Hugging Face directory of a causal language model with its tokenizer, or a model's name on the hub,"
        " such as Qwen/Qwen3-0.6B, which is read from the local cache or downloaded into it.",
    )


class RunSection(Section):
    """The run's directory and seed."""

    dir: Path = Field(description="Directory of the run's files; must be new, or hold a run to resume (--resume).")
    seed: int = Field(0, ge=0, description="Seed of the order of tasks and of every rank's random generators.")


class RaySection(Section):
    """The Ray cluster that trainer ranks and rollout replicas run on."""

    address: str = Field("", description="Address of a running Ray cluster; empty starts one on this machine.")
    start_timeout_s: float = Field(
        120.0,
        ge=30,
        description="Seconds in which a Ray on this machine has to start; at least 30, since Ray itself waits that long.",
    )


class ObserversSection(Section):
    """Observers of a run beside the display and metrics.jsonl; by default none."""

    trace: Path | None = Field(
        None, description="Path of a Chrome/Perfetto trace, relative to run.dir; a number is added if it exists."
    )
    trace_limit_mib: float = Field(32.0, gt=0, description="Most MiB of events that each process adds to the trace.")
    tensorboard: Path | None = Field(None, description="Directory of TensorBoard event files, relative to run.dir.")
    prometheus_port: int | None = Field(
        None, ge=0, le=65535, description="Port of an HTTP endpoint for Prometheus; 0 chooses a free one and prints it."
    )
    prometheus_host: str = Field(
        LOOPBACK,
        min_length=1,
        description=f"Address of that endpoint; if not loopback, {PROMETHEUS_TOKEN_ENV} must hold a bearer token.",
    )
    wandb: str | None = Field(None, min_length=1, description="Project of Weights & Biases to log the run to.")
    mlflow: str | None = Field(None, min_length=1, description="Experiment of MLflow to log the run to.")
    trackio: str | None = Field(None, min_length=1, description="Project of trackio to log the run to.")
    profile: ProfileSettings = Field(ProfileSettings(), description="Steps and ranks that torch.profiler records.")


class ClusterConfig(Section):
    """The sections that runs and services share, which train on ranks and generate on replicas."""

    run: RunSection
    model: ModelSection
    algorithm: AlgorithmConfig = AlgorithmConfig()
    checkpoint_engine: CheckpointEngineConfig = CheckpointEngineConfig()
    sync: SyncConfig = SyncConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    ray: RaySection = RaySection()
    observers: ObserversSection = ObserversSection()

    @property
    def rank_groups(self) -> dict[str, TrainerConfig]:
        """The groups of trainer ranks by name, with their engine settings. The policy's is the first one."""
        return {POLICY_GROUP: self.trainer}


class RunConfig(ClusterConfig):
    """The configuration of ``weightlane train``."""

    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    loop: LoopConfig = LoopConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()

    @property
    def rank_groups(self) -> dict[str, TrainerConfig]:
        """See `ClusterConfig.rank_groups`."""
        return rank_groups(self.algorithm, self.trainer, self.critic, self.reference)


_Config = TypeVar("_Config", bound=ClusterConfig)


def load_config(path: Path, overrides: Sequence[str] = (), *, runs_here: bool = True) -> RunConfig:
    """Read a TOML file, apply ``a.b=c`` overrides, and validate them. With `runs_here` the checkpoint engine must run here.

    Raises `ConfigError`, which names the file and line of a syntax error, or a wrong key and the nearest valid one.
    """
    config = _with_sleep(_with_adapter(with_store_in_run_dir(read_config(path, overrides, RunConfig))))
    if config.algorithm.router_replay:
        rollout = config.rollout.model_copy(update={"routed_experts": True})
        trainer = config.trainer.model_copy(update={"router_replay": True})
        config = config.model_copy(update={"rollout": rollout, "trainer": trainer})
    _check_together(config, runs_here=runs_here)
    return config


def wire_dtype(config: ClusterConfig, computes: str) -> str:
    """Return the dtype of floating-point tensors on the wire: the configured one, or `computes`.

    `computes` is the dtype that vLLM chose to compute in. It may differ from the checkpoint's, such as bfloat16 for float32.
    """
    configured: str = config.sync.wire_dtype
    return computes if configured == "auto" else configured


def check_engine(config: ClusterConfig) -> None:
    """Raise `ConfigError` if the configured checkpoint engine would not work on this machine."""
    engine = config.checkpoint_engine
    try:
        CheckpointEngineRegistry().create(engine.backend, engine.options).check(Deadline.after(_CHECK_S))
    except WeightlaneError as error:
        raise ConfigError(f"checkpoint_engine {engine.backend!r} does not work here: {error}", part=_PART) from error


def with_store_in_run_dir(config: _Config) -> _Config:
    """Give an engine that needs a directory, and has none configured, one in the run's directory, which all machines share."""
    engine = CheckpointEngineRegistry().engine_class(config.checkpoint_engine.backend)
    options = config.checkpoint_engine.options
    if Delivery.STORE not in engine.capabilities.delivery or "path" in options:
        return config
    field = engine.config_type.model_fields.get("path")
    if field is None or not field.is_required():
        return config
    options = {**options, "path": str(config.run.dir.resolve() / VERSIONS_DIR)}
    with_path = config.checkpoint_engine.model_copy(update={"options": options})
    return config.model_copy(update={"checkpoint_engine": with_path})


def _with_adapter(config: RunConfig) -> RunConfig:
    """Fill in ``rollout.adapter`` if versions are adapters. Raises `ConfigError` for settings that only apply to weights."""
    lora, rollout = config.trainer.lora, config.rollout
    if lora is None or lora.publish != "adapter":
        return config
    adapter = AdapterConfig(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    refuse_for_adapters(config.sync, rollout, "trainer.lora.publish is adapter", 'trainer.lora.publish to "merged"')
    return config.model_copy(update={"rollout": rollout.model_copy(update={"adapter": adapter})})


def _with_sleep(config: RunConfig) -> RunConfig:
    """Fill in ``rollout.sleeps`` if trainer and rollouts take turns. Raises `ConfigError` for settings that contradict that."""
    if not config.trainer.colocate:
        return config
    rollout = check_colocation(config.checkpoint_engine, config.sync, config.rollout, config.loop)
    return config.model_copy(update={"rollout": rollout})


def _check_together(config: RunConfig, *, runs_here: bool) -> None:
    """Check values that depend on several sections, and the engine's options by the engine's own config type."""
    check_sections(config, runs_here=runs_here)
    if config.environment.name is None and config.environment != EnvironmentConfig():
        raise ConfigError(
            "[environment] has settings, and no name.",
            part=_PART,
            hint="Set environment.name, or leave the section out.",
        )
    if config.environment.name is None and config.reward.function is None:
        raise ConfigError(
            "reward.function is missing: nothing would judge a completion.",
            part=_PART,
            hint="Set it to 'module:function', or name an environment that judges its episodes.",
        )
    if config.environment.name and config.algorithm.overlong == "penalty":
        raise ConfigError(
            "algorithm.overlong = penalty is for completions of one turn, and episodes of an environment have several.",
            part=_PART,
            hint='Set algorithm.overlong to "mask" or "drop".',
        )
    if config.algorithm.max_new_tokens >= config.rollout.max_model_len:
        raise ConfigError(
            f"rollout.max_model_len ({config.rollout.max_model_len}) is not above algorithm.max_new_tokens"
            f" ({config.algorithm.max_new_tokens}), so a prompt has no room.",
            part=_PART,
            hint="Raise rollout.max_model_len to the length of the longest prompt plus its completion.",
        )
    if config.reference.refresh_every and not config.algorithm.needs_reference:
        raise ConfigError(
            "reference.refresh_every is set, and algorithm.kl_coefficient is 0: the run has no reference.",
            part=_PART,
            hint="Raise algorithm.kl_coefficient, or leave reference.refresh_every out.",
        )
    if (needed := config.observers.profile.all_steps) > config.loop.steps:
        raise ConfigError(
            f"the run ends after loop.steps ({config.loop.steps}), and observers.profile has its traces after {needed} steps.",
            part=_PART,
            hint="Raise loop.steps, or lower steps, wait or warmup of observers.profile.",
        )
    if config.rollout.concurrency < config.algorithm.group_size:
        raise ConfigError(
            f"rollout.concurrency ({config.rollout.concurrency}) is below algorithm.group_size"
            f" ({config.algorithm.group_size}).",
            part=_PART,
            hint="A replica generates whole groups. Raise rollout.concurrency.",
        )


def check_sections(config: ClusterConfig, *, runs_here: bool = True) -> None:
    """Check the checkpoint engine's options by its own config type, the observers and the sync. Raises `ConfigError`."""
    if config.rollout.commit == "in_place" and config.sync.quantise != "none":
        raise ConfigError(
            f"rollout.commit = in_place cannot restore weights that are sent as {config.sync.quantise} (sync.quantise).",
            part=_PART,
            hint='Set rollout.commit to "staged", or sync.quantise to "none".',
        )
    if config.rollout.commit == "in_place" and config.sync.relay != "off":
        raise ConfigError(
            f"rollout.commit = in_place has no memory in which a rollout could relay (sync.relay = {config.sync.relay}).",
            part=_PART,
            hint='Set rollout.commit to "staged", or sync.relay to "off".',
        )
    registry, engine = CheckpointEngineRegistry(), config.checkpoint_engine
    check_relay(config.sync.relay, engine.backend, registry.engine_class(engine.backend).capabilities)
    if config.ray.address or not runs_here:  # this machine need not have the accelerators of the cluster
        registry.validate_options(engine.backend, engine.options)
    else:
        registry.create(engine.backend, engine.options)
    check_observers(config.observers)


def refuse_for_adapters(sync: SyncConfig, rollout: RolloutConfig, publishes: str, instead: str) -> None:
    """Raise `ConfigError` for settings that only apply to versions of weights.

    `publishes` names the setting that makes versions adapters, in words; `instead` the setting and value that would make them
    weights.
    """
    for refused, key, value in (
        (sync.quantise != "none", "sync.quantise", sync.quantise),
        (rollout.commit == "in_place", "rollout.commit", rollout.commit),
        (rollout.expert_parallel, "rollout.expert_parallel", "true"),
    ):
        if refused:
            raise ConfigError(
                f"{key} = {value} is for versions of weights, and {publishes}.",
                part=_PART,
                hint=f"Leave out {key}, or set {instead}.",
            )


def check_observers(observers: ObserversSection) -> None:
    """Raise `ConfigError` for an observer whose library is missing, or that other machines could reach without a token."""
    needs = {
        "tensorboard": "tensorboardX",
        "prometheus_port": "prometheus_client",
        **{name: tracker.library for name, tracker in TRACKERS.items()},
    }
    for key, module in needs.items():
        if getattr(observers, key) is not None and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"observers.{key} needs {module}, which is not installed.", part=_PART, hint=how_to_install(module)
            )
    served = observers.prometheus_port is not None
    if served and not is_loopback(observers.prometheus_host) and not os.environ.get(PROMETHEUS_TOKEN_ENV):
        raise ConfigError(
            f"observers.prometheus_host is {observers.prometheus_host}, which other machines can reach.",
            part=_PART,
            hint=f"Set the environment variable {PROMETHEUS_TOKEN_ENV} to a token that clients must send.",
        )
