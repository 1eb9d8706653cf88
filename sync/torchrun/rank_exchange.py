"""What the trainer ranks of a plain script tell each other: plain data, over torch.distributed's default group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import WeightlaneError, error_from_wire


class RankExchange:
    """The trainer ranks, which tell each other plain data over torch.distributed's default group. One rank needs no group."""

    def __init__(self, device: torch.device) -> None:
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1
        self._device = device

    def exchange(self, mine: Mapping[str, Any], error: WeightlaneError | None = None) -> list[dict[str, Any]]:
        """What every rank says, in rank order. Collective. Where any rank has an error, all raise the first one."""
        words = json.dumps({"facts": mine, "error": error.to_wire() if error else None}).encode()
        said = [json.loads(each) for each in self._all_gather(words)]
        if error is not None:
            raise error
        for each in said:
            if each["error"] is not None:
                raise error_from_wire(each["error"])
        return [each["facts"] for each in said]

    def _all_gather(self, mine: bytes) -> list[bytes]:
        if self.world == 1:
            return [mine]
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=self._device))
        room = max(int(size.item()) for size in sizes)
        padded = torch.zeros(room, dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)
        everything = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(everything, padded)
        return [bytes(each[: int(size.item())].cpu().numpy()) for each, size in zip(everything, sizes, strict=True)]
