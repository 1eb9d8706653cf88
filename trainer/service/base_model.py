"""`BaseModel`: the model that clients train, or train adapters of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that clients train, or train adapters of."""

    name: str
    """The name that clients ask for."""
    architecture: str
    directory: Path
    """Hugging Face directory, readable on every trainer rank. Clients get it as the tokenizer's name."""
    vocabulary: int
    max_length: int
    """Most tokens of one sequence."""
    eos_ids: Sequence[int]
    layers: Mapping[str, str]
    """``attention`` or ``mlp`` for each linear layer in decoder layers, by the last part of its name."""
