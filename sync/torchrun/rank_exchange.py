"""`RankExchange`: the trainer ranks of a plain script run a step collectively, over torch.distributed's default group."""

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
        device: A device on which the group can gather tensors.
        alone: Whether the other ranks of that group, if there are any, take no part.
    """

    def __init__(self, device: torch.device, *, alone: bool = False) -> None:
        joined = dist.is_initialized() and not alone
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1
        self._device = device

    def gather(self, step: Callable[[], Mapping[str, Any] | None]) -> list[dict[str, Any]]:
        """Run `step` on every rank. Returns the ranks' results, in rank order. Collective.

        If the step fails on any rank, all ranks raise. A rank whose step failed raises its own error; the others raise the error
        of the first failed rank.
        """
        result: Mapping[str, Any] | None = None
        own: WeightlaneError | None = None
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - any error must reach the other ranks, which wait for this one
            own = as_weightlane_error(error, f"trainer rank {self.rank}")
        message = {"result": result or {}, "error": own.to_wire() if own else None}
        mine = json.dumps(message).encode()
        everything = [json.loads(each) for each in ([mine] if self.world == 1 else gathered(mine, self._device))]
        if own is not None:
            raise own
        for each in everything:
            if each["error"] is not None:
                raise error_from_wire(each["error"])
        return [each["result"] for each in everything]


def gathered(mine: bytes, device: torch.device, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """All-gather bytes over `group` (by default all ranks) with tensors on `device`; returns them in rank order. Collective."""

    def all_gather(own: torch.Tensor) -> list[torch.Tensor]:
        everything = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everything, own, group=group)
        return everything

    sizes = [int(size.item()) for size in all_gather(torch.tensor([len(mine)], device=device))]
    if not any(sizes):
        return [b"" for _ in sizes]
    padded = torch.frombuffer(bytearray(mine.ljust(max(sizes))), dtype=torch.uint8).to(device)
    return [bytes(each[:size].cpu().numpy()) for each, size in zip(all_gather(padded), sizes, strict=True)]
