"""The configuration of ``weightlane tinker``: sections of a run without data, reward and loop, and the service's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout.config import AdapterConfig
from weightlane.trainer.config import LoraConfig
from weightlane.trainer.objectives.config import AlgorithmConfig
from weightlane.trainer.service.config import ServiceConfig

from .colocation import refuse_colocation
from .run_config import ClusterConfig, check_sections, refuse_for_adapters, with_store_in_run_dir
from .validation import read_config

_PART = "configuration"


class TinkerConfig(ClusterConfig):
    """The configuration of ``weightlane tinker``."""

    service: ServiceConfig = ServiceConfig()


def load_tinker_config(path: Path, overrides: Sequence[str] = ()) -> TinkerConfig:
    """Read a TOML file as `load_config` does, and fill in the settings that follow from the service's limits."""
    config = with_store_in_run_dir(read_config(path, overrides, TinkerConfig))
    refuse_colocation(config.trainer, "tinker")
    if config.algorithm != AlgorithmConfig():
        raise ConfigError("[algorithm] is no section of a service: clients say what they train with.", part=_PART)
    if config.rollout.autoscale:
        raise ConfigError(
            "rollout.autoscale is for runs: a service keeps its replicas.", part=_PART, hint="Leave it out."
        )
    if config.trainer.lora is not None:
        raise ConfigError(
            "[trainer.lora] is no section of a service.",
            part=_PART,
            hint="Leave it out: clients say which adapters they train, up to service.max_lora_rank.",
        )
    if config.trainer.head != "tokens":
        raise ConfigError(
            f"trainer.head is {config.trainer.head}, and such a model could not be sampled from.",
            part=_PART,
            hint="Leave it out.",
        )
    service = config.service
    if service.trains == "all_weights":
        check_sections(config)
        return config
    refuse_for_adapters(config.sync, config.rollout, "service.trains is adapters", 'service.trains to "all_weights"')
    # Versions of all adapters are sent in the tensors of one adapter with the largest rank and all layers that can have one.
    lora = LoraConfig(rank=service.max_lora_rank, alpha=service.lora_alpha, publish="adapter")
    adapter = AdapterConfig(rank=lora.rank, alpha=lora.alpha)
    config = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"lora": lora, "frozen": True}),
            "rollout": config.rollout.model_copy(update={"adapter": adapter}),
        }
    )
    check_sections(config)
    return config


def as_written(config: TinkerConfig) -> TinkerConfig:
    """The configuration as a file may have it: without the settings that `load_tinker_config` fills in."""
    return config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"lora": None, "frozen": False}),
            "rollout": config.rollout.model_copy(update={"adapter": None}),
        }
    )
