"""Training engines by name, from the entry-point group ``weightlane.training_engines``."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from weightlane.ckpt_engines import ConfigError

from ..config import TrainerConfig
from .contract import TrainingEngine

GROUP = "weightlane.training_engines"
_PART = "training engine registry"


def training_engine_names() -> list[str]:
    """List every registered name, sorted. Imports no engine."""
    return sorted({entry_point.name for entry_point in entry_points(group=GROUP)})


def training_engine_class(name: str) -> type[TrainingEngine]:
    """Return the engine class that is registered as `name`.

    Raises `ConfigError` when no distribution or more than one offers it, when it cannot be imported, or when it is not a
    complete `TrainingEngine`.
    """
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        known = training_engine_names()
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(
            f"no training engine is called {name!r}.",
            part=_PART,
            hint=f"{guess}Installed: {', '.join(known) or 'none'}.",
        )
    if len(found) > 1:
        owners = " and ".join(sorted(f"{_owner(entry_point)} {entry_point.value}" for entry_point in found))
        raise ConfigError(
            f"{name!r} is registered twice, as {owners}.", part=_PART, hint="Uninstall one of the distributions."
        )
    (entry_point,) = found
    try:
        loaded = entry_point.load()
    except Exception as cause:
        raise ConfigError(
            f"training engine {name!r} could not be imported from {entry_point.value}: {type(cause).__name__}: {cause}.",
            part=_PART,
            hint=f"Install what it needs, for example: pip install 'weightlane[{_extra_for(entry_point)}]'.",
        ) from cause
    if not (isinstance(loaded, type) and issubclass(loaded, TrainingEngine)):
        raise ConfigError(f"{name!r} ({entry_point.value}) is not a TrainingEngine class.", part=_PART)
    if missing := sorted(loaded.__abstractmethods__):
        raise ConfigError(f"{name!r} ({entry_point.value}) does not implement {', '.join(missing)}.", part=_PART)
    return loaded


def check_trainer(config: TrainerConfig, model_dir: Path, *, here: bool = True) -> None:
    """Raise the `ConfigError` with which ranks of `config` would refuse the model in `model_dir`.

    Starts no process, and reads no weights. With `here`, the ranks will run on this machine, which must have their device.
    """
    engine_class = training_engine_class(config.engine)
    settings = config if here else config.model_copy(update={"device": "auto"})
    engine = engine_class(settings, 0, config.ranks, ("", 0))  # it connects to nothing yet
    try:
        if config.offload_roles and engine_class.offload is TrainingEngine.offload:
            engine.offload()
    finally:
        engine.close()
    engine_class.check(config, model_dir)


def _owner(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else "an unknown distribution"


def _extra_for(entry_point: EntryPoint) -> str:
    """Name the extra that installs an engine's libraries: the one of its name if its distribution has that, else ``hf``."""
    offered = (entry_point.dist.metadata.get_all("Provides-Extra") or []) if entry_point.dist else []
    return entry_point.name if entry_point.name in offered else "hf"
