"""Gather the ranks' parts of adapters on rank 0."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from weightlane.sync.version.box import Box

from ..rank_collectives import share_json
from .adapter import AdapterSlice


def gathered(slices: Iterable[AdapterSlice], rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the full tensors by key, on the CPU, on rank 0; an empty dict on other ranks. Collective over all ranks.

    The first rank that holds a part sends it. A rank sends all its parts in one message.
    """
    mine = list(slices)
    held = share_json([[piece.key, list(piece.shape), piece.box.to_plain()] for piece in mine], device)
    full: dict[str, torch.Tensor] = {}
    taken: set[str] = set()
    for owner, described in enumerate(held):
        fresh = [number for number, (key, _, box) in enumerate(described) if f"{key} {box}" not in taken]
        taken |= {f"{described[number][0]} {described[number][2]}" for number in fresh}
        if not fresh or rank not in (0, owner):
            continue
        boxes = [Box.from_plain(described[number][2]) for number in fresh]
        flat = torch.empty(sum(box.numel for box in boxes), device=device)
        if rank == owner:
            flat = torch.cat([mine[number].data.flatten() for number in fresh])
        if owner != 0:
            if rank == owner:
                dist.send(flat, 0)
            else:
                dist.recv(flat, owner)
        if rank == 0:
            for number, box, part in zip(fresh, boxes, torch.split(flat, [box.numel for box in boxes]), strict=True):
                key, shape, _ = described[number]
                full.setdefault(key, torch.empty(shape))[box.index] = part.view(box.shape).cpu()
    return full
