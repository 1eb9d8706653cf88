"""`RankModel`: one rank's vLLM model, with everything that is needed to load tensors into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank's model."""

    model: torch.nn.Module
    config: Any
    """The vLLM configuration of `model`."""
    device: torch.device
    part: str
    """Name of the rank for error messages."""
