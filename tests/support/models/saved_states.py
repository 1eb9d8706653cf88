"""Reads saved training states without weightlane."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def saved_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Weights and moments, put together from all ranks' slices, by ``kind|name``, and the tensors of adapters.

    Every element is in exactly one file.
    """
    slices: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for file in directory.glob("rank-*.safetensors"):
        for key, tensor in load_file(file).items():
            kind, name, starts = key.split("|")
            if kind != "random":
                slices.setdefault(f"{kind}|{name}", []).append(([int(each) for each in starts.split(",")], tensor))
    found: dict[str, torch.Tensor] = {}
    for key, held in slices.items():
        ends = [[start + size for start, size in zip(starts, each.shape, strict=True)] for starts, each in held]
        found[key] = torch.full([max(each) for each in zip(*ends, strict=True)], torch.nan)
        for starts, each in held:
            part = found[key][tuple(slice(start, start + size) for start, size in zip(starts, each.shape, strict=True))]
            assert part.isnan().all(), f"{key} has an element twice"
            part.copy_(each)
        assert not found[key].isnan().any(), f"{key} is not complete"
    adapters = directory / "adapters.safetensors"
    return found | (load_file(adapters) if adapters.exists() else {})
