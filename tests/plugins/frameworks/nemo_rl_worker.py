"""A stand-in for what calls a checkpoint engine inside NeMo-RL, which needs GPUs and another Python: its base class and workers.

Written from NVIDIA-NeMo/RL at commit 7ea279a (2026-08-22): ``nemo_rl/utils/checkpoint_engines/base.py``,
``nemo_rl/models/policy/workers/checkpoint_engine.py`` and ``nemo_rl/models/generation/vllm/checkpoint_engine.py``. As a program
it is one worker, whose methods a test calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from bits import DTYPES, random_bits

from weightlane.ckpt_engines import WeightlaneError

BACKEND = "weightlane_nemo_rl:WeightlaneCheckpointEngine"
BUCKET_BYTES = 1 << 20
Weights = Iterator[tuple[str, torch.Tensor]]


class CheckpointEngine(ABC):
    shard_expert_weights: bool = False

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Weights) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]: ...


base = ModuleType("nemo_rl.utils.checkpoint_engines.base")
base.CheckpointEngine = CheckpointEngine  # type: ignore[attr-defined]
sys.modules.setdefault(base.__name__, base)


def create_checkpoint_engine(backend: str, *, bucket_size_bytes: int, engine_kwargs: dict[str, Any]) -> Any:
    module, name = backend.split(":", 1)
    return getattr(importlib.import_module(module), name)(bucket_size=bucket_size_bytes, **engine_kwargs)


def weights(step: int) -> dict[str, torch.Tensor]:
    """The tensors of an update: every dtype, many small ones, one larger than a bucket, and views."""
    tensors = {
        f"{place}.{dtype}": random_bits((7, place), dtype, 1000 * step + place) for place, dtype in enumerate(DTYPES)
    }
    tensors |= {f"small.{place}": random_bits((3,), torch.bfloat16, 1000 * step + place) for place in range(1500)}
    large = random_bits((1000, 700), torch.float32, step)
    return tensors | {"large": large, "transposed": large.t(), "scalar": large[0, 0]}


def facts(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Each tensor's dtype, shape, and checksum of its bits."""
    raw = ((name, each, each.contiguous().reshape(-1).view(torch.uint8).numpy()) for name, each in tensors)
    return {name: f"{each.dtype} {each.shape} {hashlib.sha256(data.tobytes()).hexdigest()}" for name, each, data in raw}


class Worker:
    """A policy worker, or a worker inside vLLM."""

    def __init__(self, side: str, rank: str) -> None:
        self.side, self.rank, self.taken = side, int(rank), 0

    def init_checkpoint_engine(self, engine_kwargs: dict[str, Any]) -> None:
        self.engine = create_checkpoint_engine(BACKEND, bucket_size_bytes=BUCKET_BYTES, engine_kwargs=engine_kwargs)

    def prepare_checkpoint_engine(self) -> dict[str, Any]:
        return {**self.engine.prepare(), "rank": self.rank}

    def init_checkpoint_engine_process_group(self, topology: dict[str, Any]) -> None:
        if self.side == "policy":
            self.engine.init_policy_process_group(worker_rank=self.rank, **topology)
        else:
            self.engine.init_rollout_process_group(rollout_rank=self.rank, **topology)

    def update(self, step: int, dying: int | None) -> Any:
        """Send or receive. Returns the received tensors, the number of those that the policy yielded, and the error."""
        received: dict[str, str] = {}
        self.taken = 0
        try:
            asyncio.run(
                self.engine.send_weights(self._generator(step))
                if self.side == "policy"
                else self._receive(received, dying == self.rank)
            )
        except WeightlaneError as error:
            return [received, self.taken, f"{type(error).__name__} {error.peer}"]
        return [received, self.taken, ""]

    def _generator(self, step: int) -> Weights:
        for name, tensor in weights(step).items():
            self.taken += 1
            yield name, tensor

    async def _receive(self, received: dict[str, str], dies: bool) -> None:
        async for batch in self.engine.receive_weight_batches():
            received |= facts(batch)  # vLLM loads a batch before it asks for the next one
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)

    def finalize_checkpoint_engine(self) -> None:
        self.engine.finalize()


if __name__ == "__main__":
    from json_program import serve

    serve(Worker(*sys.argv[1:]))
