"""What there is to compute with: the device on which an engine's buffers are kept, and cores."""

from __future__ import annotations

import os

import torch

from weightlane.ckpt_engines import CheckpointEngine


def buffer_device(engine: CheckpointEngine, preferred: torch.device | None) -> torch.device:
    """`preferred` (where the weights live) if `engine` carries that memory, else the CPU, else the engine's own kind."""
    devices = engine.capabilities.devices
    if preferred is not None and preferred.type in devices:
        return preferred
    return torch.device("cpu" if "cpu" in devices else min(devices))


def usable_cpus() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
