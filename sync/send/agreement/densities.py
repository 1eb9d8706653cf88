"""Trainer ranks agree whether a version is a delta: each says how much the version before has changed of its elements."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from weightlane.ckpt_engines import ProtocolError

from ...codecs.codec_choice import RankChange

DENSITIES = "changed elements"
"""The topic."""


def change_to_plain(change: RankChange | None) -> list[Any] | None:
    """A rank's change as JSON."""
    return None if change is None else list(astuple(change))


def change_from_plain(said: Any) -> RankChange | None:
    """Parse what another rank says; `ProtocolError` for anything else."""
    if said is None:
        return None
    try:
        changed, compared, elements, sparse = said
        return RankChange(int(changed), int(compared), int(elements), bool(sparse))
    except (TypeError, ValueError, OverflowError) as cause:
        raise ProtocolError(f"not a count of changed elements: {cause}.", part=DENSITIES) from None
