"""Trainer ranks agree on the scale of a block that is divided between them: each publishes the largest magnitude of its part.

Until then the elements of such blocks are in the ranks' `PendingBlocks.cuts`. A rank publishes one number for each such block.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import torch

from weightlane.ckpt_engines import ProtocolError

from ...version.box import Box
from ..snapshot.quantised_blocks import Magnitudes

MAGNITUDES = "block magnitudes"
"""Topic of the magnitudes in `RankAgreement`."""


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
