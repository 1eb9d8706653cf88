"""Trainer ranks agree on a delta: each says its segments, and every rank that needs the whole delta hears all of them.

Rank 0 needs the segments for the manifest. In a gathering session the other ranks need them, too, to know where theirs belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...version.manifest_message import DeltaSegment, segments_from_plain

DELTAS = "delta segments"
"""The topic."""


def delta_to_plain(base_version: int, segments: Sequence[DeltaSegment]) -> list[Any]:
    """A rank's segments, and the version that they apply to, as JSON. A rank without a delta says None instead."""
    return [base_version, [segment.to_plain() for segment in segments]]


def all_segments(said: Iterable[Any], base_version: int) -> list[tuple[DeltaSegment, ...]]:
    """The segments of every rank, in rank order; none at all unless every rank has a delta to `base_version`.

    Raises `ProtocolError` for anything but segments.
    """
    segments: list[tuple[DeltaSegment, ...]] = []
    for plain in said:
        if not isinstance(plain, list) or len(plain) != 2 or plain[0] != base_version:  # noqa: PLR2004 - version and segments
            return []
        segments.append(segments_from_plain(plain[1]))
    return segments
