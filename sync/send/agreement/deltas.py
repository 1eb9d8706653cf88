"""Trainer ranks agree on a delta: each rank publishes its segments, and every rank that sends collects those of all ranks.

Rank 0 needs them for the manifest. If rank 0 gathers, the other ranks need them for the places of their own segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...version.manifest_message import DeltaSegment, segments_from_plain

DELTAS = "delta segments"
"""Topic of the segments in `RankAgreement`."""


def delta_to_plain(base_version: int, segments: Sequence[DeltaSegment]) -> list[Any]:
    """A rank's segments, and the version that they apply to, as JSON. A rank without a delta publishes None instead."""
    return [base_version, [segment.to_plain() for segment in segments]]


def all_segments(values: Iterable[Any], base_version: int) -> list[tuple[DeltaSegment, ...]]:
    """The segments of every rank, in rank order; empty unless every rank has a delta against `base_version`.

    Raises `ProtocolError` for invalid segments.
    """
    segments: list[tuple[DeltaSegment, ...]] = []
    for plain in values:
        if not isinstance(plain, list) or len(plain) != 2 or plain[0] != base_version:  # noqa: PLR2004 - version and segments
            return []
        segments.append(segments_from_plain(plain[1]))
    return segments
