"""Linear layers that have adapters, their parts on a rank, and the initial values of an adapter."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box

from ...config import LoraConfig

PART = "lora adapter"
DEFAULT = "default"
"""Name of the adapter of ``trainer.lora``; PEFT's default name, too."""
MATRICES = ("A", "B")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A linear layer, and the part of its A [rank, columns] and B [rows, rank] that this rank holds."""

    module: str
    """Hugging Face name, such as ``model.layers.0.self_attn.q_proj``."""
    rows: int
    """Number of outputs of the full layer."""
    columns: int
    """Number of inputs of the full layer."""
    held_rows: tuple[int, int]
    """First row of B on this rank, and number of rows."""
    held_columns: tuple[int, int]
    """First column of A on this rank, and number of columns."""
    partial: frozenset[str] = frozenset()
    """The `MATRICES` whose gradient must be summed over the ranks of tensor parallelism."""
    expert: bool = False
    """Whether it is a layer of one expert, of which other ranks of expert parallelism hold nothing."""

    @property
    def target(self) -> str:
        """The last part of the layer's name, as in `LoraConfig.targets`."""
        return self.module.rpartition(".")[2]

    def shape(self, matrix: str, rank: int) -> tuple[int, int]:
        """Return the shape of the full A or B of an adapter of rank `rank`."""
        return (rank, self.columns) if matrix == "A" else (self.rows, rank)

    def box(self, matrix: str, rank: int) -> Box:
        """Return the part of A or B that this rank holds."""
        if matrix == "A":
            return Box((0, self.held_columns[0]), (rank, self.held_columns[1]))
        return Box((self.held_rows[0], 0), (self.held_rows[1], rank))

    def splits(self, matrix: str) -> bool:
        """Whether ranks hold different parts of A or B."""
        held, whole = (self.held_columns, self.columns) if matrix == "A" else (self.held_rows, self.rows)
        return held[1] != whole


def check_name(name: str) -> None:
    """Raise `ConfigError` for a name that no adapter can have."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for an adapter.", part=PART, hint="Use letters, digits, dots, dashes and underscores."
        )


def chosen_sites(sites: Iterable[LoraSite], config: LoraConfig) -> list[LoraSite]:
    """Return those of `sites`, all of this rank's, that an adapter of this configuration has.

    Raises `ConfigError` if a target is none of the model's linear layers.
    """
    found = list(sites)
    known = sorted({site.target for site in found})
    for target in config.targets:
        if target not in known:
            near = difflib.get_close_matches(target, known, n=1)
            guess = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"the model has no linear layer {target!r} in its decoder layers that an adapter can be beside.",
                part=PART,
                hint=f"{guess}Possible targets: {', '.join(known) or 'none'}.",
            )
    if not found:
        raise ConfigError(
            "the model has no linear layers in its decoder layers, beside which adapters are.",
            part=PART,
            hint="Train the weights themselves.",
        )
    return [site for site in found if not config.targets or site.target in config.targets]


def initial_a(config: LoraConfig, site: LoraSite) -> torch.Tensor:
    """Return the initial value of a full A: float32 [rank, columns] on the CPU, Kaiming-uniform with PEFT's bounds.

    The generator is seeded by the adapter's seed and the layer's name, so the value depends neither on the rank nor on the
    adapter's name.
    """
    digest = hashlib.sha256(f"{config.seed}|default|{site.module}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    whole = torch.empty(config.rank, site.columns)
    return torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
