"""An engine of verl's on simulated devices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
from waiting import HANG_S


class VerlsEngine:
    """Stands for an engine of verl's, which knows of no events, and works on the thread's current device and stream."""

    receivers: ClassVar[list[SimpleQueue[torch.Tensor]]] = []

    def __init__(self, **_: Any) -> None:
        self.queue = SimpleQueue[torch.Tensor]()

    def prepare(self) -> int:
        self.receivers.append(self.queue)
        return self.receivers.index(self.queue)

    @classmethod
    def build_topology(cls, _trainers: int, _rollouts: int, prepared: list[int]) -> tuple[Any, Any]:
        return {"numbers": [prepared[1:]]}, {"numbers": [[each] for each in prepared[1:]]}

    def init_process_group(self, numbers: list[int]) -> None:
        self.targets = [self.receivers[each] for each in numbers]

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int) -> None:
        for _, tensor in weights:
            for target in self.targets:
                target.put(tensor.cpu())

    async def receive_weights(self, global_steps: int) -> AsyncIterator[tuple[str, torch.Tensor]]:
        device = torch.device("cuda", torch.get_device_module("cuda").current_device())
        yield "bucket", self.queue.get(timeout=HANG_S).to(device)
