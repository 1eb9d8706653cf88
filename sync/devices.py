"""On which device an engine's buffers are kept."""

from __future__ import annotations

import torch

from weightlane.ckpt_engines import CheckpointEngine


def buffer_device(engine: CheckpointEngine, preferred: torch.device | None) -> torch.device:
    """`preferred` (where the weights live) if `engine` carries that memory, else the CPU, else the engine's own kind."""
    devices = engine.capabilities.devices
    if preferred is not None and preferred.type in devices:
        return preferred
    return torch.device("cpu" if "cpu" in devices else min(devices))
