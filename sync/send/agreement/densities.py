"""Trainer ranks agree whether a version is a delta: each publishes how many of its elements the version before has changed."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from weightlane.ckpt_engines import ProtocolError

from ...codecs.codec_choice import RankChange

DENSITIES = "changed elements"
"""Topic of the counts of changed elements in `RankAgreement`."""


def change_to_plain(change: RankChange | None) -> list[Any] | None:
    """A rank's counts as JSON; None if it has none."""
    return None if change is None else list(astuple(change))


def change_from_plain(values: Any) -> RankChange | None:
    """Parse the counts of another rank; raises `ProtocolError` for anything else."""
    if values is None:
        return None
    try:
        changed, compared, elements, sparse = values
        return RankChange(int(changed), int(compared), int(elements), bool(sparse))
    except (TypeError, ValueError, OverflowError) as cause:
        raise ProtocolError(f"not a count of changed elements: {cause}.", part=DENSITIES) from None
