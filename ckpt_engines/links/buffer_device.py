"""The device on which the buffers of an engine are kept."""

from __future__ import annotations

import torch

from ..contract.engine import CheckpointEngine
from ..errors import ConfigError
from ..runtime.devices import HOST, checked_device


def buffer_device(engine: CheckpointEngine, preferred: torch.device | None, part: str) -> torch.device:
    """Return `preferred`, the device of the weights, if `engine` carries its memory, else the CPU.

    Raises `ConfigError` when the engine carries neither memory, or when `preferred` is an accelerator without index.
    """
    devices = engine.capabilities.devices
    if preferred is not None and preferred.type in devices:
        return checked_device(preferred, part)
    if HOST.type in devices:
        return HOST
    where = "on no device that was named" if preferred is None else f"on {preferred}"
    raise ConfigError(
        f"the weights are {where}, and the engine carries {' and '.join(sorted(devices))} memory only.",
        part=part,
        hint="Choose an engine that carries the memory in which the weights are: checkpoint_engine.backend.",
    )
