"""Values that trainer ranks agree on by `RankAgreement`, as JSON: each topic, and what a rank publishes for it.

- Codec (`DENSITIES`): how many of its elements the version before has changed.
- Delta (`DELTAS`): its segments. Rank 0 needs those of all ranks for the manifest. If rank 0 gathers, the others need them for
  the places of their own.
- Scales of blocks that are divided between ranks (`MAGNITUDES`): the largest magnitude of its part of each. Until these are known
  the elements of such blocks are in the rank's `PendingBlocks.cuts`.
- Equal copies (`DIGESTS`): see `ReplicatedShards`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

import torch

from weightlane.ckpt_engines import ProtocolError

from ...codecs.codec_choice import RankChange
from ...version.box import Box
from ...version.manifest_message import DeltaSegment, segments_from_plain
from ..snapshot.quantised_blocks import Magnitudes

DENSITIES = "changed elements"
DELTAS = "delta segments"
MAGNITUDES = "block magnitudes"
DIGESTS = "digests of equal shards"


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


def magnitudes_to_plain(mine: Iterable[Magnitudes]) -> list[Any]:
    """A rank's magnitudes as JSON."""
    return [
        [
            each.name,
            *each.blocks.to_plain(),
            base64.b64encode(each.values.cpu().contiguous().numpy().tobytes()).decode(),
        ]
        for each in mine
    ]


def magnitudes_from_plain(values: Any) -> list[Magnitudes]:
    """Parse another rank's magnitudes; raises `ProtocolError` for anything else."""
    if not isinstance(values, list):
        raise ProtocolError("not a list of magnitudes.", part=MAGNITUDES)
    return [_parsed(plain) for plain in values]


def _parsed(plain: Any) -> Magnitudes:
    try:
        name, starts, shape, values = plain
        blocks = Box.from_plain([starts, shape])
        numbers = torch.frombuffer(bytearray(base64.b64decode(values, validate=True)), dtype=torch.float32)
        return Magnitudes(str(name), blocks, numbers.view(blocks.shape))
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ProtocolError(f"not magnitudes: {cause}.", part=MAGNITUDES) from None


def digests_from_plain(values: Any) -> dict[int, str]:
    """Parse the digests of a rank, a list of pairs; raises `ProtocolError` for anything else."""
    try:
        return {int(number): str(digest) for number, digest in values}
    except (TypeError, ValueError) as cause:
        raise ProtocolError(f"not a list of digests: {cause}.", part=DIGESTS) from None
