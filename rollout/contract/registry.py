"""Rollout engines by name, from the entry-point group ``weightlane.rollout_engines``."""

from __future__ import annotations

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.registered_class import registered_class

from ..config import RolloutConfig
from .engine import RolloutCapabilities, RolloutEngine

GROUP = "weightlane.rollout_engines"


def registered_rollout_engine(name: str) -> type[RolloutEngine]:
    """Return the engine class that is registered as `name`. Raises `ConfigError` as `registered_class`."""
    return registered_class(GROUP, name, RolloutEngine, what="rollout engine", extra="hf")  # type: ignore[type-abstract]


def rollout_engine_class(config: RolloutConfig, unregistered: type[RolloutEngine] | None = None) -> type[RolloutEngine]:
    """Return the class of the engine that `config` names, or `unregistered` in its place.

    Raises:
        ConfigError: There is no such engine, or it cannot do what `config` asks for.
    """
    engine = unregistered or registered_rollout_engine(config.engine)
    if refused := missing_capabilities(config, engine.capabilities):
        raise ConfigError(
            f"{config.engine} does not do what is asked for: {', '.join(refused)}.",
            part="rollout engine registry",
            hint="Change these keys, or rollout.engine; `weightlane engines` lists what each engine does.",
        )
    return engine


def missing_capabilities(config: RolloutConfig, can: RolloutCapabilities) -> list[str]:
    """Name the settings of `config` that an engine with these capabilities does not take."""
    wants = {
        f"commit = {config.commit!r}": config.commit not in can.commit_modes,
        f"tensor_parallel = {config.tensor_parallel}": config.tensor_parallel > 1 and not can.tensor_parallel,
        f"sizes = {list(config.sizes)}": max(config.sizes, default=1) > 1 and not can.tensor_parallel,
        "versions that are adapters": config.adapter is not None and not can.adapters,
        f"kv_on_commit = {config.kv_on_commit!r}": config.kv_on_commit == "keep" and not can.keeps_caches,
        "trainer.colocate, for which replicas sleep": config.sleeps and not can.sleeps,
        "algorithm.router_replay, for which vllm and transformers return the experts of each token": (
            config.routed_experts and not can.routed_experts
        ),
        "extra_engine_args": bool(config.extra_engine_args) and not can.extra_arguments,
    }
    return [name for name, refused in wants.items() if refused]
