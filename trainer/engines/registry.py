"""Training engines by name, from the entry-point group ``weightlane.training_engines``."""

from __future__ import annotations

from pathlib import Path

from weightlane.ckpt_engines.registered_class import registered_class

from ..config import TrainerConfig
from .contract import TrainingEngine

GROUP = "weightlane.training_engines"


def training_engine_class(name: str) -> type[TrainingEngine]:
    """Return the engine class that is registered as `name`. Raises `ConfigError` as `registered_class`."""
    return registered_class(GROUP, name, TrainingEngine, what="training engine", extra="hf")  # type: ignore[type-abstract]


def check_trainer(config: TrainerConfig, model_dir: Path, *, here: bool = True) -> None:
    """Raise the `ConfigError` with which ranks of `config` would refuse the model in `model_dir`.

    Starts no process, and reads no weights. With `here`, the ranks will run on this machine, which must have their device.
    """
    engine_class = training_engine_class(config.engine)
    settings = config if here else config.model_copy(update={"device": "auto"})
    engine = engine_class(settings, 0, config.ranks, ("", 0))  # it connects to nothing yet
    try:
        if (config.offload_roles or config.colocate) and engine_class.offload is TrainingEngine.offload:
            engine.offload()
    finally:
        engine.close()
    engine_class.check(config, model_dir)
