"""`BaseModel`: the model that clients train adapters of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that clients train adapters of."""

    name: str
    """Clients ask for it by this."""
    architecture: str
    tokenizer: str
    """Where clients can load its tokenizer from: a directory, or a name on the hub."""
    vocabulary: int
    max_length: int
    """Most tokens of a sequence."""
    eos_ids: Sequence[int]
    layers: Mapping[str, str]
    """``attention`` or ``mlp`` for each linear layer in decoder layers, by the last part of its name."""
