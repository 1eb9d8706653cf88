"""`RankExchange`: the trainer ranks of a plain script do a step together, over torch.distributed's default group."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import WeightlaneError, as_weightlane_error, error_from_wire


class RankExchange:
    """The trainer ranks, which exchange JSON over torch.distributed's default group. One rank needs no group.

    Args:
        device: Where the group can gather tensors.
    """

    def __init__(self, device: torch.device) -> None:
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1
        self._device = device

    def gather(self, step: Callable[[], Mapping[str, Any] | None]) -> list[dict[str, Any]]:
        """Run `step` on every rank. Returns the ranks' results, in rank order. Collective.

        When it fails anywhere all ranks raise: a rank whose step failed its own error, the others the first rank's.
        """
        result: Mapping[str, Any] | None = None
        own: WeightlaneError | None = None
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - any error must reach the other ranks, which wait for this one
            own = as_weightlane_error(error, f"trainer rank {self.rank}")
        message = {"result": result or {}, "error": own.to_wire() if own else None}
        everything = [json.loads(each) for each in self._all_gather(json.dumps(message).encode())]
        if own is not None:
            raise own
        for each in everything:
            if each["error"] is not None:
                raise error_from_wire(each["error"])
        return [each["result"] for each in everything]

    def _all_gather(self, mine: bytes) -> list[bytes]:
        if self.world == 1:
            return [mine]
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=self._device))
        longest = max(int(size.item()) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)
        everything = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(everything, padded)
        return [bytes(each[: int(size.item())].cpu().numpy()) for each, size in zip(everything, sizes, strict=True)]
